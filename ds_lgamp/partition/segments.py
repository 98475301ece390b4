"""What the optimizer owns of a unit on this rank: the master weights, cut into segments."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import Parameter

from ds_lgamp.partition.collectives import sum_in_rank_order
from ds_lgamp.partition.flat_storage import FlatStorage, UnitParameter
from ds_lgamp.partition.policy import ZeroPolicy


class Segment(NamedTuple):
    """The part of a rank's shard that one optimizer group owns and that tensor-parallel ranks share in one way."""

    group: int
    shard: Parameter
    """A view of the unit's master weights, which the optimizer updates."""
    start: int
    end: int
    sliced: bool
    """Whether each tensor-parallel rank has elements of its own, not the same ones."""
    partial_gradient: bool
    """Whether the gradients of the tensor-parallel ranks are summed."""
    entry: UnitParameter | None = None
    """The parameter that it is a part of; None if it may have several."""

    def is_within(self, other: "Segment") -> bool:
        return other.start <= self.start < other.end


def is_elementwise(value: Any, shard: torch.Tensor) -> bool:
    """Whether a ``value`` of the optimizer's state has an element for each of ``shard``."""
    return isinstance(value, torch.Tensor) and value.shape == shard.shape


class MasterWeights:
    """The weights of this rank's shard as the optimizer updates them.

    Half-precision weights that train have master weights in fp32. Otherwise the master weights are the shard itself.
    They lie where the shard lies: on the device or, with offloading, on the host. There a copy may lie on the disk.

    Args:
        storage: where the shard lies.
        policy: how the unit is spread over ranks.
        trains: whether the unit has a gradient.
        tie_group: the pipeline ranks that hold a copy of a tied unit; None if there is no other copy.
    """

    def __init__(
        self, storage: FlatStorage, policy: ZeroPolicy, trains: bool, tie_group: dist.ProcessGroup | None
    ) -> None:
        shard = storage.shard
        self.is_copy = trains and shard.itemsize < 4
        """Whether the master weights have memory of their own, beside the shard's."""
        self.values = shard
        if self.is_copy:
            self.values = shard.float() if policy.host is None else policy.host.master_weights(shard)
        self.counts_in_norm = tie_group is None or tie_group.rank() == 0
        """Whether this pipeline rank's copy of a tied unit is the one that is counted and saved."""
        self.segments = _segments(storage, self.values, by_parameter=False)
        self.is_cut = False
        """Whether each parameter has a segment of its own."""
        self._storage, self._shard = storage, shard
        self._policy = policy

    def adopt(self, within: slice = slice(None), keep_bits: bool = False) -> None:
        """Takes the master weights, or a slice of them, from the shard. With ``keep_bits``, master weights whose
        weight has not changed stay as they are."""
        if self.is_copy:
            shard, values = self._shard[within], self.values[within]
            stays = keep_bits & (values.to(shard.dtype) == shard)
            values.copy_(torch.where(stays, values, shard.to(values.dtype)))

    def cut(self) -> None:
        """Gives each parameter a segment of its own, with its part of the gradient."""
        wholes, self.segments = self.segments, _segments(self._storage, self.values, by_parameter=True)
        self.is_cut = True
        for whole in wholes:
            for segment in self.segments:
                if whole.shard.grad is not None and segment.is_within(whole):
                    segment.shard.grad = whole.shard.grad[segment.start - whole.start : segment.end - whole.start]

    def sum_partial(self, gradient: torch.Tensor) -> None:
        """Sums the shard's ``gradient`` over tensor-parallel ranks where each of them has a part of the sum."""
        tensor_group = self._policy.tensor_group
        for segment in self.segments:
            if segment.partial_gradient and tensor_group is not None:
                sum_in_rank_order(gradient[segment.start : segment.end], tensor_group)

    def take_gradient(self, gradient: torch.Tensor) -> None:
        """Gives every segment its part of the shard's ``gradient``, which is final."""
        for segment in self.segments:
            segment.shard.grad = gradient[segment.start : segment.end]

    def leave_out(self, frozen: Sequence[UnitParameter]) -> None:
        """Takes the gradient from the segments of ``frozen`` parameters. Each has one of its own."""
        for segment in self.segments:
            # Comparing the entries would compare values.
            if any(segment.entry is entry for entry in frozen):
                segment.shard.grad = None

    def counted_gradients(self) -> list[torch.Tensor]:
        """The gradients of the segments that this rank counts in the norm: over all ranks, every element of the
        gradient counts once."""
        gradients = (segment.shard.grad for segment in self._counted())
        return [gradient for gradient in gradients if gradient is not None]

    def counted_parts(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Does what :meth:`counted_gradients` does, of a ``gradient`` of the shard that the segments do not have."""
        return [gradient[segment.start : segment.end] for segment in self._counted()]

    def _counted(self) -> list[Segment]:
        copy, _ = self._policy.copies
        if not self.counts_in_norm or copy > 0:
            return []
        return [segment for segment in self.segments if self._policy.is_first_tensor_rank or segment.sliced]

    def drop_gradients(self) -> None:
        for segment in self.segments:
            segment.shard.grad = None


def _segments(storage: FlatStorage, master: torch.Tensor, by_parameter: bool) -> list[Segment]:
    # A segment includes the zeros between and after its parameters, which an update leaves alone.
    bounds: dict[tuple[tuple[float, bool, bool], int | None], list[int]] = {}
    ends = [*storage.offsets[1:], storage.end]
    for place, (entry, offset, end) in enumerate(zip(storage.parameters, storage.offsets, ends)):
        if entry.group is not None:
            key = entry.segment_key, place if by_parameter else None
            bounds.setdefault(key, [offset, end])[1] = end
    segments = []
    for ((group, sliced, partial), own), (start, end) in bounds.items():
        start = max(start - storage.shard_start, 0)
        end = min(end - storage.shard_start, storage.shard.numel())
        if start < end:
            alone = None if own is None else storage.parameters[own]
            segments.append(Segment(int(group), Parameter(master[start:end]), start, end, sliced, partial, alone))
    return segments
