"""Where the parameters of a unit lie: one flat storage, of which every data-parallel rank keeps a shard."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import Parameter

from ds_lgamp.cost.storage import offsets, part_size
from ds_lgamp.partition.collectives import start_all_gather
from ds_lgamp.partition.guard import NotGatheredError, guarded
from ds_lgamp.partition.policy import ZeroPolicy


class UnitParameter(NamedTuple):
    """A parameter of a unit."""

    name: str
    """Its global name, the same in every layout."""
    parameter: Parameter
    group: int | None
    """The optimizer's parameter group; None if the optimizer does not own the parameter."""
    sliced_dimension: int | None = None
    """The dimension along which each tensor-parallel rank has a slice; None if each rank has the whole parameter."""
    partial_gradient: bool = False
    """Whether each tensor-parallel rank computes a part of the gradient, as under sequence parallelism."""

    @property
    def segment_key(self) -> tuple[float, bool, bool]:
        """The same for parameters of one segment. Its order is that of segments in the storage; parameters that the
        optimizer does not own come last."""
        group = float("inf") if self.group is None else self.group
        return group, self.sliced_dimension is not None, self.partial_gradient


class FlatStorage:
    """Holds the parameters of a unit in W equal parts; ``cost/storage.py`` says where in it each parameter lies.

    At stage 0, or with W = 1, the shard is the whole storage. At stages 1 and 2 it is this rank's part of the storage.
    At stage 3 it has memory of its own, and the storage is freed between uses: it is resized to nothing and refilled
    in place, so views that autograd saved stay exact. A released parameter has no elements.

    ``guard.py`` stands before the values of parameters that are not complete and current. Whoever asks for them waits
    for the gather in flight.

    Args:
        parameters: at least one; all of one dtype and on one device. They lie in the storage in this order.
        policy: how the storage is spread over the data-parallel ranks.
    """

    def __init__(self, parameters: Sequence[UnitParameter], policy: ZeroPolicy) -> None:
        self.parameters = parameters
        self.partitioned = policy.partitioned
        """Whether this rank updates a part of the storage, not all of it."""
        self.frees_weights = policy.partitioned and policy.zero_stage == 3
        """Whether the full parameters exist only between gather and release."""
        self.stale = False
        """Whether other ranks have changed their parts of the full parameters since this rank gathered them."""
        self.gathering: dist.Work | None = None
        """The gather in flight."""
        self._data_group = policy.data_group
        self._holders: set[Hashable] = set()
        self._lay_out(self._data_group.size(), self._data_group.rank())
        kinds = {type(entry.parameter) for entry in parameters}
        guards = {kind: guarded(kind, self._settle) for kind in kinds}
        self._guards = [(entry.parameter, type(entry.parameter), guards[type(entry.parameter)]) for entry in parameters]
        """Each parameter, its class, and its class while its values are not current."""

    def _lay_out(self, ranks: int, rank: int) -> None:
        first = self.parameters[0].parameter
        *self.offsets, self.end = offsets(entry.parameter.numel() for entry in self.parameters)
        part = part_size(self.end, ranks)
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

    @property
    def resident(self) -> bool:
        """Whether the full parameters have memory."""
        return self.flat.untyped_storage().nbytes() > 0

    def contents(self) -> list[tuple[str, list[int], int | None]]:
        """Name, shape and optimizer group of the parameters, in the order of the storage."""
        return [(entry.name, list(view.shape), entry.group) for entry, view in zip(self.parameters, self._views)]

    def hold(self, who: Hashable) -> None:
        """Keeps the full parameters until ``who`` drops them, and launches their gather if this rank lacks any."""
        self._holders.add(who)
        if self.gathering is None and self.partitioned and (self.stale or not self.resident):
            self._start_gather()

    def drop(self, who: Hashable) -> None:
        """Releases the full parameters when nobody else holds them."""
        self._holders.discard(who)
        if not self._holders:
            self.release()

    def refresh(self) -> None:
        """Launches the gather of stale parameters. All data-parallel ranks call it together."""
        if self.stale and self.gathering is None:
            self._start_gather()

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
        """Frees the full parameters, whoever holds them, where another gather can bring them back."""
        self._holders.clear()
        if not self.frees_weights or not self.resident:
            return
        self.finish_gather()
        for entry in self.parameters:
            entry.parameter.data = self._released
        self.flat.untyped_storage().resize_(0)
        self.stale = False
        self._guard()

    def replace_shard(self, values: torch.Tensor) -> None:
        """Sets this rank's shard. All data-parallel ranks do so together: what this rank holds of the others' parts
        is old until the next gather. ``values`` may be the shard itself, changed in place."""
        if values is not self.shard:
            self.shard.copy_(values)
        if self.partitioned and self.resident:
            self.stale = True
            self._guard()

    def replace_full(self, within: slice, values: torch.Tensor) -> None:
        """Sets a slice of the full parameters, which must be resident. All data-parallel ranks do so together, with
        the same values; the shard does not follow."""
        self.flat[within] = values

    def adopt(self, within: slice = slice(None)) -> None:
        """Takes the shard, or a slice of it, from the full parameters if those are resident."""
        self.finish_gather()
        if not self.resident:
            return
        if not self.stale:
            self._attach_parameters()
        if self.frees_weights:
            self.shard[within].copy_(self.flat[self.shard_start : self.shard_start + self.shard.numel()][within])

    def _start_gather(self) -> None:
        if not self.resident:
            self.flat.untyped_storage().resize_(self._bytes)
        self.gathering = start_all_gather(self.flat, self.shard, self._data_group)

    def _settle(self, parameter: torch.Tensor | None) -> None:
        """Waits for the gather in flight before somebody reads or writes values of ``parameter``, or of an unknown one
        of the unit. Raises NotGatheredError if no gather is in flight."""
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

    def _attach_parameters(self) -> None:
        """Copies the values of parameters that somebody gave another tensor (``parameter.data = ...``) into the
        storage."""
        for entry, view in zip(self.parameters, self._views):
            if entry.parameter.data_ptr() != view.data_ptr():
                view.copy_(entry.parameter.detach())
                entry.parameter.data = view
