"""Checks of a split forward, by the arguments that have shown how to split it, where all parameters are here but those
of blocks: what its parts compute depends on nothing that other ranks lack."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.alike import is_alike
from ds_lgamp.integrations.split.call import Call
from ds_lgamp.integrations.split.forward import SplitForward
from ds_lgamp.integrations.split.imagined import is_imagined
from ds_lgamp.integrations.split.parts import Result
from ds_lgamp.integrations.split.survey import Survey
from ds_lgamp.integrations.split.travelling import one, other, random_results, reached
from ds_lgamp.runtime.recompute import RandomSource, undisturbed

_DEPENDS = (
    "depends on random numbers that its forward draws ahead of the blocks, on values of modules there, or on what an "
    f"earlier call left, but with a {BLOCK} block that code runs several times; give the engine random numbers as "
    "arguments, and compute masks from arguments"
)


@torch.no_grad()
def check_imagined(split: SplitForward, shown: Survey) -> None:
    """Raises ConfigError if ranks without the parts ahead of the blocks cannot know the shapes of what these return."""
    split.note_absent(Call(*shown.arguments))


@torch.no_grad()
def results_behind(
    split: SplitForward, shown: Survey, random_sources: Sequence[RandomSource], only_loss: bool
) -> tuple[set[Result], set[Result]]:
    """Returns the results of parts ahead of the blocks with whose numbers the loss changes other than through hidden
    states, and those with which any output does: autograd's graph does not lead to those that are detached.

    Args:
        only_loss: whether training needs only outputs that depend on hidden states, as the loss does.
    """
    call = Call(*shown.arguments, shown.returned_ahead)
    noted, zeros = split.note_absent(call)
    given = {result: one(tensor) for result, tensor in zeros.items()}

    def output(given: Mapping[Result, Tensor], hidden: Tensor) -> list[Any]:
        with undisturbed(random_sources), split.ahead.absent(call.returned, given):
            return tree_leaves(split.output(call, hidden.clone))

    hidden = one(noted.hidden)
    expected = output(given, hidden)
    if is_imagined(expected):
        return set(), set()

    def differ(given: Mapping[Result, Tensor], hidden: Tensor) -> list[bool]:
        return [not is_alike(*pair) for pair in zip(expected, output(given, hidden), strict=True)]

    changed = {result: differ({**given, result: other(given[result])}, hidden) for result in given}
    of_loss = differ(given, other(hidden)) if only_loss else [True] * len(expected)
    for_loss = {result for result, leaves in changed.items() if any(map(operator.and_, leaves, of_loss))}
    return for_loss, {result for result, leaves in changed.items() if any(leaves)}


def check_travels(split: SplitForward, shown: Survey, random_sources: Sequence[RandomSource]) -> None:
    """Raises ConfigError if the forward gets what travels otherwise than from the parts that return it, such as from a
    hook: autograd's graph does not lead there. Numbers tell less: a last layer may begin with zeros."""
    call = Call(*shown.arguments, shown.returned_ahead, is_whole=True)
    with torch.no_grad():
        noted, zeros = split.note_absent(call)
    missed = shown.travels_to_blocks.difference(split.needs_of(call).travels)
    if shown.travels_to_output:
        hidden = one(noted.hidden)
        with torch.enable_grad(), undisturbed(random_sources):
            given = random_results(zeros)
            with split.ahead.absent(call.returned, given):
                output = split.output(call, hidden.clone)
        # A hook of a part may have kept what the part would return.
        missed |= shown.travels_to_output.difference(() if is_imagined(output) else reached(output, given))
    for result in missed:
        raise ConfigError(
            f"the forward of the model uses what '{result.path}' returned beside hidden states, but gets it from a "
            f"hook or an attribute; with a {BLOCK} block, pass it on in the forward, or write the model as a "
            "PipelineModule"
        )


@torch.no_grad()
def check_parts(
    split: SplitForward, shown: Survey, random_sources: Sequence[RandomSource], on_other_ranks: bool
) -> None:
    """Runs the parts of the forward again without the modules ahead of the blocks, and with other random numbers there.
    Raises ConfigError if that makes a difference beside the hidden states that enter the first block.

    Args:
        on_other_ranks: whether ranks without these modules compute what blocks get.
    """
    call = Call(*shown.arguments, shown.returned_ahead, is_whole=True)

    def seed(number: int) -> None:
        for source in random_sources:
            source.seed(number)

    def returned() -> Tensor:
        # Behind the blocks, numbers are drawn once.
        seed(0)
        return noted.hidden.clone()

    def entering(number: int) -> list[Any]:
        """Returns what blocks get ahead of which their layers compute. Only what is drawn ahead of the first block
        depends on ``number``."""

        def fill(_: int, hidden: Tensor) -> Tensor:
            seed(0)
            return one(hidden)

        seed(number)
        noted, _ = split.note_absent(call, given, fill)
        return [(noted.entered.get(index), noted.blocks[index]) for index in sorted(needs.between)]

    with undisturbed(random_sources):
        seed(1)
        noted, seen = split.note_present(call)
        needs = split.needs_of(call)
        given = {result: seen.take(result) for result in needs.travels}
        output = split.output(call, returned)
        if is_imagined(output):
            return
        # A loss is one number, which may be almost the same by chance.
        for number in (2, 3):
            seed(number)
            if on_other_ranks or given:
                again, _ = split.note_absent(call, given)
                for index, (own, others) in enumerate(zip(noted.blocks, again.blocks, strict=True)):
                    if index not in needs.between and not is_alike(own, others):
                        raise ConfigError(f"what blocks get beside hidden states {_DEPENDS}")
            if needs.between and not is_alike(entering(1), entering(number)):
                raise ConfigError(f"what blocks get {_DEPENDS}")
            seed(number)
            with split.ahead.absent(call.returned, given):
                if not is_alike(output, split.output(call, returned)):
                    raise ConfigError(f"what the model returns {_DEPENDS}")
