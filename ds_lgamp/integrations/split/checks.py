"""Checks, by the arguments that have shown how to split a forward, that what its parts compute depends on nothing that
other ranks lack. All parameters are here except those of blocks."""

import operator
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.call import Call, Survey
from ds_lgamp.integrations.split.forward import SplitForward
from ds_lgamp.integrations.split.imagined import Imagined, UnknownShape, is_imagined
from ds_lgamp.integrations.split.parts import Result
from ds_lgamp.integrations.split.stand_ins import PlaceholderUsed
from ds_lgamp.integrations.split.travelling import (
    Uses,
    is_alike,
    numbers_like,
    other_numbers_like,
    random_results,
    reached,
)

_DEPENDS = (
    "depends on random numbers that its forward draws before the blocks, on values of modules there, or on what an "
    f"earlier call left, but with a {BLOCK} block that code runs several times; give the engine random numbers as "
    "arguments, and compute masks from arguments"
)


@torch.no_grad()
def results_after(split: SplitForward, shown: Survey) -> tuple[set[Result], set[Result]]:
    """Returns the results of parts before the blocks with whose numbers the loss changes other than through hidden
    states, and the results with which any output changes: autograd's graph does not lead to detached ones. Where only
    the loss counts, so do outputs that depend on hidden states, as the loss does."""
    call = Call(*shown.arguments, shown.shapes_before)
    run, zeros = split.dry_run_without_parts(call)
    given = {result: numbers_like(tensor) for result, tensor in zeros.items()}

    def output(given: Mapping[Result, Tensor], hidden: Tensor) -> list[Any]:
        with split.original.undisturbed(), split.parts_before.absent(call.shapes, given):
            return tree_leaves(split.output(call, hidden.clone))

    hidden = numbers_like(run.hidden)
    expected = output(given, hidden)
    if is_imagined(expected):
        return set(), set()

    def differ(given: Mapping[Result, Tensor], hidden: Tensor) -> list[bool]:
        return [not is_alike(*pair) for pair in zip(expected, output(given, hidden), strict=True)]

    changed = {result: differ({**given, result: other_numbers_like(given[result])}, hidden) for result in given}
    of_loss = differ(given, other_numbers_like(hidden)) if split.loss_in is not None else [True] * len(expected)
    for_loss = {result for result, leaves in changed.items() if any(map(operator.and_, leaves, of_loss))}
    return for_loss, {result for result, leaves in changed.items() if any(leaves)}


def check_travels(split: SplitForward, shown: Survey) -> None:
    """Raises ConfigError if the forward gets what travels otherwise than from the parts that return it, such as from a
    hook: autograd's graph does not lead there. Numbers show less: a last layer may begin with zeros."""
    call = Call(*shown.arguments, shown.shapes_before, is_whole=True)
    with torch.no_grad():
        run, zeros = split.dry_run_without_parts(call)
    missing = shown.travels_to_blocks.difference(split.needs_of(call).travels)
    if shown.travels_to_output:
        hidden = numbers_like(run.hidden)
        with torch.enable_grad(), split.original.undisturbed():
            given = random_results(zeros)
            with split.parts_before.absent(call.shapes, given):
                output = split.output(call, hidden.clone)
        # A hook of a part may have kept what the part would return.
        missing |= shown.travels_to_output.difference(() if is_imagined(output) else reached(output, given.items())[0])
    for result in missing:
        raise ConfigError(
            f"the forward of the model uses what '{result.path}' returned besides hidden states, but gets it from a "
            f"hook or an attribute; with a {BLOCK} block, pass it on in the forward, or write the model as a "
            "PipelineModule"
        )


@torch.no_grad()
def check_parts(split: SplitForward, shown: Survey) -> None:
    """Runs the parts of the forward again without the modules before the blocks, and with other random numbers there.
    Raises ConfigError if that makes a difference besides the hidden states that enter the first block."""
    call, original = Call(*shown.arguments, shown.shapes_before, is_whole=True), split.original

    def returned() -> Tensor:
        # After the blocks, numbers are drawn once.
        original.seed(0)
        return run.hidden.clone()

    def entering(number: int) -> list[Any]:
        """Returns what blocks get before which their layers compute. Only what is drawn before the first block depends
        on ``number``."""

        def fill(_: int, hidden: Tensor) -> Tensor:
            original.seed(0)
            return numbers_like(hidden)

        original.seed(number)
        run, _ = split.dry_run_without_parts(call, given, fill)
        return [(run.entries.get(index), run.blocks[index]) for index in sorted(needs.between)]

    with original.undisturbed():
        original.seed(1)
        run, results = split.dry_run(call)
        needs = split.needs_of(call)
        given = {result: results.take(result) for result in needs.travels}
        output = split.output(call, returned)
        if is_imagined(output):
            return
        # A loss is one number, which may be almost the same by chance.
        for number in (2, 3):
            original.seed(number)
            # Otherwise no rank without these modules computes what blocks get.
            if original.on_several_ranks or given:
                again, _ = split.dry_run_without_parts(call, given)
                for index, pair in enumerate(zip(run.blocks, again.blocks, strict=True)):
                    if index not in needs.between and not is_alike(*pair):
                        raise ConfigError(f"what blocks get besides hidden states {_DEPENDS}")
            if needs.between and not is_alike(entering(1), entering(number)):
                raise ConfigError(f"what blocks get {_DEPENDS}")
            original.seed(number)
            with split.parts_before.absent(call.shapes, given):
                if not is_alike(output, split.output(call, returned)):
                    raise ConfigError(f"what the model returns {_DEPENDS}")


def check_foreign(split: SplitForward, shown: Survey) -> None:
    """Raises ConfigError if a block computes with a tensor that the forward made outside of it and did not pass to it.
    Works for models too large to compute: blocks run with imagined tensors for their arguments, parameters and buffers,
    so a real tensor has come another way. A block that cannot be imagined is not checked."""
    call = Call(*shown.arguments)
    with split.original.undisturbed():
        with torch.no_grad(), _NewTensors() as new:
            run, _ = split.dry_run(call)
        hidden = run.hidden
        for index, (block, others) in enumerate(zip(split.blocks, run.blocks, strict=True)):
            hidden = run.entries.get(index, hidden)
            assert others.autocast is not None, "found with the arguments"
            foreign: list[Tensor] = []

            def use(tensor: Tensor, foreign: list[Tensor] = foreign) -> None:
                if not isinstance(tensor, FakeTensor) and tensor in new:
                    foreign.append(tensor)

            with suppress(UnknownShape, PlaceholderUsed):
                # The block's own tensors are copies, so that none of them counts as made outside.
                positional, named, attributes = tree_map_only(
                    Tensor, torch.clone, (others.after(hidden), dict(others.named), dict(others.attributes))
                )
                split.attributes.set(index, attributes)
                with others.autocast.entered(), Uses(use):
                    Imagined(block)(positional, named)
            if foreign:
                raise ConfigError(
                    f"block {index} computes with a tensor of shape {[*foreign[-1].shape]} that the forward of the "
                    "model made and did not give it as an argument, but left in a global, a context variable, a "
                    f"closure, or an attribute of another object; with a {BLOCK} block, pass it as an argument"
                )


class _NewTensors(TorchDispatchMode):
    """Collects all tensors that are made."""

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
