"""One parameter of a flat unit: which of its elements this rank holds, and all of them together."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.nn import Parameter

from ds_lgamp.partition.collectives import start_all_reduce
from ds_lgamp.partition.unit import Segment, Unit


class Part(NamedTuple):
    """The part of a parameter that this rank's shard holds, in any tensor laid out like the shard: weights, master
    weights, gradient, optimizer state. It may be empty."""

    unit: Unit
    name: str
    parameter: Parameter
    shape: torch.Size
    """Of this tensor-parallel rank's slice."""
    whole_shape: torch.Size
    """Of the slices of all tensor-parallel ranks together."""
    slice_offsets: tuple[int, ...]
    """Where this rank's slice begins in the whole."""
    group: int | None
    """The optimizer's parameter group; None if the optimizer does not own the parameter."""
    in_flat: slice
    """Where the whole parameter lies in the unit's flat storage."""
    in_shard: slice
    """Where the part lies in the shard."""
    in_parameter: slice
    """Which elements of the flattened parameter the part is."""

    @property
    def numel(self) -> int:
        """Of the part."""
        return self.in_shard.stop - self.in_shard.start

    @property
    def segment(self) -> Segment | None:
        """The segment around the part; None if the part is empty or the optimizer does not own it."""
        if not self.numel:
            return None
        start = self.in_shard.start
        return next((segment for segment in self.unit.segments if segment.start <= start < segment.end), None)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The whole tensor from the ``part`` [numel] of every rank, a copy. All data-parallel ranks call it together.

        A sum with zeros: parts differ in length, and all but one are empty for most parameters.
        """
        if not self.unit.partitioned:
            return part.clone().view(self.shape)
        whole = part.new_zeros(self.shape.numel(), device=self.unit.flat.device)
        whole[self.in_parameter] = part
        return start_all_reduce(whole, self.unit.data_group)().view(self.shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of the parameter's shape."""
        return whole.reshape(-1)[self.in_parameter]

    @torch.no_grad()
    def write_weights(self, part: torch.Tensor) -> None:
        """Sets this rank's part of the master weights, and the weights with them. All data-parallel ranks call it
        together: who holds the whole parameter gets the others' parts."""
        unit = self.unit
        unit.finish_gather()
        unit.master[self.in_shard] = part
        unit.shard[self.in_shard] = unit.master[self.in_shard]
        if unit.partitioned and unit.resident:
            unit.flat[self.in_flat] = self.gather(unit.shard[self.in_shard]).reshape(-1)

    @torch.no_grad()
    def adopt_weights(self) -> None:
        """Takes this rank's part of the shard and of the master weights from the full parameter, which has been
        gathered and may have been changed since. Master weights whose weight has not changed keep their bits."""
        self.unit.adopt(self.in_shard, keep_bits=True)


def parts_of(unit: Unit) -> Iterator[Part]:
    """The parameters of ``unit``, in the order of its storage."""
    shard_end = unit.shard_start + unit.shard.numel()
    for entry, (_, shape, _), start in zip(unit.parameters, unit.contents(), unit.offsets):
        end = start + torch.Size(shape).numel()
        first, last = max(start, unit.shard_start), min(end, shard_end)
        in_shard = in_parameter = slice(0, 0)
        if first < last:
            in_shard = slice(first - unit.shard_start, last - unit.shard_start)
            in_parameter = slice(first - start, last - start)
        whole = slice(start, end)
        place = _place(unit, entry.sliced_dimension, shape)
        yield Part(
            unit, entry.name, entry.parameter, torch.Size(shape), *place, entry.group, whole, in_shard, in_parameter
        )


def _place(unit: Unit, dimension: int | None, shape: Sequence[int]) -> tuple[torch.Size, tuple[int, ...]]:
    """Shape of the whole parameter, and where this tensor-parallel rank's slice begins in it."""
    whole, offsets = list(shape), [0] * len(shape)
    if dimension is not None and unit.tensor_group is not None:
        whole[dimension] *= unit.tensor_group.size()
        offsets[dimension] = unit.tensor_group.rank() * shape[dimension]
    return torch.Size(whole), tuple(offsets)
