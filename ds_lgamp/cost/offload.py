"""Predicts what offloading leaves on the device, what it takes in the memory of the host and on a disk, and what live
states take in their folder. ``memory.py`` has the formula of device and host.

With parts of m elements, and bytes per element as there, every unit that trains has on the disk

- with the optimizer: its gradient, u m; its optimizer state; its master weights, u m if w < u.
- with the parameters: w m, which are the master weights too if w = u. Frozen units have nothing else.

Each tensor takes whole blocks. A step writes the gradient once, reads the weights with each load, and for the update
reads all but weights that are no master weights, and writes all but the gradient.

The host has two buffers of the largest unit for updates, and some pieces in each direction of the bus.

A live state of a rank holds master weights and optimizer state of its part of every unit that trains, and the weights
of frozen units. Ranks that hold the same part share it. A step writes what trains. Frozen units are written once per
slot.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ds_lgamp.cost.activations import ActivationBytes
from ds_lgamp.cost.state import HeldUnit, Ledger, StateWalk
from ds_lgamp.cost.traffic import bus_bytes
from ds_lgamp.cost.units import ElementBytes, Sharding, UnitSize, on_host, total
from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.schedule.spec import BLOCK_ON_HOST, DISK_BLOCK, PIECE, PIECES, UPDATE_BUFFERS, Offload


@dataclass(frozen=True)
class HostMemory:
    """Bytes that one rank takes in the memory of its host, by kind. All but ``update`` are held all the time."""

    weights: int
    """Weights in the type of the device, from which loads copy. In the type of the master weights, those are copied."""
    master_weights: int
    optimizer_state: int | None
    """On the first data-parallel rank, which has the most; None if unknown."""
    gradients: int
    """What stores copy to."""
    update: int | None
    """Temporary memory of the optimizer; None if unknown."""
    peak: int
    """All kinds together, without unknown ones."""
    gathered: int = 0
    """Weights of all ranks that wait for their next use in a step."""


class StayingStateWalk(StateWalk):
    """Takes and frees what a partition takes and frees of units that stay on the device beside others that do not."""

    def follow(self, action: Action) -> None:
        # UPDATE is the host's; STEP updates these units.
        if action.kind is not Kind.UPDATE:
            super().follow(action)


class OffloadedStateWalk(StateWalk):
    """Takes and frees in a ledger what a partition with offloading takes and frees on the device."""

    frees_accumulated = True

    def __init__(
        self,
        offload: Offload,
        actions: Sequence[Action],
        units: Sequence[UnitSize],
        sharding: Sharding,
        size: ElementBytes,
        ledger: Ledger,
    ) -> None:
        self.offload = offload
        super().__init__(actions, units, sharding, size, ledger)

    def take_held(self) -> None:
        """A rank holds no gradient all the time, and the host's updates need no random numbers of its device."""

    def follow(self, action: Action) -> None:
        using = self.using.get(action.chunk, [])
        if action.kind is Kind.LOAD:
            self.load(using)
        elif action.kind is Kind.STORE:
            self.store(using)
        elif action.kind is Kind.WAIT_STORE:
            self.finish_store(using)
        elif action.kind is not Kind.UPDATE:
            super().follow(action)
        if action.kind is Kind.WAIT_GATHER:
            self.finish_gather(using)

    def load(self, units: Sequence[HeldUnit]) -> None:
        """Loads what is neither gathered nor loaded. With one data-parallel rank that fills the full weights."""
        for unit in units:
            if self.offload.parameters and not unit.holders and not unit.loaded and not unit.copied:
                unit.loaded = True
                amount = self.size.weights_of(unit.size) * unit.part
                self.ledger.take("loaded" if unit.partitioned else "resident", amount)

    def gather(self, units: Sequence[HeldUnit], chunk: int) -> None:
        self.load(units)
        super().gather(units, chunk)

    def finish_gather(self, units: Sequence[HeldUnit]) -> None:
        """Frees the parts that a gather copied."""
        for unit in units:
            if unit.loaded and unit.partitioned:
                unit.loaded = False
                self.ledger.free("loaded", self.size.weights_of(unit.size) * unit.part)

    def release(self, units: Sequence[HeldUnit], chunk: int) -> None:
        super().release(units, chunk)
        for unit in units:
            if unit.loaded and not unit.holders:
                unit.loaded = False
                self.ledger.free("resident", self.size.weights_of(unit.size) * unit.part)

    def begin_backward(self, units: Sequence[HeldUnit]) -> None:
        super().begin_backward(units)
        for unit in units:
            if not unit.partitioned and not unit.size.frozen and not unit.accumulating:
                unit.accumulating = True
                self.ledger.take("gradients", self.size.gradients * unit.part)

    def store(self, units: Sequence[HeldUnit]) -> None:
        """Converts the gradient to the type of the master weights, in which it travels."""
        for unit in units:
            if unit.is_alone and not unit.size.frozen:
                self.finish_gradient(unit)

    def finish_store(self, units: Sequence[HeldUnit]) -> None:
        for unit in units:
            if unit.is_alone and not unit.size.frozen:
                self.drop_gradient(unit)

    def drop_gradient(self, unit: HeldUnit) -> None:
        unit.accumulating = False
        self.ledger.free("gradients", self.size.master * unit.part)

    def step(self) -> None:
        """Stores what several chunks share, one unit after another."""
        for unit in self.training:
            if unit.is_alone:
                continue
            self.finish_gradient(unit)
            self.drop_gradient(unit)


def device_weights(units: Sequence[UnitSize], offload: Offload, sharding: Sharding, size: ElementBytes) -> int:
    """Returns the bytes of weights that stay on the device between steps."""
    return 0 if offload.parameters else sum(size.weights_of(unit) * unit.kept(sharding) for unit in units)


def host_memory(
    units: Sequence[UnitSize],
    offload: Offload | None,
    sharding: Sharding,
    size: ElementBytes,
    step: int | None = None,
) -> HostMemory:
    """Returns what a rank takes on its host.

    Args:
        step: temporary memory of an optimizer that steps on all units together, in place of ``size.update``.
    """
    weights = master = gradients = owned = 0
    at_once, states = [], []
    for unit in units:
        part = unit.part(sharding)
        if unit.frozen:
            holds = unit.whole_on == "host" or (offload is not None and offload.parameters)
            weights += size.weights_of(unit) * part // unit.home_shared_by if holds else 0
            continue
        weights += size.weights * part if size.weights < size.master else 0
        master += size.master * part
        gradients += size.master * part
        at_once.append(min(part, unit.trainable))
        owned += at_once[-1]
        states.append(size.state(unit, at_once[-1]))
    together = owned if size.updates_together else max(at_once, default=0)
    if not at_once:
        return HostMemory(weights, 0, 0, 0, 0, weights)
    state = total(states)
    update = step
    if step is None:
        block = None if size.update_block is None else BLOCK_ON_HOST
        update = size.passing_update(together, block)
        update = None if update is None else update + size.random_numbers(block)
    peak = weights + master + gradients + (state or 0) + (update or 0)
    return HostMemory(weights, master, state, gradients, update, peak)


class OnDisk(NamedTuple):
    """What lies on a disk, of what the host holds."""

    optimizer: bool = False
    """Optimizer state, gradients, and master weights that have memory of their own."""
    parameters: bool = False
    """This rank's shards of the parameters, which are the master weights too if these are no copy."""
    inputs: bool = False
    """Inputs of chunks that wait for their backward."""

    @property
    def state(self) -> bool:
        """Whether the disk holds state of units."""
        return self.optimizer or self.parameters


class DiskUse(NamedTuple):
    """Bytes of one rank."""

    held: int
    """On the disk."""
    read: int
    """From the disk, in a step."""
    written: int
    """To the disk, in a step."""
    buffers: int
    """In the memory of the host."""


class _Homes(NamedTuple):
    """Bytes on the disk of one unit."""

    gradient: int
    master: int
    states: int
    weights: int


def room(size: int) -> int:
    """Returns the bytes that ``size`` bytes take in the file and in a buffer."""
    return -(-size // DISK_BLOCK) * DISK_BLOCK


def disk_use(
    actions: Sequence[Action],
    units: Sequence[UnitSize],
    offload: Offload | None,
    on_disk: OnDisk,
    sharding: Sharding,
    size: ElementBytes,
    activations: ActivationBytes | None = None,
) -> DiskUse:
    """Returns what a rank that runs ``actions``, a training step, has on the disk and moves there. An unknown optimizer
    state is left out, and so are inputs of chunks if ``activations`` are unknown."""
    held, read, written, largest = *_inputs(actions, on_disk, activations), 0
    for unit in on_host(units, offload) if offload is not None else ():
        part = unit.part(sharding)
        homes = _homes(unit, on_disk, part, size)
        held += sum(homes)
        if on_disk.parameters and offload is not None:
            loads = bus_bytes(actions, [unit], offload, sharding, size).loaded // (size.weights_of(unit) * part)
            read += loads * homes.weights
        if not unit.frozen:
            read += homes.gradient + homes.master + homes.states + homes.weights * (size.weights == size.master)
            written += sum(homes)
            largest = max(largest, sum(homes))
    loads_pieces, stores_pieces = on_disk.parameters or on_disk.inputs, on_disk.optimizer or on_disk.inputs
    buffers = UPDATE_BUFFERS * largest + (loads_pieces + stores_pieces) * PIECES * PIECE
    return DiskUse(held, read, written, buffers)


def host_beside_disk(host: HostMemory, on_disk: OnDisk, size: ElementBytes, buffers: int) -> HostMemory:
    """Returns what remains of ``host`` when a part of it lies on a disk, with the ``buffers`` in its peak."""
    is_copy = size.weights < size.master
    kept = replace(
        host,
        weights=0 if on_disk.parameters else host.weights,
        master_weights=0 if (on_disk.optimizer if is_copy else on_disk.parameters) else host.master_weights,
        optimizer_state=0 if on_disk.optimizer else host.optimizer_state,
        gradients=0 if on_disk.optimizer else host.gradients,
    )
    kinds = kept.weights, kept.master_weights, kept.optimizer_state, kept.gradients, kept.update, kept.gathered
    return replace(kept, peak=sum(kind or 0 for kind in kinds) + buffers)


def _homes(unit: UnitSize, on_disk: OnDisk, part: int, size: ElementBytes) -> _Homes:
    weights = room(size.weights_of(unit) * part) if on_disk.parameters else 0
    if unit.frozen or not on_disk.optimizer:
        return _Homes(0, 0, 0, weights)
    full = room(size.master * part)
    tensors = (size.optimizer or 0) // size.master
    states = tensors * room(size.master * min(part, unit.trainable))
    return _Homes(full, full if size.weights < size.master else 0, states, weights)


def _inputs(actions: Sequence[Action], on_disk: OnDisk, activations: ActivationBytes | None) -> tuple[int, int, int]:
    """Returns what inputs of chunks take on the disk, and what of them is read and written in a step."""
    if not on_disk.inputs or activations is None:
        return 0, 0, 0
    read = written = 0
    held: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for action in actions:
        if action.kind not in (Kind.STORE_INPUT, Kind.LOAD_INPUT, Kind.WAIT_LOAD_INPUT):
            continue
        moved = room(activations.chunks[action.chunk - 1].result)
        if action.kind is Kind.STORE_INPUT:
            written += moved
            held[moved] += moved
            most |= held
        elif action.kind is Kind.LOAD_INPUT:
            read += moved
        else:
            held[moved] -= moved
    # The room of an input serves others of its size again.
    return most.total(), read, written


def slots_of(updates: str) -> int:
    """Returns how many states a rank's folder has at most, for ``updates`` of :class:`ProgramSpec`. The checkpoint's
    ``live_state.py`` has the reason."""
    return 3 if updates == "reduction" else 2


class LiveUse(NamedTuple):
    """Bytes of one rank, at most; None if the optimizer's state is unknown."""

    held: int | None
    """In the folder."""
    written: int | None
    """In a step."""


def live_use(
    units: Sequence[UnitSize],
    sharding: Sharding,
    size: ElementBytes,
    updates: str,
) -> LiveUse:
    """Returns what live states take, without buffers and random states."""
    if size.optimizer is None:
        return LiveUse(None, None)
    written = frozen = 0
    for unit in units:
        copies = unit.shared(sharding).data_ranks // unit.parts(sharding)
        own = unit.part(sharding) // copies
        if unit.frozen:
            frozen += size.weights_of(unit) * own
        else:
            written += (size.master + size.optimizer) * own
    return LiveUse(slots_of(updates) * (written + frozen), written)
