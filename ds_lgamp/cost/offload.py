"""Predicts what offloading leaves on the device, and what it takes in the memory of the host. ``memory.py`` has the
formula."""

from collections.abc import Sequence
from dataclasses import dataclass

from ds_lgamp.cost.state import HeldUnit, Ledger, StateWalk
from ds_lgamp.cost.units import ElementBytes, Sharding, UnitSize
from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.schedule.spec import Offload


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


def on_host(units: Sequence[UnitSize], offload: Offload) -> list[UnitSize]:
    """Returns the units of which the host holds something."""
    return [unit for unit in units if not stays(unit, offload)]


def stays(unit: UnitSize, offload: Offload) -> bool:
    """Whether all of ``unit`` stays on the device."""
    return bool(offload.on_device) and (unit.tied or unit.chunks[0] in offload.on_device)


class StayingStateWalk(StateWalk):
    """Takes and frees what a partition takes and frees of units that stay on the device beside others that do not."""

    def follow(self, action: Action) -> None:
        # UPDATE is the host's; STEP updates these units.
        if action.kind is not Kind.UPDATE:
            super().follow(action)


class OffloadedStateWalk(StateWalk):
    """Takes and frees in a ledger what a partition with offloading takes and frees on the device."""

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

    def take_gradients(self) -> None:
        """A rank holds no gradient all the time."""

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
            if self.offload.parameters and not unit.holders and not unit.loaded:
                unit.loaded = True
                self.ledger.take("loaded" if self.partitioned else "resident", self.size.weights * unit.part)

    def gather(self, units: Sequence[HeldUnit], chunk: int) -> None:
        self.load(units)
        super().gather(units, chunk)

    def finish_gather(self, units: Sequence[HeldUnit]) -> None:
        """Frees the parts that a gather copied."""
        for unit in units:
            if unit.loaded and self.partitioned:
                unit.loaded = False
                self.ledger.free("loaded", self.size.weights * unit.part)

    def release(self, units: Sequence[HeldUnit], chunk: int) -> None:
        super().release(units, chunk)
        for unit in units:
            if unit.loaded and not unit.holders:
                unit.loaded = False
                self.ledger.free("resident", self.size.weights * unit.part)

    def begin_backward(self, units: Sequence[HeldUnit]) -> None:
        super().begin_backward(units)
        for unit in units:
            if not self.partitioned and not unit.size.frozen and not unit.accumulating:
                unit.accumulating = True
                self.ledger.take("gradients", self.size.gradients * unit.part)

    def store(self, units: Sequence[HeldUnit]) -> None:
        """Converts the gradient to the type of the master weights, in which it travels."""
        for unit in units:
            if unit.is_alone and not unit.size.frozen and self.converts:
                self.ledger.take("gradients", self.size.master * unit.part)
                self.ledger.free("gradients", self.size.gradients * unit.part)

    def finish_store(self, units: Sequence[HeldUnit]) -> None:
        for unit in units:
            if unit.is_alone and not unit.size.frozen:
                self.drop_gradient(unit)

    def drop_gradient(self, unit: HeldUnit) -> None:
        unit.accumulating = False
        self.ledger.free("gradients", self.size.master * unit.part)

    @property
    def converts(self) -> bool:
        """Whether a gradient has another type when it accumulates than when the optimizer reads it."""
        return not self.partitioned and self.size.gradients != self.size.master

    def step(self) -> None:
        """Stores what several chunks share, one unit after another."""
        for unit in self.training:
            if unit.is_alone:
                continue
            if self.converts:
                self.ledger.take("gradients", self.size.master * unit.part)
                self.ledger.free("gradients", self.size.gradients * unit.part)
            if unit.size.copies > 1:
                self.ledger.pass_by("copies", self.size.master * unit.part * unit.size.copies)
            self.drop_gradient(unit)


def device_weights(units: Sequence[UnitSize], offload: Offload, sharding: Sharding, size: ElementBytes) -> int:
    """Returns the bytes of weights that stay on the device between steps."""
    return 0 if offload.parameters else size.weights * sum(unit.kept(sharding) for unit in units)


def host_memory(
    units: Sequence[UnitSize],
    offload: Offload,
    sharding: Sharding,
    size: ElementBytes,
    step: int | None = None,
) -> HostMemory:
    """Returns what a rank takes on its host.

    Args:
        step: temporary memory of an optimizer that steps on all units together, in place of ``size.update``.
    """
    weights = master = gradients = owned = 0
    at_once = []
    for unit in units:
        part = unit.part(sharding)
        if unit.frozen:
            weights += size.weights * part if offload.parameters else 0
            continue
        weights += size.weights * part if size.weights < size.master else 0
        master += size.master * part
        gradients += size.master * part
        at_once.append(min(part, unit.trainable))
        owned += at_once[-1]
    together = owned if size.updates_together else max(at_once, default=0)
    state = None if size.optimizer is None else size.optimizer * owned
    update = step
    if step is None and size.update is not None:
        update = size.update * together
    peak = weights + master + gradients + (state or 0) + (update or 0)
    return HostMemory(weights, master, state, gradients, update, peak)
