"""A unit is the parameters of one chunk, or of one tied module, which move together; a part is what this rank holds of
one of them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import Parameter

from ds_lgamp.cost.units import Travel
from ds_lgamp.partition.bus import Transfer
from ds_lgamp.partition.collectives import start_all_reduce
from ds_lgamp.partition.flat_storage import FlatStorage
from ds_lgamp.partition.policy import UnitParameter, ZeroPolicy
from ds_lgamp.partition.quantised import is_packed
from ds_lgamp.partition.shards import GradientReduction, MasterWeights, Segment


class Observer:
    """Follows what happens to the units that have it in :attr:`Unit.observers`. By default it does nothing."""

    def gradient_final(self, unit: "Unit", gradient: torch.Tensor) -> None:
        """The ``gradient`` of this rank's shard of ``unit`` is final, and still on the device."""

    def before_change(self, unit: "Unit") -> None:
        """Master weights or optimizer state of ``unit`` are about to change. The observer may block until nobody reads
        them."""

    def after_update(self, unit: "Unit") -> None:
        """An update of ``unit`` is final: master weights, optimizer state and weights. Any thread that updates may call
        it."""


class Unit:
    """Joins what belongs to parameters that are gathered, released and reduced together: ``storage``, where they lie,
    ``reduction``, which sums their gradient, and ``master``, which the optimizer updates. With offloading, master
    weights and the final gradient lie on the host.

    A unit is frozen if none of its parameters requires a gradient. Then it has no gradient and no master weights of its
    own, and :meth:`ZeroPolicy.of_frozen` says where it lies.

    Args:
        name: its name in errors and traces.
        parameters: at least one; all of one dtype and on one device, all frozen or none. They are sorted by optimizer
            group here, so that each group owns one range.
        policy: what all units of a partition share.
        tied: whether the unit is a tied module, which does not count as a chunk.
        tie_group: the pipeline ranks that hold a copy of a tied unit; None if there is no other copy.

    Raises:
        ValueError: the parameters have several dtypes.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[UnitParameter],
        policy: ZeroPolicy,
        tied: bool = False,
        tie_group: dist.ProcessGroup | None = None,
    ) -> None:
        dtypes = {str(entry.parameter.dtype) for entry in parameters}
        if len(dtypes) != 1:
            raise ValueError(f"{name} has parameters of {' and '.join(sorted(dtypes))}; convert them to one")
        self.name = name
        self.tied = tied
        self.tie_group = tie_group
        self.trains = any(entry.parameter.requires_grad for entry in parameters)
        """False if the unit is frozen."""
        self.policy_in_training = policy
        """That of its parameters when they train."""
        if not self.trains:
            policy = policy.of_frozen()
        if any(is_packed(entry.parameter) for entry in parameters):
            # Bytes cannot be rounded.
            policy = policy._replace(travel=Travel())
        self.policy = policy
        self.storage = FlatStorage(sorted(parameters, key=lambda entry: entry.segment_key), policy)
        self.master = MasterWeights(self.storage, policy, self.trains, tie_group)
        self.reduction = GradientReduction(self.storage, policy, self.master.values.dtype, tie_group)
        self.stored_gradient: torch.Tensor | None = None
        """The home of the final gradient on the host; None if the device updates the unit."""
        if policy.host is not None and self.trains:
            master = self.master.values
            self.stored_gradient = policy.host.empty(master.numel(), master.dtype, policy.host.on_disk.optimizer)
        self._storing: Transfer | None = None
        self.observers: list[Observer] = []

    @torch.no_grad()
    def replace_shard(self, master: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Sets this rank's master weights and shard. All data-parallel ranks call it together; the next gather brings
        the others' parts.

        Args:
            master: values of the master weights.
            weights: values of the shard; by default the master weights rounded to its dtype.
        """
        self.storage.finish_gather()
        self.before_change()
        self.storage.settle_loads()
        self.master.values.copy_(master)
        self.storage.replace_shard(self.master.values if weights is None else weights)

    @torch.no_grad()
    def replace_slice(self, within: slice, master: torch.Tensor) -> None:
        """Sets a slice of this rank's master weights and shard. Full parameters that are resident do not follow."""
        self.storage.finish_gather()
        self.before_change()
        self.storage.settle_loads()
        self.master.values[within] = master
        self.storage.replace_shard(self.master.values[within], within)

    @property
    def thawed(self) -> list[UnitParameter]:
        """The parameters that the script has unfrozen, if the unit is frozen."""
        return [] if self.trains else [entry for entry in self.storage.parameters if entry.parameter.requires_grad]

    @torch.no_grad()
    def thaw(self, name: str) -> list["Unit"]:
        """Returns the units that take the place of this one, which is frozen: one of the ``name``, of the parameters
        that need a gradient now, and one of the others. All data-parallel ranks call it together."""
        self.storage.hold(self, exact=True)
        self.storage.finish_gather()
        entries = self.storage.parameters
        for entry in entries:
            # The memory of the storage goes with it.
            entry.parameter.data = entry.parameter.detach().clone()
        thawed = [entry._replace(group=entry.group_of_script) for entry in entries if entry.parameter.requires_grad]
        others = [entry for entry in entries if not entry.parameter.requires_grad]
        made = [
            Unit(called, members, self.policy_in_training, self.tied, self.tie_group)
            for called, members in ((name, thawed), (self.name, others))
            if members
        ]
        for unit in made:
            unit.storage.release()
        return made

    def adopt(self, within: slice = slice(None), keep_bits: bool = False) -> None:
        """Takes the shard and the master weights, or a slice of them, from the full parameters; where these are
        released, only the master weights, from the shard. With ``keep_bits``, master weights whose weight has not
        changed stay as they are."""
        self.storage.catch_up()
        self.before_change()
        self.storage.adopt(within)
        self.master.adopt(within, keep_bits)

    def before_change(self) -> None:
        """Tells the observers. The caller is about to change master weights or optimizer state."""
        for observer in self.observers:
            observer.before_change(self)

    def after_update(self) -> None:
        """Tells the observers that an update is final."""
        for observer in self.observers:
            observer.after_update(self)

    def finish_gradient(self) -> None:
        """Gives every segment its part of the final gradient; with offloading, on the host."""
        if self.stored_gradient is None:
            self.master.take_gradient(self._final_gradient())
        else:
            self.start_store()
            self.finish_store()

    def start_store(self) -> None:
        """Starts to copy the final gradient to the host."""
        assert self.policy.host is not None and self.stored_gradient is not None, "the host updates the unit"
        self._storing = self.policy.host.bus.store(self.stored_gradient, self._final_gradient())

    def _final_gradient(self) -> torch.Tensor:
        gradient = self.reduction.final_gradient()
        self.master.sum_partial(gradient)
        for observer in self.observers:
            observer.gradient_final(self, gradient)
        return gradient

    def finish_store(self) -> None:
        """Waits for the copy, frees the device's gradient and gives every segment its part on the host."""
        assert self._storing is not None and self.stored_gradient is not None, "a store is under way"
        self._storing.wait()
        self.reduction.shard_gradient = self.stored_gradient
        self.master.take_gradient(self.stored_gradient)

    def settle_store(self) -> None:
        """Blocks the host until the copy is over, if there was one, so that the host may read the gradient."""
        if self._storing is not None:
            self._storing.done()
            self._storing = None

    def scale_gradient(self, factor: float | torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Multiplies the final gradient, or a ``gradient`` that was read from the disk, by ``factor``."""
        gradient = self.reduction.shard_gradient if gradient is None else gradient
        assert gradient is not None, "the gradient is final"
        if self.stored_gradient is not None:
            self.settle_store()
            # A number, so that a factor of 1 costs no pass over the gradient.
            factor = float(factor)
        if isinstance(factor, torch.Tensor) or factor != 1:
            gradient.mul_(factor)

    @torch.no_grad()
    def follow_update(self) -> None:
        """Brings the shard up to date after the optimizer changed the master weights."""
        self.storage.replace_shard(self.master.values)

    @torch.no_grad()
    def round_weights(self) -> None:
        """Rounds the master weights to the shard after the host updated them. The storage has taken its full parameters
        for old since the update was postponed."""
        if self.master.is_copy:
            self.storage.shard.copy_(self.master.values)

    def drop_gradient(self) -> None:
        """Frees the gradient after the step."""
        self.master.drop_gradients()
        self.reduction.drop_gradient()


class Part(NamedTuple):
    """The part of a parameter that lies in this rank's shard; it may be empty. It has the same place in weights, master
    weights, gradient and optimizer state."""

    unit: Unit
    name: str
    shown: str
    """What sentences call it."""
    parameter: Parameter
    shape: torch.Size
    """Shape of this rank's slice, among tensor-parallel ranks or those that divide experts."""
    whole_shape: torch.Size
    """Shape of the slices of all these ranks together."""
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
        ranks call it together."""
        storage = self.unit.storage
        if not storage.partitioned:
            # With offloading, the part is on the host.
            return part.to(storage.flat.device, copy=True).view(self.shape)
        # Parts differ in length, and most are empty, so it adds up tensors that are zero outside a rank's part.
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
            storage.flat[self.in_flat] = self.gather(storage.shard[self.in_shard]).reshape(-1)

    @torch.no_grad()
    def adopt_weights(self) -> None:
        """Takes this rank's part of the shard and of the master weights from the full parameter, which user code may
        have changed. Master weights whose weight has not changed keep their bits."""
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
        whole_shape, slice_offsets = _place(unit.policy.tensor_group, entry, shape)
        yield Part(
            unit,
            entry.name,
            entry.shown,
            entry.parameter,
            torch.Size(shape),
            whole_shape,
            slice_offsets,
            entry.group,
            slice(start, end),
            in_shard,
            in_parameter,
        )


def _place(
    tensor_group: dist.ProcessGroup | None, entry: UnitParameter, shape: Sequence[int]
) -> tuple[torch.Size, tuple[int, ...]]:
    """Returns the shape of the whole parameter, and where this rank's slice begins in it."""
    whole, offsets = list(shape), [0] * len(shape)
    dimension, (place, slices) = entry.sliced_dimension, entry.place_among_experts
    if slices > 1:
        dimension = 0
    elif dimension is not None and tensor_group is not None:
        place, slices = tensor_group.rank(), tensor_group.size()
    if dimension is not None:
        whole[dimension] *= slices
        offsets[dimension] = place * shape[dimension]
    return torch.Size(whole), tuple(offsets)
