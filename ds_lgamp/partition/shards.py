"""This rank's shards of a unit: of the gradient, which accumulates over micro-batches and is summed over the
data-parallel ranks; and of the master weights, cut into segments, which the optimizer updates."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import Parameter

from ds_lgamp.partition.collectives import Finish, start_all_reduce, start_reduce_scatter, sum_in_rank_order
from ds_lgamp.partition.flat_storage import FlatStorage
from ds_lgamp.partition.memory import in_pool
from ds_lgamp.partition.policy import UnitParameter, ZeroPolicy
from ds_lgamp.partition.quantised import start_rounded_sum
from ds_lgamp.schedule.spec import STATE_BLOCK

ACCUMULATES_IN_OTHER_DTYPES = hasattr(torch.Tensor, "grad_dtype")
"""Whether a parameter's gradient may have another dtype than the parameter (torch 2.13)."""


class GradientReduction:
    """Accumulates and reduces the gradient of a unit that trains.

    Args:
        storage: where the unit's parameters lie.
        policy: how the unit is spread over ranks.
        master_dtype: the dtype of the master weights, and of the gradient that the optimizer gets.
        tie_group: the pipeline ranks that hold a copy of a tied unit; None if there is no other copy.
    """

    def __init__(
        self,
        storage: FlatStorage,
        policy: ZeroPolicy,
        master_dtype: torch.dtype,
        tie_group: dist.ProcessGroup | None,
    ) -> None:
        self.accumulating = False
        """Whether backward passes add to the full gradient."""
        self.shard_gradient: torch.Tensor | None = None
        """The sum of the reductions so far, of this rank's shard. Once it is stored, its home on the host."""
        self.is_final = False
        """Whether the optimizer steps with ``shard_gradient`` as it is."""
        self.frozen: list[UnitParameter] = []
        """Parameters that the script has frozen since the unit was built and that stay frozen in this batch."""
        self._storage = storage
        self._master_dtype = master_dtype
        self._tie_group = tie_group
        self._ranks, self._mean_ranks = policy.data_group.size(), policy.mean_ranks
        self._group, self._nodes = policy.gather_group, policy.nodes
        self._partitioned, self._hosted = policy.partitioned, policy.host is not None
        self._in_rank_order = policy.in_rank_order
        self._dtype = policy.gradient_dtype or storage.flat.dtype
        self._communication_dtype = policy.communication_dtype or self._dtype
        self._sum_dtype = torch.promote_types(master_dtype, self._dtype)
        """In it gradients of ranks and of groups of micro-batches add up."""
        self._bits = policy.travel.gradients if policy.partitioned else None
        # Sums of fp16 numbers leave its range soon. Rounded gradients are summed in a larger one.
        in_half = self._bits is None and self._communication_dtype == torch.float16
        self._averages_first = in_half and self._mean_ranks > 1
        self.users = 1
        """How many chunks of this rank use the unit."""
        self._users_done = 0
        self._gradient: torch.Tensor | None = None
        self._reducing: Finish | None = None
        self._node_sum: torch.Tensor | None = None
        """With hierarchical shards: the sum over the ranks of this node, before it is combined with other nodes'."""
        self._combining: Finish | None = None
        self._prepare_accumulation()

    def _prepare_accumulation(self) -> None:
        """Lets gradients accumulate in another dtype than the parameters'. In torch 2.13, autograd adds to whatever
        ``grad`` holds if ``grad_dtype`` is None; if it were the dtype, autograd would first cast each gradient to it.
        Earlier releases need a hook."""
        self._hooked: dict[torch.Tensor, torch.Tensor] = {}
        if self._dtype == self._storage.flat.dtype:
            return
        for entry in self._storage.parameters:
            if entry.parameter.requires_grad:
                if ACCUMULATES_IN_OTHER_DTYPES:
                    entry.parameter.grad_dtype = None
                else:
                    entry.parameter.register_post_accumulate_grad_hook(self._accumulate)

    def _accumulate(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None, "autograd calls this with a gradient"
        self._hooked[parameter].add_(parameter.grad)
        parameter.grad = None

    def user_done(self) -> bool:
        """Counts a chunk whose backward passes are over. Returns True if it was the last one that uses the unit."""
        self._users_done += 1
        if self._users_done < self.users:
            return False
        self._users_done = 0
        return True

    def begin_accumulation(self) -> None:
        """Gives every parameter a zeroed view of the flat gradient, into which autograd accumulates in place."""
        if self._gradient is None:
            make = partial(torch.zeros_like, self._storage.flat, dtype=self._dtype)
            self._gradient = in_pool(self._storage.flat.device, make)
        elif self.shard_gradient is None:
            self._gradient.zero_()
        self.frozen = []
        for entry, offset in zip(self._storage.parameters, self._storage.offsets):
            if not entry.parameter.requires_grad:
                self.frozen.append(entry)
            else:
                end = offset + entry.parameter.numel()
                view = self._gradient[offset:end].view(entry.parameter.shape)
                if self._dtype == self._storage.flat.dtype or ACCUMULATES_IN_OTHER_DTYPES:
                    entry.parameter.grad = view
                else:
                    self._hooked[entry.parameter] = view
        self.accumulating = True

    def start(self) -> None:
        """Launches the sum of the gradient over the data-parallel ranks; with hierarchical shards, over those of the
        node."""
        for entry in self._storage.parameters:
            entry.parameter.grad = None
        self._hooked.clear()
        self.accumulating = False
        gradient = self._gradient
        assert gradient is not None, "a unit is reduced after its gradient accumulated"
        if self._averages_first:
            gradient.div_(self._mean_ranks)
        if self._bits is not None:
            self._reducing = start_rounded_sum(gradient, self._group, self._sum_dtype, self._bits)
            self._gradient = None
        elif self._partitioned:
            # In another dtype a copy travels, and the accumulated gradient is freed.
            gradient = self._gradient = in_pool(gradient.device, partial(gradient.to, self._communication_dtype))
            self._reducing = start_reduce_scatter(gradient, self._group, self._sum_dtype, self._in_rank_order)
        elif self._ranks > 1:
            gradient = gradient.to(self._communication_dtype)
            self._reducing = start_all_reduce(gradient, self._group, self._in_rank_order)
        else:
            self._reducing = lambda: gradient

    def finish_reduction(self) -> None:
        """Waits for the sum that :meth:`start` launched, if it is under way."""
        if self._reducing is None:
            return
        reduced = self._reducing()
        self._reducing = None
        if self._partitioned:
            self._gradient = None
        if self._nodes is None:
            self._add(reduced)
        else:
            self._node_sum = reduced

    def combine(self) -> None:
        """Launches the sum over the nodes of the sums inside them, with hierarchical shards."""
        if self._node_sum is None or self._nodes is None:
            return
        travelling = self._node_sum.to(self._communication_dtype)
        self._node_sum = None
        peers, in_rank_order = self._nodes.peers, self._in_rank_order
        if self._nodes.replicated:
            self._combining = start_all_reduce(travelling, peers, in_rank_order)
        else:
            self._combining = start_reduce_scatter(travelling, peers, self._sum_dtype, in_rank_order)

    def finish(self) -> None:
        """Waits for the sum over all data-parallel ranks, if one is under way, and adds it to this rank's shard."""
        self.finish_reduction()
        self.combine()
        if self._combining is not None:
            combined = self._combining()
            self._combining = None
            self._add(combined.to(self._sum_dtype))

    def _add(self, reduced: torch.Tensor) -> None:
        if self.shard_gradient is None:
            self.shard_gradient = reduced
        elif self._partitioned:
            self.shard_gradient.add_(reduced)

    def final_gradient(self) -> torch.Tensor:
        """Averages the shard's gradient over the data-parallel ranks, adds the copies of a tied unit, and returns it in
        the dtype of the master weights."""
        assert self.shard_gradient is not None, "every unit is reduced before the step"
        gradient = self.shard_gradient = self.shard_gradient.to(self._sum_dtype)
        if self._mean_ranks > 1 and not self._averages_first:
            gradient.div_(self._mean_ranks)
        if self._tie_group is not None:
            sum_in_rank_order(gradient, self._tie_group)
        gradient = self.shard_gradient = gradient.to(self._master_dtype)
        self.is_final = True
        if self._hosted:
            # In the dtype of the master weights it may be a copy.
            self._gradient = None
        return gradient

    def drop_gradient(self) -> None:
        """Frees the shard's gradient after the step."""
        self.shard_gradient = None
        self.is_final = False


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


SCALES = ("absmax1", "absmax2")
"""The keys of optimizer state of 8 bits that hold a scale for each block of elements."""


def elements_of(key: str) -> int:
    """Returns how many elements share a value of the optimizer's state ``key``."""
    return STATE_BLOCK if key in SCALES else 1


def code_of_zero(key: str, dtype: torch.dtype) -> int:
    """Returns what the optimizer's state ``key`` holds where a number is zero. Codes of 8 bits ascend, so those of
    states with a sign have it in the middle."""
    return 127 if key == "state1" and dtype == torch.uint8 else 0


def is_elementwise(value: Any, shard: torch.Tensor) -> bool:
    """Whether a ``value`` of the optimizer's state has an element for each of ``shard``."""
    return isinstance(value, torch.Tensor) and value.shape == shard.shape


def is_spread(key: str, value: Any, shard: torch.Tensor) -> bool:
    """Whether a ``value`` of the optimizer's state has an element for each of ``shard``, or for each block of it."""
    return isinstance(value, torch.Tensor) and value.shape == (shard.numel() // elements_of(key),)


class MasterWeights:
    """The weights of this rank's shard as the optimizer updates them.

    Half-precision weights that train have master weights in fp32, if the policy says so. Otherwise the master weights
    are the shard itself. They lie where the shard lies: on the device or, with offloading, on the host. There a copy
    may lie on the disk.

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
        self.is_copy = trains and policy.copies_weights and shard.itemsize < 4
        """Whether the master weights have memory of their own, beside the shard's."""
        self.values = shard
        if self.is_copy:
            self.values = shard.float() if policy.host is None else policy.host.master_weights(shard)
        self.counts_in_norm = tie_group is None or tie_group.rank() == 0
        """Whether this pipeline rank's copy of a tied unit is the one that is counted and saved."""
        self.is_cut = policy.state_in_8_bits
        """Whether each parameter has a segment of its own, as one has whose blocks are its own."""
        self.segments = _segments(storage, self.values, by_parameter=self.is_cut)
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
    for ((group, sliced, summed), own), (start, end) in bounds.items():
        start = max(start - storage.shard_start, 0)
        end = min(end - storage.shard_start, storage.shard.numel())
        if start < end:
            alone = None if own is None else storage.parameters[own]
            segments.append(Segment(int(group), Parameter(master[start:end]), start, end, sliced, summed, alone))
    return segments
