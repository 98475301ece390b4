"""What blocks, or what follows them, compute with beside the hidden states that they get: results of parts ahead of the
blocks, which have to travel with hidden states from the first layer to all others, and code between two blocks."""

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.ahead import NONE, Results, Seen
from ds_lgamp.integrations.split.alike import is_alike
from ds_lgamp.integrations.split.call import Call, Needs, Noted
from ds_lgamp.integrations.split.loss_graph import walk
from ds_lgamp.integrations.split.parts import Result
from ds_lgamp.integrations.split.stand_ins import Passed

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
        behind: the results that the forward needs behind the blocks.
        notes: runs the model's forward where parts and blocks are absent.
    """

    def __init__(self, behind: Collection[Result], notes: Notes) -> None:
        self._behind, self._notes = behind, notes
        self._known: dict[Any, Needs] = {}

    def of(self, call: Call, training: bool, noted: Noted, results: Iterable[Result]) -> Needs:
        """Returns what a call needs whose forward has ``noted`` this, and has these ``results``. All ranks find the
        same.

        Args:
            training: whether the model trains or evaluates.

        Raises ConfigError if a block gets what a block returned that is not the one right before it.
        """
        results = tuple(results)
        arguments = [*call.positional, *call.named.values()]
        key = (
            training,
            tuple(call.named),
            *map(_kind, tree_leaves(arguments)),
            results,
            tuple(noted.entered),
            noted.passes,
        )
        if key not in self._known:
            for_blocks, between = self._find(call)
            needed = {*self._behind, *for_blocks}
            self._known[key] = Needs(tuple(result for result in results if result in needed), between, noted.passes)
        return self._known[key]

    @torch.no_grad()
    def _find(self, call: Call) -> tuple[list[Result], frozenset[int]]:
        """Returns the results on which depends what blocks get, beside the hidden states that the block before them
        returned, and the blocks that get something else of that block: with other numbers there, they get others."""

        def seen(given: Mapping[Result, Tensor], changed: Collection[int] = ()) -> list[Any]:
            noted, _ = self._notes(call, given, lambda index, hidden: (other if index in changed else one)(hidden))
            return [(noted.entered.get(index), block) for index, block in enumerate(noted.blocks)]

        noted, zeros = self._notes(call, NONE, lambda _, hidden: one(hidden))
        given = {result: one(tensor) for result, tensor in zeros.items()}
        expected, blocks = seen(given), range(len(noted.blocks))
        between = set(noted.entered)
        if not is_alike(expected, seen(given, blocks)):
            for changed in blocks:
                found = [*map(is_alike, expected, seen(given, [changed]))]
                if not all(found[changed + 2 :]):
                    raise ConfigError(EARLIER)
                between |= {index for index, alike in enumerate(found) if not alike}
        changed_by = (
            result for result in given if not is_alike(expected, seen({**given, result: other(given[result])}))
        )
        return list(changed_by), frozenset(between)


def uses(noted: Noted, seen: Seen) -> set[Result]:
    """Returns on which of the results that a forward has ``seen`` autograd says that what blocks get depends."""
    if not torch.is_grad_enabled():
        return set()
    given = chain(noted.entered.values(), *((*block.positional, *block.named.values()) for block in noted.blocks))
    # Not by pytree, which takes longer than all else here.
    flat = chain.from_iterable(each if isinstance(each, list | tuple) else (each,) for each in given)
    tensors = [each for each in flat if isinstance(each, Tensor) and type(each) is not Passed and each.requires_grad]
    if not tensors:
        return set()
    nodes = {get_gradient_edge(tensor).node: result for result, tensor in seen.items() if tensor.requires_grad}
    return {nodes[node] for node in walk(tensors, nodes)[0]}


def one(like: Tensor) -> Tensor:
    """Returns random numbers of the shape of a tensor, the same every time."""
    return _random(like, 1)


def other(like: Tensor) -> Tensor:
    """Returns other random numbers than :func:`one`."""
    return _random(like, 2)


def _random(like: Tensor, seed: int) -> Tensor:
    return torch.empty_like(like).normal_(generator=torch.Generator(like.device).manual_seed(seed))


def _kind(leaf: Any) -> Any:
    """Returns what of an argument may decide which code runs. Numbers may change with every call."""
    if isinstance(leaf, Tensor):
        return leaf.dtype
    if isinstance(leaf, int | float):
        return type(leaf), bool(leaf)
    return leaf if isinstance(leaf, str) else type(leaf)
