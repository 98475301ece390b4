"""Predicts the memory of parameters, gradients and updates on a pipeline rank by following its program. ``memory.py``
has the formula.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

from ds_lgamp.cost.units import ElementBytes, Sharding, UnitSize, packed_bytes, total
from ds_lgamp.schedule.actions import PARTITION, Action, Kind

Step = Callable[[Action], None]
"""Takes and frees what an action takes and frees."""


class Ledger:
    """Records bytes that are taken and freed on paper."""

    def __init__(self) -> None:
        self.held: defaultdict[str, int] = defaultdict(int)
        self.together = 0
        """What is held, of all kinds together."""
        self.most: defaultdict[str, int] = defaultdict(int)
        """The peak of each kind by itself."""
        self.most_together = 0
        """The peak of all kinds together."""
        self.lately = 0
        """The peak of all kinds together since somebody has last set it."""
        self._is_at_peak = False
        self._held_at_peak: dict[str, int] = {}

    @property
    def at_peak(self) -> dict[str, int]:
        """What is held of each kind at the peak of all kinds together."""
        return dict(self.held) if self._is_at_peak else self._held_at_peak

    def take(self, kind: str, amount: int) -> None:
        held = self.held[kind] = self.held[kind] + amount
        if held > self.most[kind]:
            self.most[kind] = held
        self.together += amount
        if self.together > self.lately:
            self.lately = self.together
        if self.together > self.most_together:
            self.most_together = self.together
            self._is_at_peak = True

    def free(self, kind: str, amount: int) -> None:
        if self._is_at_peak and amount:
            self._held_at_peak, self._is_at_peak = dict(self.held), False
        self.held[kind] -= amount
        self.together -= amount

    def pass_by(self, kind: str, amount: int) -> None:
        """Takes ``amount`` for a moment."""
        self.take(kind, amount)
        self.free(kind, amount)


class StateWalk:
    """Takes and frees in a ledger what ``ZeroPartition`` takes and frees in memory."""

    frees_accumulated = False
    """Whether the memory in which a gradient has accumulated is freed when the gradient is converted."""

    def __init__(
        self,
        actions: Sequence[Action],
        units: Sequence[UnitSize],
        sharding: Sharding,
        size: ElementBytes,
        ledger: Ledger,
        step: int | None = None,
    ) -> None:
        hierarchy = sharding.hierarchy
        self.units = [HeldUnit(unit, sharding, size) for unit in units]
        self.training = [unit for unit in self.units if not unit.size.frozen]
        self.using = {
            chunk: [unit for unit in self.units if chunk in unit.size.chunks] for unit in units for chunk in unit.chunks
        }
        stored = {action.chunk for action in actions if action.kind is Kind.STORE_WEIGHTS}
        for unit in self.units:
            # An earlier step has stored it.
            unit.copied = unit.size.frozen and unit.is_gathered and not stored.isdisjoint(unit.size.chunks)
        self.size = size
        self.zero_stage, self.all_to_all, self.ledger = sharding.zero_stage, sharding.all_to_all, ledger
        self.in_rank_order = sharding.in_rank_order
        self.nodes = 1 if hierarchy is None else hierarchy.nodes(sharding.data_ranks)
        self.reducing: dict[int, list[HeldUnit]] = {}
        """Units under reduction, by the chunk whose REDUCE launched it."""
        self.combining: dict[int, list[HeldUnit]] = {}
        """The same units, once the reduction inside their nodes is over."""
        self.take_held()
        self.of_step = step
        """Temporary memory of an optimizer that steps on all units together; None for others."""
        self.postpones = _postpones(actions)
        if self.postpones:
            for unit in self.training:
                unit.postponed = True
                ledger.take("gradients", self.finished(unit))

    def take_held(self) -> None:
        """Takes the gradients that a rank holds throughout, and the random numbers of updates that need some."""
        if self.training:
            self.ledger.take("update", self.size.random_numbers(self.size.update_block))
        for unit in self.training:
            if not unit.partitioned:
                self.ledger.take("gradients", self.size.gradients * unit.part)

    @property
    def steps(self) -> dict[Kind, Step]:
        """What an action of each kind takes and frees."""
        return dict.fromkeys(PARTITION | {Kind.BACKWARD, Kind.STEP}, self.follow)

    def follow(self, action: Action) -> None:
        using = self.using.get(action.chunk, [])
        if action.kind in (Kind.GATHER, Kind.LOAD_WEIGHTS):
            self.gather(using, action.chunk)
        elif action.kind is Kind.WAIT_GATHER:
            self.unpack(using)
        elif action.kind is Kind.RELEASE:
            self.release(using, action.chunk)
        elif action.kind is Kind.STORE_WEIGHTS:
            for unit in using:
                unit.copied = unit.is_gathered
        elif action.kind is Kind.BACKWARD:
            self.begin_backward(using)
        elif action.kind is Kind.REDUCE:
            self.reducing[action.chunk] = self.reduce(using)
        elif action.kind is Kind.WAIT_REDUCE:
            self.combining[action.chunk] = self.reducing.pop(action.chunk)
            for unit in self.combining[action.chunk]:
                self.finish_reduction(unit)
        elif action.kind is Kind.COMBINE:
            for unit in self.combining[action.chunk]:
                self.combine(unit)
        elif action.kind is Kind.WAIT_COMBINE:
            for unit in self.combining[action.chunk]:
                self.finish_combination(unit)
        elif action.kind is Kind.UPDATE:
            postponed = [unit for unit in using if unit.postponed]
            alone = [unit for unit in using if unit in self.training and unit.is_alone]
            self.update_alone(postponed if self.postpones else alone)
        elif action.kind is Kind.STEP:
            self.step()

    def gather(self, units: Sequence["HeldUnit"], chunk: int) -> None:
        for unit in units:
            if not unit.holders and unit.comes:
                unit.is_packed = not unit.copied
                packed = unit.packed_weights if unit.is_packed else 0
                self.ledger.take("resident", self.size.weights_of(unit.size) * unit.full + packed)
            unit.holders.add(chunk)

    def unpack(self, units: Sequence["HeldUnit"]) -> None:
        """Frees what a gather of rounded weights has received."""
        for unit in units:
            if unit.is_packed:
                unit.is_packed = False
                self.ledger.free("resident", unit.packed_weights)

    def release(self, units: Sequence["HeldUnit"], chunk: int) -> None:
        for unit in units:
            unit.holders.discard(chunk)
            if not unit.holders and unit.comes:
                self.ledger.free("resident", self.size.weights_of(unit.size) * unit.full)

    def begin_backward(self, units: Sequence["HeldUnit"]) -> None:
        beginning = [unit for unit in units if unit.partitioned and not unit.size.frozen and not unit.accumulating]
        for unit in beginning:
            # The program waits for this chunk's REDUCE only. Another chunk's REDUCE may still reduce a tied unit.
            self.finish_reduction(unit)
            self.combine(unit)
            self.finish_combination(unit)
        for unit in beginning:
            self.ledger.take("buffers", self.size.gradients * unit.full)
            unit.accumulating = True

    def reduce(self, units: Sequence["HeldUnit"]) -> list["HeldUnit"]:
        """Starts the reduction of each unit whose last user is done. Returns the units whose reduction must be
        finished."""
        done = []
        for unit in units:
            if unit.size.frozen:
                continue
            unit.users_done += 1
            if unit.users_done == len(unit.size.chunks):
                unit.users_done = 0
                if unit.communication is not None:
                    kind = "buffers" if unit.partitioned else "gradients"
                    self.ledger.take(kind, unit.communication * unit.full)
                if unit.partitioned or (self.in_rank_order and unit.data_ranks > 1):
                    self.start_reduction(unit)
                    done.append(unit)
        return done

    def start_reduction(self, unit: "HeldUnit") -> None:
        unit.accumulating, unit.reducing = False, True
        if unit.packed_gradients:
            # What is sent and what is received.
            self.ledger.take("buffers", 2 * unit.packed_gradients)
            self.ledger.free("buffers", self.size.gradients * unit.full)
            return
        if unit.communication is not None and unit.partitioned:
            self.ledger.free("buffers", self.size.gradients * unit.full)
        self.ledger.take("buffers", self.received(unit))

    def received(self, unit: "HeldUnit") -> int:
        """Returns the bytes that the reduction of ``unit`` receives."""
        return unit.travelling * (unit.full if self.all_to_all else unit.kept)

    def finish_reduction(self, unit: "HeldUnit") -> None:
        if not unit.reducing:
            return
        unit.reducing = False
        if unit.packed_gradients:
            self.ledger.pass_by("buffers", 2 * self.size.sums * unit.part)
            self.ledger.free("buffers", 2 * unit.packed_gradients)
            self.add(unit)
            return
        done_with = self.received(unit)
        if not unit.partitioned:
            self.ledger.pass_by("buffers", unit.travelling * unit.full // unit.data_ranks)
            self.ledger.free("buffers", done_with)
            return
        done_with += unit.travelling * unit.full
        summed = self.size.sums * unit.kept
        if self.all_to_all or unit.travelling != self.size.sums:
            self.ledger.take("buffers", summed)
            done_with += summed
        if self.nodes == 1:
            self.ledger.free("buffers", done_with)
            self.add(unit)
        else:
            self.ledger.free("buffers", done_with - summed)
            unit.node_sum = summed

    def combine(self, unit: "HeldUnit") -> None:
        """Starts to combine the node's sum with those of other nodes."""
        if not unit.node_sum:
            return
        travelling = unit.travelling * unit.kept
        if unit.travelling != self.size.sums:
            self.ledger.take("buffers", travelling)
            self.ledger.free("buffers", unit.node_sum)
        unit.node_sum = 0
        replicated = unit.part == unit.kept
        received = unit.travelling * (unit.kept if self.all_to_all else unit.part)
        unit.combining = travelling + (received if not replicated or self.in_rank_order else 0)
        self.ledger.take("buffers", unit.combining - travelling)

    def finish_combination(self, unit: "HeldUnit") -> None:
        if not unit.combining:
            return
        replicated = unit.part == unit.kept
        if replicated and self.in_rank_order:
            self.ledger.pass_by("buffers", unit.travelling * unit.kept // self.nodes)
        if unit.travelling != self.size.sums or (self.all_to_all and not replicated):
            self.ledger.pass_by("buffers", self.size.sums * unit.part)
        self.ledger.free("buffers", unit.combining)
        unit.combining = 0
        self.add(unit)

    def add(self, unit: "HeldUnit") -> None:
        """Adds what was reduced to the gradient of the shard."""
        if not unit.reduced:
            # Later groups add their gradients to this one.
            self.ledger.take("gradients", self.size.sums * unit.part)
        unit.reduced = True

    def finish_gradient(self, unit: "HeldUnit") -> None:
        """Sums the copies of a tied unit, and converts the gradient to the type of the master weights."""
        size, held = self.size, self.size.sums if unit.partitioned else unit.travelling
        frees = unit.partitioned or unit.communication is not None or self.frees_accumulated
        if held != size.sums:
            self.ledger.take("gradients", size.sums * unit.part)
            self.ledger.free("gradients", held * unit.part * frees)
            frees = True
        if unit.size.copies > 1:
            self.ledger.pass_by("copies", size.sums * unit.part * unit.size.copies)
        if size.sums != size.master:
            self.ledger.take("gradients", size.master * unit.part)
            self.ledger.free("gradients", size.sums * unit.part * frees)

    def finished(self, unit: "HeldUnit") -> int:
        """Returns the bytes of a gradient that the optimizer reads, if it does not lie where it accumulated."""
        size = self.size
        lies_apart = unit.partitioned or unit.communication is not None or size.gradients != size.master
        return size.master * unit.part if lies_apart else 0

    def update_alone(self, units: Sequence["HeldUnit"]) -> None:
        """Finishes the gradients of ``units`` that the step before has not, and then updates one unit after another,
        and frees its gradient."""
        for unit in units:
            if not unit.postponed:
                self.finish_gradient(unit)
                unit.updated = True
        for unit in units:
            unit.postponed = False
            self.update([unit])
            self.ledger.free("gradients", self.finished(unit))

    def update(self, units: Sequence["HeldUnit"]) -> None:
        owned = [min(unit.part, unit.size.trainable) for unit in units]
        at_once = sum(owned) if self.size.updates_together else max(owned, default=0)
        passing = self.size.passing_update(at_once, self.size.update_block)
        self.ledger.pass_by("update", (passing or 0) if self.of_step is None else self.of_step)

    def step(self) -> None:
        units = [unit for unit in self.training if not unit.updated]
        # Tied units are summed last, one after another.
        for unit in sorted(units, key=lambda unit: unit.size.tied):
            self.finish_gradient(unit)
        if not self.postpones:
            self.update(units)


class HeldUnit:
    """A unit and its state at the current action of its rank."""

    def __init__(self, size: UnitSize, sharding: Sharding, element: ElementBytes) -> None:
        self.size = size
        shared = size.shared(sharding)
        self.data_ranks, self.partitioned = shared.data_ranks, shared.partitioned
        self.is_gathered = size.is_gathered(sharding)
        self.part = size.part(sharding)
        self.full = self.part * size.parts(sharding)
        self.kept = self.full // shared.sharers
        self.comes = (
            shared.partitioned and sharding.zero_stage == 3 if size.whole_on is None else size.whole_on == "host"
        )
        """Whether a gather takes the full weights, and a release frees them."""
        bits = element.bits_of(size)
        self.packed_weights = (
            packed_bytes(self.full + self.part, bits) if bits and shared.partitioned and self.comes else 0
        )
        """Bytes of a gather of rounded weights, beside the weights; 0 for exact ones."""
        self.is_packed = False
        """Whether its gather is under way."""
        bits = element.travel.gradients
        self.packed_gradients = packed_bytes(self.full, bits) if bits and shared.partitioned else 0
        """Bytes of a rounded gradient; 0 for an exact one."""
        # A rank that has the unit alone sends no gradients.
        self.communication = element.communication if self.data_ranks > 1 else None
        """Bytes per element of a gradient that travels in another type than it accumulates in, else None."""
        self.travelling = element.gradients if self.communication is None else self.communication
        self.holders: set[int] = set()
        self.copied = False
        """Whether the host has a copy of what its gather brings."""
        self.users_done = 0
        self.accumulating = False
        self.reducing = False
        """Whether its reduction is under way."""
        self.is_alone = size.copies == 1 and len(size.chunks) == 1
        """Whether one chunk uses it, here and on other ranks."""
        self.postponed = False
        """Whether the step before left its update to this one."""
        self.updated = False
        """Whether it was updated before the step."""
        self.node_sum = self.combining = 0
        """Bytes of what the node has summed up, and of what is under way between nodes."""
        self.reduced = False
        self.loaded = False
        """Whether the weights that the host sent lie on the device: until the gather is over or, with one data-parallel
        rank, until they are released."""


def _postpones(actions: Sequence[Action]) -> bool:
    """Whether updates that the previous step left come before the forwards."""
    kinds = (action.kind for action in actions if action.kind in (Kind.UPDATE, Kind.FORWARD))
    return next(kinds, None) is Kind.UPDATE


def held_between_steps(
    units: Sequence[UnitSize], sharding: Sharding, size: ElementBytes
) -> tuple[int, int, int | None]:
    """Returns the bytes of weights, master weights and optimizer state that a device holds between steps."""
    weights = master = 0
    states = []
    for unit in units:
        part = unit.part(sharding)
        weights += size.weights_of(unit) * unit.kept(sharding)
        master += size.master * part if size.weights < size.master and not unit.frozen else 0
        states.append(size.state(unit, min(part, unit.trainable)))
    return weights, master, total(states)
