"""One parameter of a unit: which of its elements this rank holds, and how to read and write all of them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import Parameter

from ds_lgamp.partition.collectives import start_all_reduce
from ds_lgamp.partition.segments import Segment
from ds_lgamp.partition.unit import Unit


class Part(NamedTuple):
    """The part of a parameter that lies in this rank's shard; it may be empty.

    Weights, master weights, gradient and optimizer state are laid out alike, so the part has the same place in each.
    """

    unit: Unit
    name: str
    shown: str
    """What sentences call it."""
    parameter: Parameter
    shape: torch.Size
    """Shape of this tensor-parallel rank's slice."""
    whole_shape: torch.Size
    """Shape of the slices of all tensor-parallel ranks together."""
    slice_offsets: tuple[int, ...]
    """Where this rank's slice begins in the whole shape, by dimension."""
    group: int | None
    """The optimizer's parameter group; None if the optimizer does not own the parameter."""
    in_flat: slice
    """Where the parameter lies in the unit's flat storage."""
    in_shard: slice
    """Where the part lies in the shard."""
    in_parameter: slice
    """Which elements of the flattened parameter belong to the part."""

    @property
    def numel(self) -> int:
        """Number of elements of the part."""
        return self.in_shard.stop - self.in_shard.start

    @property
    def segment(self) -> Segment | None:
        """The segment that holds the part; None if the part is empty or the optimizer does not own it."""
        if not self.numel:
            return None
        start = self.in_shard.start
        return next((segment for segment in self.unit.master.segments if segment.start <= start < segment.end), None)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the parameter's shape, copied from the ``part`` [numel] of every shard. All data-parallel
        ranks call it together.

        It adds up tensors that are zero outside a rank's part: parts differ in length, and for most parameters all but
        one are empty.
        """
        storage = self.unit.storage
        if not storage.partitioned:
            # With offloading, the part is on the host.
            return part.to(storage.flat.device, copy=True).view(self.shape)
        whole = part.new_zeros(self.shape.numel(), device=storage.flat.device)
        whole[self.in_parameter] = part
        return start_all_reduce(whole, self.unit.policy.shard_group)().view(self.shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part [numel] of a tensor of the parameter's shape."""
        return whole.reshape(-1)[self.in_parameter]

    @torch.no_grad()
    def write_weights(self, part: torch.Tensor) -> None:
        """Sets this rank's ``part`` [numel] of the master weights and of the shard. All data-parallel ranks call it
        together: a rank on which the parameter is resident gets the other ranks' parts."""
        storage = self.unit.storage
        self.unit.replace_slice(self.in_shard, part)
        if storage.gathers and storage.resident:
            storage.replace_full(self.in_flat, self.gather(storage.shard[self.in_shard]).reshape(-1))

    @torch.no_grad()
    def adopt_weights(self) -> None:
        """Takes this rank's part of the shard and of the master weights from the full parameter, which user code may
        have changed after it was gathered. Master weights whose weight has not changed keep their bits."""
        self.unit.adopt(self.in_shard, keep_bits=True)


def parts_of(unit: Unit) -> Iterator[Part]:
    """Yields this rank's part of every parameter of ``unit``, in the order of its storage."""
    storage = unit.storage
    shard_start, shard_end = storage.shard_start, storage.shard_start + storage.shard.numel()
    for entry, (_, shape, _), start in zip(storage.parameters, storage.contents(), storage.offsets):
        end = start + torch.Size(shape).numel()
        first, last = max(start, shard_start), min(end, shard_end)
        in_shard = in_parameter = slice(0, 0)
        if first < last:
            in_shard = slice(first - shard_start, last - shard_start)
            in_parameter = slice(first - start, last - start)
        whole = slice(start, end)
        place = _place(unit.policy.tensor_group, entry.sliced_dimension, shape)
        yield Part(
            unit,
            entry.name,
            entry.shown,
            entry.parameter,
            torch.Size(shape),
            *place,
            entry.group,
            whole,
            in_shard,
            in_parameter,
        )


def _place(
    tensor_group: dist.ProcessGroup | None, dimension: int | None, shape: Sequence[int]
) -> tuple[torch.Size, tuple[int, ...]]:
    """Returns the shape of the whole parameter, and where this tensor-parallel rank's slice begins in it."""
    whole, offsets = list(shape), [0] * len(shape)
    if dimension is not None and tensor_group is not None:
        whole[dimension] *= tensor_group.size()
        offsets[dimension] = tensor_group.rank() * shape[dimension]
    return torch.Size(whole), tuple(offsets)
