"""One flat storage holds the parameters of a unit. Every data-parallel rank keeps a shard of it."""

from collections.abc import Hashable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from ds_lgamp.cost.units import offsets, part_size
from ds_lgamp.partition.bus import Transfer
from ds_lgamp.partition.collectives import PeerSlices, start_all_gather
from ds_lgamp.partition.guard import Guards, NotGatheredError
from ds_lgamp.partition.host import LoadedPart, ShardUpdate, WholeCopy
from ds_lgamp.partition.memory import in_pool
from ds_lgamp.partition.policy import UnitParameter, ZeroPolicy
from ds_lgamp.partition.quantised import RoundedGather


class FlatMemory:
    """Lays parameters out in one tensor, ``flat``; ``cost/units.py`` says where in it each of them lies.

    The memory may be freed and refilled in place, so views that autograd saved stay exact. Parameters without memory
    have no elements.

    Args:
        parameters: at least one; all of one dtype and on one device. They lie in the memory in this order.
        ranks: into how many equal parts it can be cut.
        alignment: each parameter begins at a multiple of so many elements.
        frees_weights: whether it exists only between gather and release.
    """

    def __init__(self, parameters: Sequence[UnitParameter], ranks: int, alignment: int, frees_weights: bool) -> None:
        self.parameters = parameters
        self.frees_weights = frees_weights
        first = parameters[0].parameter
        *self.offsets, self.end = offsets((entry.parameter.numel() for entry in parameters), alignment)
        make = partial(first.new_zeros, part_size(self.end, ranks, alignment) * ranks, requires_grad=False)
        # All chunks are laid out at once, and released.
        self.flat = make() if frees_weights else in_pool(first.device, make)
        self._bytes = self.flat.untyped_storage().nbytes()
        self._released = first.new_empty(0, requires_grad=False)
        self._views = []
        for entry, offset in zip(parameters, self.offsets):
            view = self.flat[offset : offset + entry.parameter.numel()].view(entry.parameter.shape)
            view.copy_(entry.parameter.detach())
            entry.parameter.data = view
            self._views.append(view)
        self._remembered: dict[tuple[int, int], torch.Tensor] = {}
        """By their bounds, values for which :meth:`remember` was called."""

    @property
    def resident(self) -> bool:
        """Whether the full parameters have memory."""
        return self.flat.untyped_storage().nbytes() > 0

    def contents(self) -> list[tuple[str, list[int], int | None]]:
        """Name, shape and optimizer group of the parameters, in their order."""
        return [(entry.name, list(view.shape), entry.group) for entry, view in zip(self.parameters, self._views)]

    def make_resident(self) -> None:
        """Gives the full parameters memory, with any values, if they have none."""
        if not self.resident:
            in_pool(self.flat.device, partial(self.flat.untyped_storage().resize_, self._bytes))

    def show(self) -> None:
        """Makes the parameters views of the memory again."""
        for entry, view in zip(self.parameters, self._views):
            entry.parameter.data = view

    def free(self) -> None:
        """Frees the memory. The parameters have no elements then."""
        for entry in self.parameters:
            entry.parameter.data = self._released
        self.flat.untyped_storage().resize_(0)

    def remember(self, within: slice) -> None:
        """Keeps a copy of a slice of the full parameters, until :meth:`forget`."""
        self._remembered[within.start, within.stop] = self.flat[within].clone()

    def forget(self, within: slice) -> torch.Tensor | None:
        """Returns the copy of a slice that :meth:`remember` made, or that was adopted since; None without one."""
        return self._remembered.pop((within.start, within.stop), None)

    def remember_anew(self) -> None:
        """Brings the copies of slices up to date."""
        for (start, end), values in self._remembered.items():
            values.copy_(self.flat[start:end])

    def attach_parameters(self) -> None:
        """Copies into the memory the values of parameters to which user code gave another tensor (``parameter.data =
        ...``), which would take no part in training. Raises ValueError for a tensor of another shape."""
        own = self.flat.untyped_storage().data_ptr()
        # Guards would gather values that nobody reads.
        with torch._C.DisableTorchFunctionSubclass():
            moved = [
                (entry.shown, entry.parameter, view)
                for entry, view in zip(self.parameters, self._views)
                if entry.parameter.untyped_storage().data_ptr() != own
            ]
        for name, parameter, view in moved:
            if parameter.shape != view.shape:
                raise ValueError(
                    f"parameter {name} has the shape {[*parameter.shape]}, but had {[*view.shape]} when the engine was "
                    "built; resize it before that"
                )
            # Guards let a gather in flight end first.
            view.copy_(parameter.detach())
            parameter.data = view


class FlatStorage(FlatMemory):
    """Holds the parameters of a unit in W equal parts.

    At stage 0, or with W = 1, the shard is the whole storage. At stages 1 and 2 it is this rank's part of the storage.
    At stage 3 it has memory of its own, and the storage is freed between uses.

    With hierarchical shards, the ranks of a node keep all parameters together. What this rank keeps of them is its
    **kept part**. The shard, which this rank updates, is a view of it: all of it, or one of as many slices as there are
    nodes. In the second case the peers gather each other's slices once per step (:class:`PeerSlices`).

    With offloading, the shard lies on the host, whose thread updates it, and the device has a **loaded part** beside
    it. That is the kept part; with one data-parallel rank it is all of the storage, and a gather moves nothing. If the
    host holds the parameters, the device frees the loaded part when the gather of it is over. A whole unit is a loaded
    part on every rank: its gather is the load, which moves nothing between ranks.

    The host may have a ``copy`` of the full parameters, from :meth:`start_copy` until the shard changes. While it has,
    a gather loads that.

    Weights that travel rounded are rounded for the compute of chunks alone. The shard is exact, and so are the full
    parameters that others gather.

    Code that reads parameters that are not complete and current waits for the gather in flight (``guard.py``).

    Args:
        parameters: at least one; all of one dtype and on one device. They lie in the storage in this order.
        policy: how the storage is spread over the data-parallel ranks.
    """

    def __init__(self, parameters: Sequence[UnitParameter], policy: ZeroPolicy) -> None:
        frees_part = policy.host is not None and policy.host.parameters
        frees_weights = policy.zero_stage == 3 and (policy.partitioned or frees_part)
        super().__init__(parameters, policy.data_group.size(), policy.alignment, frees_weights)
        self.partitioned = policy.partitioned
        """Whether this rank updates a part of the storage, not all of it."""
        self.gathers = policy.partitioned or policy.host is not None
        """Whether full parameters follow the shards only when they are gathered."""
        self.stale = False
        """Whether shards have changed since this rank gathered the full parameters that it holds."""
        self.rounded = False
        """Whether the full parameters are rounded, or those that the gather in flight brings."""
        self.gathering: dist.Work | Transfer | RoundedGather | None = None
        """The gather in flight; for a whole unit, or one with a copy on the host, the load of it."""
        self._read_ahead: dist.Work | Transfer | RoundedGather | None = None
        """A gather that a reader has awaited, perhaps on another stream. The program waits for it, too."""
        self.pending: ShardUpdate | None = None
        """An update of this rank's shard for which nobody has waited."""
        self._whole = policy.whole
        self.copy = WholeCopy(policy.bus) if policy.bus is not None and self.partitioned else None
        """The copy of the full parameters on the host; None if there never is one."""
        self._gather_group, self._bits = policy.gather_group, policy.bits_of_weights
        self._holders: set[Hashable] = set()
        self._guards = Guards((entry.parameter for entry in parameters), self._settle)
        self._take_part(policy)

    def _take_part(self, policy: ZeroPolicy) -> None:
        self.shard_start, self.kept, self.shard = 0, self.flat, self.flat
        if self.partitioned:
            kept = self.flat.numel() // self._gather_group.size()
            kept_start = self._gather_group.rank() * kept
            self.kept = self.flat[kept_start : kept_start + kept]
            if self.frees_weights:
                self.kept = self.kept.clone()
            size = self.flat.numel() // policy.shard_group.size()
            self.shard_start = policy.shard_index * size
            self.shard = self.kept[self.shard_start - kept_start :][:size]
        peers = policy.nodes.peers if policy.nodes is not None and not policy.nodes.replicated else None
        self.slices = PeerSlices(self.kept, self.shard, peers)
        self.loaded: LoadedPart | None = None
        """This rank's part on the device, with its home on the host; None if the device holds the shard."""
        if policy.host is not None:
            shares = policy.whole and policy.data_group.size() > 1
            self.loaded = LoadedPart(policy.host, self.kept, policy.data_group if shares else None)
            self.shard = self.loaded.home
            if self.partitioned:
                self.loaded.free()

    def expect(self, update: ShardUpdate) -> None:
        """Leaves an ``update`` of this rank's shard to later. All data-parallel ranks do so together. Code that needs
        values of the parameters calls :meth:`catch_up` first."""
        self.pending = update
        if self.loaded is not None:
            self._outdate()
        elif self.resident:
            self._guards.put()

    def catch_up(self) -> None:
        """Ends the update that was left to later, if there is one. It needs no other rank. Raises what the update
        raised."""
        update, self.pending = self.pending, None
        if update is not None:
            update.wait()
            if self.loaded is None and self.resident and not self.stale:
                self._guards.lift()

    def start_load(self) -> None:
        """Starts to load this rank's part from the host, once its update is over, if a gather needs it. All
        data-parallel ranks call it together."""
        if self.copy is None or not self.copy.is_current:
            self._load_part()

    def _load_part(self) -> None:
        if self.loaded is not None and (self.stale or not self.resident):
            if self.pending is not None:
                self.pending.start()
            if not self.partitioned:
                self.stale = True
            self.loaded.start(None if self.pending is None else self.pending.wait)

    def finish_load(self) -> None:
        """Waits for the load, if one is under way. Raises what the update of the shard raised."""
        if self.loaded is not None:
            self.loaded.finish()

    def hold(self, who: Hashable, exact: bool = False) -> None:
        """Keeps the full parameters until ``who`` drops them, and launches their gather if this rank lacks any. An
        ``exact`` gather rounds nothing. Inside a compute that holds rounded parameters, everybody gets those."""
        self.catch_up()
        self._holders.add(who)
        if self.gathering is None and self.gathers and (self.stale or not self.resident):
            self._start_gather(exact or (self.resident and not self.rounded))

    def start_copy(self) -> None:
        """Starts to copy the gathered parameters to the host, unless it has them. Exact ones that somebody else has
        gathered are no such, if others are rounded."""
        if self.copy is not None and self.rounded == (self._bits is not None):
            self.copy.store(self.flat, self.rounded)

    def drop(self, who: Hashable) -> None:
        """Releases the full parameters when nobody else holds them."""
        self._holders.discard(who)
        if not self._holders:
            self.release()

    def refresh(self) -> None:
        """Launches the gather of stale parameters. All data-parallel ranks call it together."""
        self.catch_up()
        if self.stale and self.gathering is None:
            self._start_gather(exact=not self.rounded)

    def finish_gather(self) -> None:
        """Waits until the full parameters are there, if their gather is in flight."""
        self.catch_up()
        if self._read_ahead is not None:
            self._read_ahead.wait()
            self._read_ahead = None
        if self.gathering is None:
            return
        self.gathering.wait()
        self.gathering = None
        self._complete()
        if self.loaded is not None and self.partitioned:
            self.loaded.free()

    def _complete(self) -> None:
        self.stale = False
        self._guards.lift()
        if self.frees_weights:
            self.show()

    def release(self) -> None:
        """Frees the full parameters, even if they are held, where another gather can bring them back."""
        self._holders.clear()
        if not self.frees_weights or not self.resident:
            return
        self.finish_gather()
        # An update on the host may have made them old before.
        self._guards.lift()
        if self.loaded is not None:
            self.loaded.free()
        self.free()
        self.stale = self.rounded = False
        self._guards.put()

    def replace_shard(self, values: torch.Tensor, within: slice | None = None) -> None:
        """Sets this rank's shard, or a slice ``within`` it. All data-parallel ranks do so together: what this rank has
        of the others' parts is old until the next gather. Full parameters that are resident do not follow a slice.
        ``values`` may be the shard itself, changed in place."""
        self.slices.finish()
        if values is not self.shard:
            self.shard[slice(None) if within is None else within] = values
        self._outdate(full=within is None)

    def settle_loads(self) -> None:
        """Blocks the host until no load reads the shard, so that the caller may change it there. Ranks that share it
        wait for each other; none of them may read it otherwise, either."""
        if self.loaded is not None:
            self.loaded.settle()

    def adopt(self, within: slice = slice(None)) -> None:
        """Takes the shard, or a slice of it, from the full parameters if those are resident. Raises ValueError if they
        are rounded."""
        self.finish_gather()
        if not self.resident:
            return
        if self.rounded:
            raise ValueError(
                f"parameter {self.parameters[0].shown} is rounded while its chunk computes "
                "(zero_optimization.zero_quantized_weights); change it between batches"
            )
        if not self.stale:
            self.attach_parameters()
        if self.frees_weights or (self.loaded is not None and not self.stale):
            self.slices.finish()
            self.settle_loads()
            self.shard[within].copy_(self.flat[self.shard_start : self.shard_start + self.shard.numel()][within])
            self._outdate(full=False)
        self.remember_anew()

    def _start_gather(self, exact: bool) -> None:
        copy = self.copy
        if copy is not None and copy.is_current and not (exact and copy.rounded):
            self.make_resident()
            self.gathering, self.rounded = copy.load(self.flat), copy.rounded
            return
        self._load_part()
        if self._whole and self.loaded is not None and self.loaded.loading is not None:
            self.gathering = self.loaded.loading
            return
        # A program has awaited the load of a part.
        self.finish_load()
        if not self.partitioned:
            self._complete()
            return
        self.make_resident()
        # A program has awaited the refresh; a block or a loaded state has not.
        self.slices.start()
        self.slices.finish()
        self.rounded = self._bits is not None and not exact
        if self._bits is not None and self.rounded:
            self.gathering = RoundedGather(self.flat, self.kept, self._gather_group, self._bits)
        else:
            self.gathering = start_all_gather(self.flat, self.kept, self._gather_group)

    def _outdate(self, full: bool = True) -> None:
        """Takes for old what this rank has of the unit beside its shard, which has changed or will have when updates
        are over; with ``full``, the full parameters too."""
        self.slices.are_old = True
        if self.loaded is not None:
            self.loaded.outdate()
        if self.copy is not None:
            self.copy.is_current = False
        if full and self.gathers and self.resident:
            self.stale = True
            self._guards.put()

    def _settle(self, parameter: torch.Tensor | None) -> None:
        """Waits for the gather in flight before somebody reads or writes values of ``parameter``, or of an unknown one
        of the unit. Raises NotGatheredError if a gather is needed and none is in flight."""
        self.catch_up()
        if not self.partitioned and not self.frees_weights:
            # No other rank is needed.
            self.refresh()
        if self.gathering is None and (self.stale or not self.resident):
            names = [entry.shown for entry in self.parameters if parameter is None or entry.parameter is parameter]
            lacks = "has old values" if self.resident else "has no elements"
            raise NotGatheredError(
                f"parameter {names[0]} {lacks} on this rank until it is gathered; read it inside a block of "
                "deepspeed.zero.GatheredParameters, or with deepspeed.utils.safe_get_full_fp32_param or "
                "engine.module.state_dict(), on all data-parallel ranks together; in Megatron-LM's loop, read it from "
                "a checkpoint"
            )
        gathering = self.gathering
        self.finish_gather()
        self._read_ahead = gathering
