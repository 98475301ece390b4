"""Checks of a split forward, by the arguments that have shown how to split it, where all parameters are here but those
of blocks: what its parts compute depends on nothing that other ranks lack."""

import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.call import Call
from ds_lgamp.integrations.split.dependence import is_alike, one, other, random_results, reached
from ds_lgamp.integrations.split.forward import SplitForward
from ds_lgamp.integrations.split.imagined import Imagined, UnknownShape, is_imagined
from ds_lgamp.integrations.split.parts import Result
from ds_lgamp.integrations.split.stand_ins import Touched
from ds_lgamp.integrations.split.survey import Survey
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


def check_foreign(
    split: SplitForward, blocks: Sequence[nn.Module], shown: Survey, random_sources: Sequence[RandomSource]
) -> None:
    """Raises ConfigError if a block computes with a tensor that the forward made outside of it, and that is none of its
    arguments. A block that cannot be imagined is not looked at."""
    call = Call(*shown.arguments)
    with undisturbed(random_sources):
        with torch.no_grad(), _Made() as made:
            noted, _ = split.note_present(call)
        hidden = noted.hidden
        for index, (block, beside) in enumerate(zip(blocks, noted.blocks, strict=True)):
            hidden = noted.entered.get(index, hidden)
            assert beside.autocast is not None, "noted with the arguments"
            foreign = _Foreign(made)
            with suppress(UnknownShape, Touched):
                # The block's own tensors are copies, which none of those is that were made.
                positional, named, attributes = tree_map_only(
                    Tensor, torch.clone, ((hidden, *beside.positional), dict(beside.named), dict(beside.attributes))
                )
                split.attributes.set(index, attributes)
                with beside.autocast.entered(), foreign:
                    Imagined(block)(positional, named)
            if foreign.found is not None:
                raise ConfigError(
                    f"block {index} computes with a tensor of shape {[*foreign.found.shape]} that the forward of the "
                    "model made and did not give it as an argument, but left in a global, a context variable, a "
                    f"closure, or an attribute of another object; with a {BLOCK} block, pass it as an argument"
                )


class _Made(TorchDispatchMode):
    """Notes all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, Tensor] = {}
        """One by storage. While they live, no other one gets it."""

    def __torch_dispatch__(self, function: Any, types: Any, positional: Any = (), named: Any = None) -> Any:
        result = function(*positional, **(named or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._tensors.setdefault(leaf.untyped_storage()._cdata, leaf)
        return result

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._tensors


class _Foreign(TorchFunctionMode):
    """Finds a tensor among those ``made`` with which functions compute."""

    def __init__(self, made: _Made) -> None:
        super().__init__()
        self._made = made
        self.found: Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, positional: Any = (), named: Any = None) -> Any:
        named = named or {}
        result = function(*positional, **named)
        # Whoever asks for a shape or a device computes with no values.
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            for leaf in tree_leaves((positional, named)):
                if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) and leaf in self._made:
                    self.found = leaf
        return result
