"""A range of a flattened tensor as boxes, which is what torch.distributed.checkpoint reads and writes."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A box of a tensor whose elements follow one another in the flattened tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """Of its first element in the flattened tensor."""

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """The elements ``start`` to ``end`` of a flattened tensor of ``shape``, in order, as few boxes as that takes: of a
    matrix the rest of a row, full rows, the beginning of a row."""
    return list(_boxes(tuple(shape), start, end, (), 0)) if start < end else []


def _boxes(shape: tuple[int, ...], start: int, end: int, within: tuple[int, ...], base: int) -> Iterator[Box]:
    """``within`` are the indices of the dimensions before ``shape``, ``base`` is where its first element lies."""
    if len(shape) <= 1:
        offsets, sizes = ((start,), (end - start,)) if shape else ((), ())
        yield Box((*within, *offsets), (*(1 for _ in within), *sizes), base + start)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), end // row
    if first > last:
        # All inside one row.
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
