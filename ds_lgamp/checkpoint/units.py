"""Names the weights and optimizer state of a partition by global parameter names, which are the same at every
layout."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ds_lgamp.checkpoint.errors import CheckpointError
from ds_lgamp.checkpoint.shard import FlatShard
from ds_lgamp.checkpoint.values import UnsupportedValue, decode, encode
from ds_lgamp.partition.parts import Part, parts_of
from ds_lgamp.partition.unit import Segment, Unit
from ds_lgamp.partition.zero_partition import ZeroPartition

PARAMETERS, OPTIMIZER, BUFFERS, RANKS = "parameters", "optimizer", "buffers", "ranks"
"""First parts of tensor names in a checkpoint."""


class Range(NamedTuple):
    """Elements of a parameter that are consecutive in this rank's shard."""

    part: Part
    in_shard: slice
    start: int
    """Index of the first element in the flattened parameter."""

    def of(self, values: torch.Tensor, first: int = 0) -> FlatShard:
        """Returns this range of ``values``, which hold the shard from element ``first`` on."""
        part, within = self.part, slice(self.in_shard.start - first, self.in_shard.stop - first)
        return FlatShard(part.shape, self.start, values[within], part.whole_shape, part.slice_offsets)


def held(unit: Unit) -> Iterator[Range]:
    """Yields all ranges that this rank's shard holds."""
    for part in parts_of(unit):
        if part.numel:
            yield Range(part, part.in_shard, part.in_parameter.start)


def written(unit: Unit) -> Iterator[Range]:
    """Yields the ranges that this rank writes to a checkpoint.

    Exactly one rank writes every element of the model. This also holds at stage 0, where all data-parallel ranks hold
    every element, and for a tied unit, which several pipeline ranks hold.
    """
    if not unit.counts_in_norm:
        return
    ranks, rank = unit.data_group.size(), unit.data_group.rank()
    share = unit.flat.numel() // ranks
    first = rank * share - unit.shard_start
    first_slice = unit.tensor_group is None or unit.tensor_group.rank() == 0
    for part, in_shard, start in held(unit):
        if not first_slice and part.shape == part.whole_shape:
            continue
        begin, end = max(in_shard.start, first), min(in_shard.stop, first + share)
        if begin < end:
            yield Range(part, slice(begin, end), start + begin - in_shard.start)


def weights(partition: ZeroPartition) -> dict[str, FlatShard]:
    """Returns the parameters that this rank writes: master weights where they exist. Weights in a smaller type are
    rounded from them."""
    return {f"{PARAMETERS}/{r.part.name}": r.of(unit.master) for unit in partition.units for r in written(unit)}


def optimizer_tensors(partition: ZeroPartition, optimizer: torch.optim.Optimizer) -> dict[str, FlatShard]:
    """Returns the optimizer state that this rank writes and that has one value per element."""
    tensors = {}
    for unit in partition.units:
        for r in written(unit):
            segment = r.part.segment
            if segment is not None:
                for key, value in _elementwise(optimizer, segment).items():
                    tensors[f"{OPTIMIZER}/{key}/{r.part.name}"] = r.of(value, segment.start)
    return tensors


def optimizer_scalars(partition: ZeroPartition, optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Returns the other optimizer state, such as the number of steps, encoded, by group.

    The parameters of a group step together, so they share it. Raises CheckpointError if a checkpoint cannot hold a
    value.
    """
    scalars: dict[int, dict[str, Any]] = {}
    for segment in partition.segments():
        elementwise = _elementwise(optimizer, segment)
        state = optimizer.state.get(segment.shard, {})
        try:
            scalars[segment.group] = {key: encode(value) for key, value in state.items() if key not in elementwise}
        except UnsupportedValue as error:
            raise CheckpointError(f"the optimizer's state holds {error}") from None
    return scalars


def _elementwise(optimizer: torch.optim.Optimizer, segment: Segment) -> dict[str, torch.Tensor]:
    return {
        key: value
        for key, value in optimizer.state.get(segment.shard, {}).items()
        if isinstance(value, torch.Tensor) and value.shape == segment.shard.shape
    }


class Loading:
    """Buffers what this rank reads from a checkpoint until all ranks have read their shards.

    Args:
        partition: the partition to load into.
        tensors: data types of the checkpoint's tensors, by name.
    """

    def __init__(self, partition: ZeroPartition, tensors: Mapping[str, torch.dtype]) -> None:
        self._partition, self._tensors = partition, tensors
        self._masters: list[tuple[Unit, torch.Tensor]] = []
        self._states: list[dict[str, torch.Tensor]] = []
        self.targets: dict[str, FlatShard] = {}
        """The ranges to read, by name in the checkpoint."""

    def add_weights(self) -> None:
        """Adds all weights. Parameters that the checkpoint lacks keep their values."""
        for unit in self._partition.units:
            values = unit.master.detach().to("cpu", copy=True)
            self._masters.append((unit, values))
            self._add(PARAMETERS, held(unit), values)

    def add_optimizer(self) -> None:
        for unit in self._partition.units:
            for segment in unit.segments:
                ranges = [r for r in held(unit) if segment.start <= r.in_shard.start < segment.end]
                self._states.append({key: self._add_state(key, segment, ranges) for key in self._keys(ranges)})

    def _keys(self, ranges: list[Range]) -> list[str]:
        names = {r.part.name for r in ranges}
        split = (name.split("/", 2) for name in self._tensors)
        return sorted({words[1] for words in split if words[0] == OPTIMIZER and words[2] in names})

    def _add_state(self, key: str, segment: Segment, ranges: list[Range]) -> torch.Tensor:
        kind = f"{OPTIMIZER}/{key}"
        names = (f"{kind}/{r.part.name}" for r in ranges)
        dtype = next(self._tensors[name] for name in names if name in self._tensors)
        values = torch.zeros(segment.shard.shape, dtype=dtype)
        self._add(kind, iter(ranges), values, segment.start)
        return values

    def _add(self, kind: str, ranges: Iterator[Range], values: torch.Tensor, first: int = 0) -> None:
        for r in ranges:
            name = f"{kind}/{r.part.name}"
            if name in self._tensors:
                self.targets[name] = r.of(values, first)

    def commit_weights(self) -> None:
        """Copies what was read into the weights."""
        for unit, values in self._masters:
            unit.load(values)

    def commit_optimizer(
        self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], scalars: list[dict[str, Any]]
    ) -> None:
        """Loads what was read into the optimizer.

        Args:
            optimizer: the optimizer to load into.
            groups: options of the parameter groups; options not listed keep their values.
            scalars: by group, the encoded state that has no value per element.
        """
        own = optimizer.state_dict()["param_groups"]
        indices = {id(shard): index for index, shard in enumerate(_parameters(optimizer))}
        state = {}
        for segment, tensors in zip(self._partition.segments(), self._states):
            # Parameters that the checkpoint lacks start without optimizer state.
            if tensors or (scalars[segment.group] and not any(self._states)):
                # Decodes once per parameter, because an optimizer updates the tensors it is given in place.
                state[indices[id(segment.shard)]] = {**decode(scalars[segment.group]), **tensors}
        merged = [{**mine, **group, "params": mine["params"]} for group, mine in zip(groups, own)]
        optimizer.load_state_dict({"state": state, "param_groups": merged})


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
