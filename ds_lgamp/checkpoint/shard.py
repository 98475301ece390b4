"""Adapts this rank's range of a tensor to torch.distributed.checkpoint."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class FlatShard:
    """A range of a flattened tensor. Implements torch.distributed.checkpoint's protocol for tensors of which a rank
    holds parts.

    Args:
        shape: shape of the tensor.
        start: index of the range's first element in the flattened tensor.
        values: the range [numel], on any device; not copied.
        whole_shape: shape of the whole tensor if this tensor is a slice; None if it is not.
        slice_offsets: offsets of the slice in the whole tensor.
    """

    def __init__(
        self,
        shape: Sequence[int],
        start: int,
        values: torch.Tensor,
        whole_shape: Sequence[int] | None = None,
        slice_offsets: Sequence[int] | None = None,
    ) -> None:
        self.shape = torch.Size(shape)
        self.start = start
        self.values = values
        self.whole_shape = self.shape if whole_shape is None else torch.Size(whole_shape)
        self.slice_offsets = slice_offsets or (0,) * len(self.shape)
        self._boxes = {}
        for box in boxes(shape, start, start + values.numel()):
            self._boxes[tuple(map(sum, zip(self.slice_offsets, box.offsets)))] = box

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "FlatShard":
        """The same range with what ``function`` makes of the values."""
        return FlatShard(self.shape, self.start, function(self.values), self.whole_shape, self.slice_offsets)

    def has_part(self, offsets: Sequence[int]) -> bool:
        """Whether a part of the range begins at ``offsets`` of the tensor."""
        return tuple(offsets) in self._boxes

    def __create_write_items__(self, name: str, shard: "FlatShard") -> list[WriteItem]:
        properties = TensorProperties(dtype=self.values.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.whole_shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(box.sizes)) for offsets, box in self._boxes.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None, "parts are asked for by where they begin"
        box = self._boxes[tuple(index.offset)]
        first = box.start - self.start
        return self.values[first : first + box.numel].view(box.sizes)


class ShardGroup:
    """Several ranges of one tensor, which do not overlap. Replaces them as :class:`FlatShard` does one."""

    def __init__(self, shards: Sequence[FlatShard]) -> None:
        self.shards = shards

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "ShardGroup":
        """The same ranges with what ``function`` makes of the values of each."""
        return ShardGroup([shard.mapped(function) for shard in self.shards])

    def __create_write_items__(self, name: str, group: "ShardGroup") -> list[WriteItem]:
        return [item for shard in self.shards for item in shard.__create_write_items__(name, shard)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for shard in self.shards for chunk in shard.__create_chunk_list__()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None, "parts are asked for by where they begin"
        shard = next(shard for shard in self.shards if shard.has_part(index.offset))
        return shard.__get_tensor_shard__(index)


Ranges = FlatShard | ShardGroup
"""What a rank has of a tensor."""


def host_copies(tensors: Mapping[str, Ranges]) -> dict[str, Ranges]:
    """Copies the ranges to host memory, pinned if they are on a device. The copies are complete on return."""
    devices = set()

    def copied(values: torch.Tensor) -> torch.Tensor:
        on_device = values.device.type != "cpu"
        copy = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=on_device)
        copy.copy_(values, non_blocking=True)
        if on_device:
            devices.add(values.device)
        return copy

    copies = {name: ranges.mapped(copied) for name, ranges in tensors.items()}
    for device in devices:
        torch.get_device_module(device).synchronize(device)
    return copies


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
