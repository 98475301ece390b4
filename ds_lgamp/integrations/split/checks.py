"""Checks of a split forward, by the arguments that have shown how to split it, where all parameters are here but those
of blocks: what its parts compute depends on nothing that other ranks lack."""

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
from ds_lgamp.runtime.random_state import RandomSource, undisturbed

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
) -> set[Result]:
    """Returns the results of parts ahead of the blocks with whose numbers the output changes other than through hidden
    states: autograd's graph does not lead to those that are detached.

    Args:
        only_loss: whether outputs count only if they depend on hidden states.
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
        return set()
    changed = output(given, other(hidden))
    counted = [not only_loss or not is_alike(*pair) for pair in zip(expected, changed, strict=True)]

    def depends(result: Result) -> bool:
        changed = output({**given, result: other(given[result])}, hidden)
        return any(counts and not is_alike(*pair) for counts, *pair in zip(counted, expected, changed, strict=True))

    return set(filter(depends, given))


def check_travels(split: SplitForward, shown: Survey, random_sources: Sequence[RandomSource]) -> None:
    """Raises ConfigError if the forward gets what travels otherwise than from the parts that return it, such as from a
    hook: autograd's graph does not lead there. Numbers tell less: a last layer may begin with zeros."""
    call = Call(*shown.arguments, shown.returned_ahead)
    with torch.no_grad():
        noted, zeros = split.note_absent(call)
    missed = shown.travels_to_blocks.difference(split.needs_of(call).travels)
    if shown.travels_behind:
        hidden = one(noted.hidden)
        with torch.enable_grad(), undisturbed(random_sources):
            given = random_results(zeros)
            with split.ahead.absent(call.returned, given):
                output = split.output(call, hidden.clone)
        # A hook of a part may have kept what the part would return.
        missed |= shown.travels_behind.difference(() if is_imagined(output) else reached(output, given))
    for result in missed:
        raise ConfigError(
            f"the forward of the model uses what '{result.path}' returned beside hidden states, but gets it from a "
            f"hook or an attribute; with a {BLOCK} block, pass it on in the forward, or write the model as a "
            "PipelineModule"
        )


@torch.no_grad()
def check_parts(
    split: SplitForward, shown: Survey, random_sources: Sequence[RandomSource], on_other_ranks: bool, every_output: bool
) -> None:
    """Runs the parts of the forward again without the modules ahead of the blocks, and with other random numbers there.
    Raises ConfigError if that makes a difference beside the hidden states that enter the first block.

    Args:
        on_other_ranks: whether ranks without these modules compute what blocks get.
        every_output: whether outputs count that depend on no hidden states.
    """
    call = Call(*shown.arguments, shown.returned_ahead)

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
        pairs = zip(tree_leaves(output), tree_leaves(split.output(call, lambda: other(returned()))), strict=True)
        counts = [every_output or not is_alike(*pair) for pair in pairs]

        def counted(output: Any) -> list[Any]:
            return [leaf for leaf, does in zip(tree_leaves(output), counts, strict=True) if does]

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
                if not is_alike(counted(output), counted(split.output(call, returned))):
                    raise ConfigError(f"what the model returns {_DEPENDS}")
