"""What a rank has of each tensor: ranges of weights and optimizer state by the global names of parameters, which every
layout shares, in the form that torch.distributed.checkpoint takes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.names import OPTIMIZER, parameter_name, parse, state_name
from ds_lgamp.checkpoint.values import UnsupportedValue, decode, encode
from ds_lgamp.partition.quantised import is_packed
from ds_lgamp.partition.shards import Segment, code_of_zero, elements_of, is_spread
from ds_lgamp.partition.unit import Part, Unit, parts_of
from ds_lgamp.partition.zero_partition import ZeroPartition


class FlatShard:
    """A range of a flattened tensor. Implements torch.distributed.checkpoint's protocol for tensors of which a rank
    holds parts.

    Args:
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


_OF_DEVICE = ("params", "fused", "capturable")
"""Options of a parameter group that another run cannot give to this one."""


class Range(NamedTuple):
    """Consecutive elements of a parameter in this rank's shard."""

    part: Part
    in_shard: slice
    start: int
    """Where the first element lies in the flattened parameter."""

    def of(self, values: torch.Tensor, first: int = 0, block: int = 1) -> FlatShard:
        """Returns the range of ``values``, which hold the shard from element ``first`` on. Each is of a ``block`` of
        elements, of which the parameter's last one may be short."""
        part, start, stop = self.part, self.in_shard.start - first, self.in_shard.stop - first
        if block > 1:
            shape = blocks_of(part.shape, block)
            return FlatShard(shape, self.start // block, values[start // block : -(-stop // block)])
        return FlatShard(part.shape, self.start, values[start:stop], part.whole_shape, part.slice_offsets)


def blocks_of(shape: Sequence[int], block: int) -> list[int]:
    """Returns the shape of what a parameter of ``shape`` has one of for each ``block`` of elements."""
    return [*shape] if block == 1 else [-(-prod(shape) // block)]


def ranges_of_shard(unit: Unit) -> Iterator[Range]:
    """Yields every element of this rank's shard, by parameter."""
    for part in parts_of(unit):
        if part.numel:
            yield Range(part, part.in_shard, part.in_parameter.start)


def ranges_to_write(unit: Unit) -> Iterator[Range]:
    """Yields the elements that this rank writes to a checkpoint.

    One rank writes each element of the model, even if several hold it: all data-parallel ranks at stage 0, or the
    pipeline ranks of a tied unit.
    """
    if not unit.master.counts_in_norm:
        return
    copy, copies = unit.policy.copies
    share = unit.storage.shard.numel() // copies
    first = copy * share
    first_slice = unit.policy.is_first_tensor_rank
    for part, in_shard, start in ranges_of_shard(unit):
        if not first_slice and part.shape == part.whole_shape:
            continue
        begin, end = max(in_shard.start, first), min(in_shard.stop, first + share)
        if begin < end:
            yield Range(part, slice(begin, end), start + begin - in_shard.start)


def weights(partition: ZeroPartition, exclude_frozen: bool = False) -> dict[str, FlatShard]:
    """Returns the parameters that this rank writes. Of half-precision weights it writes the master weights, since the
    weights are these rounded."""
    units = [unit for unit in partition.units if unit.trains or not exclude_frozen]
    return {parameter_name(r.part.name): r.of(unit.master.values) for unit in units for r in ranges_to_write(unit)}


def optimizer_tensors(partition: ZeroPartition, optimizer: torch.optim.Optimizer) -> dict[str, FlatShard]:
    """Returns the optimizer state with a value for every element or block, as far as this rank writes it."""
    tensors = {}
    for unit in partition.units:
        for r in ranges_to_write(unit):
            segment = r.part.segment
            if segment is not None:
                for key, value in spread(optimizer, segment).items():
                    tensors[state_name(key, r.part.name)] = r.of(value, segment.start, elements_of(key))
    return tensors


class Scalars(NamedTuple):
    """The optimizer's state without a value for every element, such as the number of steps, encoded."""

    scalars: dict[int, dict[str, Any]]
    """By group. It is the same for all parameters of a group, which step together."""
    of_parameters: dict[str, dict[str, Any]]
    """By name, of the parameters that count their steps by themselves."""


def scalars_of(states: Iterable[tuple[Segment, Mapping[str, Any]]]) -> Scalars:
    """Returns the scalars in the state of every segment. Raises CheckpointError if it has a value that a checkpoint
    cannot hold."""
    found = Scalars({}, {})
    for segment, state in states:
        try:
            own = {key: encode(value) for key, value in state.items() if not is_spread(key, value, segment.shard)}
        except UnsupportedValue as error:
            raise CheckpointError(f"the optimizer's state holds {error}") from None
        if segment.entry is None:
            found.scalars[segment.group] = own
        else:
            found.of_parameters[segment.entry.name] = own
    return found


def spread(optimizer: torch.optim.Optimizer, segment: Segment) -> dict[str, torch.Tensor]:
    """Returns the optimizer state of ``segment`` with a value for every element or block."""
    state = optimizer.state.get(segment.shard, {})
    return {key: value for key, value in state.items() if is_spread(key, value, segment.shard)}


class Loading:
    """Holds the values of this rank's shards that are read from a checkpoint, until all ranks have read theirs. Of what
    lies on a disk, it holds them there.

    Args:
        partition: the units to load.
        tensors: the names and dtypes of the tensors in the checkpoint.
    """

    def __init__(self, partition: ZeroPartition, tensors: Mapping[str, torch.dtype]) -> None:
        self._partition, self._tensors, self._host = partition, tensors, partition.host
        self._masters: list[tuple[Unit, torch.Tensor]] = []
        self._states: list[dict[str, torch.Tensor]] = []
        self.targets: dict[str, FlatShard] = {}
        """The ranges to read, by their names in the checkpoint."""

    def add_weights(self) -> None:
        """Prepares to read weights. Parameters that the checkpoint lacks keep their values."""
        for unit in self._partition.units:
            own = unit.master.values
            room = None if self._host is None else self._host.room_beside(own)
            values = own.detach().to("cpu", copy=True) if room is None else room.copy_(own)
            self._masters.append((unit, values))
            for entry in unit.storage.parameters:
                dtype = self._tensors.get(parameter_name(entry.name), values.dtype)
                if dtype != values.dtype and (is_packed(entry.parameter) or not dtype.is_floating_point):
                    raise CheckpointError(
                        f"{entry.name} is {dtype} there, {values.dtype} here; quantise the model as it was"
                    )
            self._add(parameter_name, ranges_of_shard(unit), values)

    def add_optimizer(self) -> None:
        for unit in self._partition.units:
            for segment in unit.master.segments:
                ranges = [r for r in ranges_of_shard(unit) if segment.start <= r.in_shard.start < segment.end]
                self._states.append({key: self._add_state(key, segment, ranges) for key in self._keys(ranges)})

    def _keys(self, ranges: list[Range]) -> list[str]:
        names = {r.part.name for r in ranges}
        return sorted({key for kind, name, key in map(parse, self._tensors) if kind == OPTIMIZER and name in names})

    def _add_state(self, key: str, segment: Segment, ranges: list[Range]) -> torch.Tensor:
        name_of = partial(state_name, key)
        names = (name_of(r.part.name) for r in ranges)
        dtype = next(self._tensors[name] for name in names if name in self._tensors)
        size, block = segment.end - segment.start, elements_of(key)
        if self._host is not None and self._host.on_disk.optimizer:
            values = self._host.empty(size, dtype, self._host.on_disk.optimizer).zero_()
        else:
            # Files lack what stands between parameters, with which a block may share its scale.
            values = torch.full((size // block,), code_of_zero(key, dtype), dtype=dtype, device="cpu")
        self._add(name_of, ranges, values, segment.start, block)
        return values

    def _add(
        self,
        name_of: Callable[[str], str],
        ranges: Iterable[Range],
        values: torch.Tensor,
        first: int = 0,
        block: int = 1,
    ) -> None:
        for r in ranges:
            name = name_of(r.part.name)
            if name in self._tensors:
                self.targets[name] = r.of(values, first, block)

    def commit_weights(self) -> None:
        """Makes what was read the weights. All data-parallel ranks call it together."""
        for unit, values in self._masters:
            unit.replace_shard(values)

    def commit_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        groups: list[dict[str, Any]],
        scalars: list[dict[str, Any]],
        of_parameters: Mapping[str, dict[str, Any]],
    ) -> None:
        """Makes what was read the optimizer's state.

        Args:
            optimizer: steps on the partition's segments.
            groups: options of the parameter groups; options that are missing keep their values.
            scalars: by group, the encoded state without a value for every element.
            of_parameters: the same of parameters that have a segment of their own, by name.
        """
        present = optimizer.state_dict()["param_groups"]
        shards = (shard for group in optimizer.param_groups for shard in group["params"])
        indices = {id(shard): index for index, shard in enumerate(shards)}
        state = {}
        for segment, tensors in zip(self._partition.segments(), self._states):
            own, alone = scalars[segment.group], False
            if segment.entry is not None and segment.entry.name in of_parameters:
                own, alone = of_parameters[segment.entry.name], True
            # Parameters that the checkpoint lacks begin anew and count their steps from there.
            if tensors or (own and (alone or not any(self._states))):
                # Decoded for each segment: an optimizer counts in the tensors it is given.
                state[indices[id(segment.shard)]] = {**decode(own), **tensors}
        merged = [with_own_kernels(group, mine) for group, mine in zip(groups, present)]
        optimizer.load_state_dict({"state": state, "param_groups": merged})


def with_own_kernels(group: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a saved ``group``, with this run's parameters and its options that depend on the device.
    Options that are missing keep their values."""
    return {**own, **group, **{key: own[key] for key in _OF_DEVICE if key in own}}
