"""Splits a range of a flattened tensor into boxes, the form that torch.distributed.checkpoint reads and writes."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A box of a tensor. Its elements are consecutive in the flattened tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """Index of the first element in the flattened tensor."""

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Splits the elements ``start`` to ``end`` (exclusive) of a flattened tensor of ``shape`` into as few boxes as
    possible.

    For a matrix these are the rest of a row, full rows and the beginning of a row. Returns the boxes in order; an empty
    range has none.
    """
    return list(_boxes(tuple(shape), start, end, (), 0)) if start < end else []


def _boxes(shape: tuple[int, ...], start: int, end: int, within: tuple[int, ...], base: int) -> Iterator[Box]:
    """Yields the boxes of one subtensor.

    Args:
        shape: sizes of the remaining dimensions.
        start, end: range in the flattened subtensor.
        within: indices in the dimensions before ``shape``.
        base: index of the subtensor's first element in the flattened tensor.
    """
    if len(shape) <= 1:
        offsets, sizes = ((start,), (end - start,)) if shape else ((), ())
        yield Box((*within, *offsets), (*(1 for _ in within), *sizes), base + start)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), end // row
    if first > last:
        # The range lies inside one row.
        yield from _boxes(shape[1:], start - last * row, end - last * row, (*within, last), base + last * row)
        return
    if start < first * row:
        above = first - 1
        yield from _boxes(shape[1:], start - above * row, row, (*within, above), base + above * row)
    if first < last:
        whole = shape[1:]
        yield Box(
            (*within, first, *(0 for _ in whole)), (*(1 for _ in within), last - first, *whole), base + first * row
        )
    if last * row < end:
        yield from _boxes(shape[1:], 0, end - last * row, (*within, last), base + last * row)
