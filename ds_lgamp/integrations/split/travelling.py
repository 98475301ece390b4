"""What has to travel with hidden states from the first layer to all others: results of parts ahead of the blocks that
blocks, or what follows them, compute with."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.ahead import NONE, Results
from ds_lgamp.integrations.split.alike import is_alike
from ds_lgamp.integrations.split.call import Call
from ds_lgamp.integrations.split.parts import Result

Fill = Callable[[Tensor], Tensor]
Notes = Callable[[Call, Mapping[Result, Tensor], Fill], tuple[list[Any], Results]]
"""Runs a forward up to the last block, with the results that are given, and fills the hidden states behind every block.
Returns what blocks get beside hidden states, and all results."""


class Travelling:
    """Knows what travels.

    Args:
        behind: the results that the forward needs behind the blocks.
        notes: runs the model's forward where parts and blocks are absent.
    """

    def __init__(self, behind: Collection[Result], notes: Notes) -> None:
        self._behind, self._notes = behind, notes
        self._known: dict[Any, tuple[Result, ...]] = {}

    def of(self, call: Call, results: Iterable[Result]) -> tuple[Result, ...]:
        """Returns what travels in a call whose forward has these ``results``, in their order. All ranks find the same.

        Raises ConfigError if a block gets what an earlier one returned beside its hidden states.
        """
        results = tuple(results)
        leaves, structure = tree_flatten((call.positional, call.named))
        key = str(structure), results, *map(_kind, leaves)
        if key not in self._known:
            needed = {*self._behind, *self._for_blocks(call)} if results else set()
            self._known[key] = tuple(result for result in results if result in needed)
        return self._known[key]

    @torch.no_grad()
    def _for_blocks(self, call: Call) -> list[Result]:
        """Returns the results on which depends what blocks get beside hidden states: with other numbers there, they get
        others."""
        _, zeros = self._notes(call, NONE, one)
        given = {result: one(tensor) for result, tensor in zeros.items()}
        expected, _ = self._notes(call, given, one)
        if not is_alike(expected, self._notes(call, given, other)[0]):
            raise ConfigError(
                f"a block of the model gets what an earlier one returned, beside its hidden states; with a {BLOCK} "
                "block, write the model as a PipelineModule"
            )
        return [
            result
            for result, tensor in given.items()
            if not is_alike(expected, self._notes(call, {**given, result: other(tensor)}, one)[0])
        ]


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
    return (type(leaf), bool(leaf)) if isinstance(leaf, int | float) else str(leaf)
