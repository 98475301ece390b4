"""A flat unit: the parameters of one chunk, or of one tied module, in one storage."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import Parameter

from ds_lgamp.cost.storage import offsets, part_size
from ds_lgamp.partition.collectives import (
    Finish,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    sum_in_rank_order,
)
from ds_lgamp.partition.guard import NotGatheredError, guarded

ACCUMULATES_IN_OTHER_DTYPES = hasattr(torch.Tensor, "grad_dtype")
"""Whether a parameter's gradient may have another dtype than the parameter (torch 2.13)."""


class UnitParameter(NamedTuple):
    """A parameter of a unit."""

    name: str
    """Its global name, the same in every layout."""
    parameter: Parameter
    group: int | None
    """The optimizer's parameter group; None if the optimizer does not own it."""
    sliced_dimension: int | None = None
    """Along which each tensor-parallel rank has a slice of it; None if each has all of it."""
    partial_gradient: bool = False
    """Whether each tensor-parallel rank computes a part of the gradient, as under sequence parallelism."""


class Segment(NamedTuple):
    """The part of a rank's shard that one optimizer group owns and that tensor-parallel ranks share in one way."""

    group: int
    shard: Parameter
    """A view of the unit's master weights, what the optimizer updates."""
    start: int
    end: int
    sliced: bool
    """Whether each tensor-parallel rank has elements of its own, not the same ones."""
    partial_gradient: bool
    """Whether the gradients of the tensor-parallel ranks are summed."""


class Unit:
    """Parameters that are gathered, released and reduced together.

    The flat storage has W equal parts; ``cost/storage.py`` says where in it parameters lie. Stage 0 (or W = 1)
    updates all of it on every rank; stages 1 and 2 update this rank's part in place and gather the others'; stage 3
    keeps this rank's part in a storage of its own and frees the flat one between uses. It is freed by resizing and
    refilled in place, so views that autograd saved stay exact. A released parameter has no elements. While parameters
    are not complete and current, ``guard.py`` stands before their values: who asks for them waits for the gather in
    flight. Half-precision parameters have fp32 master weights, of this rank's part, and the optimizer updates those. A
    frozen unit, one without a parameter that requires a gradient, is gathered and released only, at stage 3; it has no
    gradient and no master weights.

    Args:
        name: what errors and traces call it.
        parameters: at least one; all of one dtype and on one device, all frozen or none. Sorted by optimizer group
            here, so that each group owns one range.
        data_group: the data-parallel ranks that share the unit.
        zero_stage: 0 to 3.
        gradient_dtype: in which gradients accumulate over micro-batches; None is the parameters' own.
        tied: whether the unit is a tied module, which does not count as a chunk.
        tie_group: the pipeline ranks that hold a copy of a tied unit, None if there is no other.
        in_rank_order: whether gradients add up in the order of data-parallel ranks at every stage and on every backend.
        communication_dtype: in which gradients travel between data-parallel ranks; None is ``gradient_dtype``.
        tensor_group: the tensor-parallel ranks, None if there is one.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[UnitParameter],
        data_group: dist.ProcessGroup,
        zero_stage: int,
        gradient_dtype: torch.dtype | None = None,
        tied: bool = False,
        tie_group: dist.ProcessGroup | None = None,
        in_rank_order: bool = False,
        communication_dtype: torch.dtype | None = None,
        tensor_group: dist.ProcessGroup | None = None,
    ) -> None:
        dtypes = {str(entry.parameter.dtype) for entry in parameters}
        if len(dtypes) != 1:
            raise ValueError(f"{name} has parameters of {' and '.join(sorted(dtypes))}; a unit holds one dtype")
        self.name = name
        self.trains = any(entry.parameter.requires_grad for entry in parameters)
        """False if the unit is frozen."""
        self.data_group = data_group
        self.zero_stage = zero_stage
        self.gradient_dtype = gradient_dtype or parameters[0].parameter.dtype
        self.communication_dtype = communication_dtype or self.gradient_dtype
        # Sums of fp16 numbers leave its range soon.
        self._averages_first = self.communication_dtype == torch.float16 and data_group.size() > 1
        self.tied = tied
        self.tie_group = tie_group
        self.tensor_group = tensor_group
        self.in_rank_order = in_rank_order
        self.counts_in_norm = tie_group is None or tie_group.rank() == 0
        self.holders: set[Hashable] = set()
        """For what the full parameters are held now: chunks, by number; parameters of its own, by name; blocks."""
        self.users = 0
        """Chunks of this rank that use the unit."""
        self._users_done = 0
        self.parameters = sorted(parameters, key=_segment_of)
        self._build_storage()
        self._prepare_accumulation()
        self.segments = self._build_segments()
        self.shard_gradient: torch.Tensor | None = None
        self.gradient_is_final = False
        """Whether ``shard_gradient`` is what the optimizer steps with."""
        self.accumulating = False
        self.stale = False
        """Other ranks have changed their parts of the full parameters, this rank has not gathered them."""
        self.gathering: dist.Work | None = None
        tensors = [entry.parameter for entry in parameters]
        guards = {kind: guarded(kind, self.settle) for kind in set(map(type, tensors))}
        self._guards = [(tensor, type(tensor), guards[type(tensor)]) for tensor in tensors]
        """Parameters, their class, and the one they have while their values are not current."""
        self._gradient: torch.Tensor | None = None
        self._reducing: Finish | None = None

    def _build_storage(self) -> None:
        ranks, rank = self.data_group.size(), self.data_group.rank()
        self.partitioned = self.zero_stage > 0 and ranks > 1
        first = self.parameters[0].parameter
        *self.offsets, self._end = offsets(entry.parameter.numel() for entry in self.parameters)
        part = part_size(self._end, ranks)
        self.flat = first.new_zeros(part * ranks, requires_grad=False)
        self._bytes = self.flat.untyped_storage().nbytes()
        self._released = first.new_empty(0, requires_grad=False)
        self._views = []
        for entry, offset in zip(self.parameters, self.offsets):
            view = self.flat[offset : offset + entry.parameter.numel()].view(entry.parameter.shape)
            view.copy_(entry.parameter.detach())
            entry.parameter.data = view
            self._views.append(view)
        self.shard_start = rank * part if self.partitioned else 0
        self.shard = self.flat[self.shard_start : self.shard_start + part] if self.partitioned else self.flat
        if self.frees_weights:
            self.shard = self.shard.clone()
        self.master = self.shard.float() if self.trains and self.shard.itemsize < 4 else self.shard

    def _prepare_accumulation(self) -> None:
        """Where gradients accumulate in another dtype than the parameters', teaches autograd so: torch 2.13 by an
        attribute, earlier releases by a hook."""
        self._hooked: dict[torch.Tensor, torch.Tensor] = {}
        if self.gradient_dtype == self.flat.dtype:
            return
        for entry in self.parameters:
            if entry.parameter.requires_grad:
                if ACCUMULATES_IN_OTHER_DTYPES:
                    entry.parameter.grad_dtype = self.gradient_dtype
                else:
                    entry.parameter.register_post_accumulate_grad_hook(self._accumulate)

    def _accumulate(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None, "autograd calls this with a gradient"
        self._hooked[parameter].add_(parameter.grad)
        parameter.grad = None

    def _build_segments(self) -> list[Segment]:
        # With the zeros between parameters, which an update leaves alone.
        bounds: dict[tuple[float, bool, bool], list[int]] = {}
        for entry, offset, end in zip(self.parameters, self.offsets, [*self.offsets[1:], self._end]):
            if entry.group is not None:
                bounds.setdefault(_segment_of(entry), [offset, end])[1] = end
        segments = []
        for (group, sliced, partial), (start, end) in bounds.items():
            start = max(start - self.shard_start, 0)
            end = min(end - self.shard_start, self.shard.numel())
            if start < end:
                segments.append(Segment(int(group), Parameter(self.master[start:end]), start, end, sliced, partial))
        return segments

    @property
    def frees_weights(self) -> bool:
        """Whether the full parameters exist only between gather and release."""
        return self.partitioned and self.zero_stage == 3

    @property
    def resident(self) -> bool:
        return self.flat.untyped_storage().nbytes() > 0

    @property
    def holds_gradient(self) -> bool:
        """Whether a full gradient is accumulating or on its way through the reduction."""
        return self.accumulating or self._reducing is not None

    def contents(self) -> list[tuple[str, list[int], int | None]]:
        """Name, shape and optimizer group of the parameters, in the order of the storage."""
        return [(entry.name, list(view.shape), entry.group) for entry, view in zip(self.parameters, self._views)]

    def start_gather(self) -> None:
        """Launches the gather of the full parameters, if this rank lacks any."""
        if self.gathering is not None or not self.partitioned or (self.resident and not self.stale):
            return
        if not self.resident:
            self.flat.untyped_storage().resize_(self._bytes)
        self.gathering = start_all_gather(self.flat, self.shard, self.data_group)

    def finish_gather(self) -> None:
        """Waits until the full parameters are there."""
        if self.gathering is None:
            return
        self.gathering.wait()
        self.gathering = None
        self.stale = False
        for parameter, kind, _ in self._guards:
            parameter.__class__ = kind
        if self.frees_weights:
            for entry, view in zip(self.parameters, self._views):
                entry.parameter.data = view

    def release(self) -> None:
        """Frees the full parameters where another gather can bring them back."""
        if not self.frees_weights or not self.resident:
            return
        self.finish_gather()
        for entry in self.parameters:
            entry.parameter.data = self._released
        self.flat.untyped_storage().resize_(0)
        self.stale = False
        self._guard()

    def settle(self, parameter: torch.Tensor | None = None) -> None:
        """Before somebody reads or writes values of the ``parameter``, or of an unknown one of the unit: waits for the
        gather in flight. Raises NotGatheredError if there is none."""
        if self.gathering is None:
            names = [entry.name for entry in self.parameters if parameter is None or entry.parameter is parameter]
            lacks = "has old values" if self.resident else "has no elements"
            raise NotGatheredError(
                f"parameter {names[0]} {lacks} on this rank until it is gathered; read it inside a block of "
                "deepspeed.zero.GatheredParameters, or with deepspeed.utils.safe_get_full_fp32_param or "
                "engine.module.state_dict(), on all data-parallel ranks together"
            )
        self.finish_gather()

    def _guard(self) -> None:
        for parameter, _, guard in self._guards:
            parameter.__class__ = guard

    def _outdate(self) -> None:
        """Every rank has changed its part of the weights: what this rank holds of the others' is old."""
        if self.partitioned and self.resident:
            self.stale = True
            self._guard()

    @torch.no_grad()
    def load(self, master: torch.Tensor, shard: torch.Tensor | None = None) -> None:
        """Sets this rank's part of the master weights, and the weights with them; ``shard`` is the part of those, where
        it is not the same rounded. All data-parallel ranks call it together; the next gather brings the others'
        parts."""
        self.finish_gather()
        self.master.copy_(master)
        if self.master is not self.shard:
            self.shard.copy_(self.master if shard is None else shard)
        self._outdate()

    def adopt(self, within: slice = slice(None), keep_bits: bool = False) -> None:
        """Takes shard and master weights, or a slice of them, from the full parameters; where those are released,
        master weights from the shard. ``keep_bits``: master weights whose weight has not changed stay as they are."""
        self.finish_gather()
        if self.resident and not self.stale:
            self._attach_parameters()
        shard, master = self.shard[within], self.master[within]
        if self.frees_weights and self.resident:
            shard.copy_(self.flat[self.shard_start : self.shard_start + self.shard.numel()][within])
        if self.master is not self.shard:
            kept = keep_bits & (master.to(shard.dtype) == shard)
            master.copy_(torch.where(kept, master, shard.to(master.dtype)))

    def _attach_parameters(self) -> None:
        """Somebody may have given a parameter another tensor (``parameter.data = ...``): its values go into the flat
        storage."""
        for entry, view in zip(self.parameters, self._views):
            if entry.parameter.data_ptr() != view.data_ptr():
                view.copy_(entry.parameter.detach())
                entry.parameter.data = view

    def begin_accumulation(self) -> None:
        """Gives every parameter a zeroed view of the flat gradient, into which autograd accumulates in place."""
        if self._gradient is None:
            self._gradient = torch.zeros_like(self.flat, dtype=self.gradient_dtype)
        elif self.shard_gradient is None:
            self._gradient.zero_()
        for entry, offset in zip(self.parameters, self.offsets):
            if entry.parameter.requires_grad:
                end = offset + entry.parameter.numel()
                view = self._gradient[offset:end].view(entry.parameter.shape)
                if self.gradient_dtype == self.flat.dtype or ACCUMULATES_IN_OTHER_DTYPES:
                    entry.parameter.grad = view
                else:
                    self._hooked[entry.parameter] = view
        self.accumulating = True

    def user_done(self) -> bool:
        """Counts a chunk whose backward passes are over; true when it was the last that uses the unit."""
        self._users_done += 1
        if self._users_done < self.users:
            return False
        self._users_done = 0
        return True

    def start_reduce(self) -> None:
        """Launches the sum of the gradient over the data-parallel ranks."""
        for entry in self.parameters:
            entry.parameter.grad = None
        self._hooked.clear()
        self.accumulating = False
        gradient = self._gradient
        assert gradient is not None, "a unit is reduced after its gradient accumulated"
        if self._averages_first:
            gradient.div_(self.data_group.size())
        if self.partitioned:
            # In another type, a copy travels and the accumulated gradient is done with.
            gradient = self._gradient = gradient.to(self.communication_dtype)
            self._reducing = start_reduce_scatter(gradient, self.data_group, self.master.dtype, self.in_rank_order)
        elif self.data_group.size() > 1:
            gradient = gradient.to(self.communication_dtype)
            self._reducing = start_all_reduce(gradient, self.data_group, self.in_rank_order)
        else:
            self._reducing = lambda: gradient

    def finish_reduce(self) -> None:
        """Waits for the sum that is under way, if one is, and adds it to this rank's shard of the gradient."""
        if self._reducing is None:
            return
        reduced = self._reducing()
        self._reducing = None
        if self.shard_gradient is None:
            self.shard_gradient = reduced
        elif self.partitioned:
            self.shard_gradient.add_(reduced)
        if self.partitioned:
            self._gradient = None

    def counted_gradients(self) -> list[torch.Tensor]:
        """What no other rank has of the gradient of what the optimizer owns: all ranks' together are all of it."""
        if not self.counts_in_norm or not (self.partitioned or self.data_group.rank() == 0):
            return []
        first = self.tensor_group is None or self.tensor_group.rank() == 0
        gradients = (segment.shard.grad for segment in self.segments if first or segment.sliced)
        return [gradient for gradient in gradients if gradient is not None]

    def finish_gradient(self) -> None:
        """Averages the shard's gradient over the data-parallel ranks, adds the copies of a tied unit, and hands every
        segment its part, in the master weights' dtype."""
        assert self.shard_gradient is not None, "every unit is reduced before the step"
        gradient = self.shard_gradient = self.shard_gradient.to(self.master.dtype)
        if self.data_group.size() > 1 and not self._averages_first:
            gradient.div_(self.data_group.size())
        if self.tie_group is not None:
            sum_in_rank_order(gradient, self.tie_group)
        for segment in self.segments:
            segment.shard.grad = gradient[segment.start : segment.end]
            if segment.partial_gradient and self.tensor_group is not None:
                sum_in_rank_order(segment.shard.grad, self.tensor_group)
        self.gradient_is_final = True

    @torch.no_grad()
    def follow_update(self) -> None:
        """The optimizer has changed the master weights: the shard follows."""
        if self.master is not self.shard:
            self.shard.copy_(self.master)
        self._outdate()

    def drop_gradient(self) -> None:
        """The step is over."""
        for segment in self.segments:
            segment.shard.grad = None
        self.shard_gradient = None
        self.gradient_is_final = False


def _segment_of(entry: UnitParameter) -> tuple[float, bool, bool]:
    """What parameters of one segment have in common, and the order of segments in the storage; last comes what no
    optimizer owns."""
    group = float("inf") if entry.group is None else entry.group
    return group, entry.sliced_dimension is not None, entry.partial_gradient
