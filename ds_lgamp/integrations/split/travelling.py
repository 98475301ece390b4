"""What blocks, or what follows them, compute with beside the hidden states that they get: results of parts ahead of the
blocks, which have to travel with hidden states from the first layer to all others, and code between two blocks."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.call import Call, Needs, Noted
from ds_lgamp.integrations.split.dependence import is_alike, one, other, random_like, random_results, reached
from ds_lgamp.integrations.split.parts import Result
from ds_lgamp.integrations.split.stand_ins import NONE, Passed, Results

EARLIER = (
    "a block of the model gets what a block returned that is not the one right before it; with a "
    f"{BLOCK} block, write the model as a PipelineModule"
)


Fill = Callable[[int, Tensor], Tensor]
"""Makes the hidden states behind a block, by its number, from those that the forward had there."""


Notes = Callable[[Call, Mapping[Result, Tensor], Fill], tuple[Noted, Results]]
"""Runs a forward up to the last block, with the results that are given, and fills the hidden states behind every block.
Returns what it showed, and all results."""


class Travelling:
    """Knows what travels, and where the forward computes between blocks.

    Args:
        behind: the results that the loss needs behind the blocks, and all that any output does.
        notes: runs the model's forward where parts and blocks are absent.
    """

    def __init__(self, behind: tuple[Collection[Result], Collection[Result]], notes: Notes) -> None:
        self._for_loss, self._for_output = map(set, behind)
        self._notes = notes
        self._known: dict[Any, Needs] = {}

    def of(self, call: Call, noted: Noted, results: Results, trains: bool) -> Needs:
        """Returns what a call needs whose forward has ``noted`` this, and has these ``results``. All ranks find the
        same.

        Args:
            trains: whether the model is in training.

        Raises ConfigError if a block gets what a block returned that is not the one right before it.
        """
        own = {id(tensor): result for result, tensor in results.items()}
        # Which block gets what may depend on values, too, such as the number of a task.
        gets = tuple([own.get(id(each), isinstance(each, Tensor)) for each in _beside(noted)])
        key = trains, call.is_whole, call.signature, tuple(results), tuple(noted.entered), noted.passes, gets
        if key not in self._known:
            for_blocks, between = self._find(call)
            needed = {*(self._for_output if call.is_whole else self._for_loss), *for_blocks}
            self._known[key] = Needs(tuple(result for result in results if result in needed), between, noted.passes)
        return self._known[key]

    def add(self, for_loss: Collection[Result], for_output: Collection[Result]) -> None:
        """Lets more results travel in calls that come."""
        self._for_loss.update(for_loss)
        self._for_output.update(for_output)

    @torch.no_grad()
    def _find(self, call: Call) -> tuple[list[Result], frozenset[int]]:
        """Returns the results on which depends what blocks get, beside the hidden states that the block before them
        returned, and the blocks that get something else of that block: with other numbers there, they get others, or
        autograd's graph leads there. Masks have no graph, and what a mask of this call leaves out has no numbers."""

        def seen(given: Mapping[Result, Tensor], changed: Collection[int] = ()) -> list[Any]:
            noted, _ = self._notes(call, given, lambda index, hidden: _filled(hidden, index, index in changed))
            return [(noted.entered.get(index), block) for index, block in enumerate(noted.blocks)]

        noted, zeros = self._notes(call, NONE, _filled_by_index)
        given = {result: one(tensor) for result, tensor in zeros.items()}
        expected, blocks = seen(given), range(len(noted.blocks))
        between = set(noted.entered)
        if not is_alike(expected, seen(given, blocks)):
            for changed in blocks:
                found = [*map(is_alike, expected, seen(given, [changed]))]
                if not all(found[changed + 2 :]):
                    raise ConfigError(EARLIER)
                between |= {index for index, alike in enumerate(found) if not alike}
        reached = self._reached(call, zeros)
        replaced = {result: {**given, result: other(tensor)} for result, tensor in given.items()}
        needed = [key for key, changed in replaced.items() if key in reached or not is_alike(expected, seen(changed))]
        return needed, frozenset(between)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _reached(self, call: Call, like: Mapping[Result, Tensor]) -> set[Result]:
        """Returns the results to which autograd's graph leads from what blocks get, by their shapes."""
        # Graphs keep no tensors of inference mode.
        call = call.with_arguments(*tree_map_only(Tensor, Tensor.clone, (call.positional, call.named)))
        given = random_results(like)
        # The chunk that runs must save the same tensors when it is recomputed, where this is known.
        with saved_tensors_hooks(_as_it_is, _as_it_is):
            return uses(self._notes(call, given, _filled_by_index)[0], given)


def uses(noted: Noted, results: Mapping[Result, Tensor]) -> set[Result]:
    """Returns the results to which autograd's graph leads from what blocks get."""
    if not torch.is_grad_enabled():
        return set()
    given = (*noted.entered.values(), *_beside(noted))
    tensors = [each for each in given if isinstance(each, Tensor) and type(each) is not Passed and each.requires_grad]
    return reached(tensors, results) if tensors else set()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _beside(noted: Noted) -> Iterator[Any]:
    """Yields what blocks get beside hidden states, also in tuples and lists. Not by pytree, which takes longer than all
    else that is done for a call."""
    for block in noted.blocks:
        for each in block.values:
            if isinstance(each, list | tuple):
                yield from each
            else:
                yield each


def _filled(like: Tensor, index: int, changed: bool) -> Tensor:
    """Returns random numbers for the hidden states behind a block, where its ``index`` and ``changed`` are others,
    others, because a block may get the difference of those behind two blocks."""
    return other(like) * (1 + index) if changed else random_like(like, 3 + index)


def _filled_by_index(index: int, like: Tensor) -> Tensor:
    return _filled(like, index, False)
