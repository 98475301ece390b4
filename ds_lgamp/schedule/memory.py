"""The memory formula: bytes of weights, gradients and optimizer state on one pipeline rank, by following its program.

A unit is a chunk's own parameters or a tied module. It has n parameters and S parts of m = ceil(n / S) elements: S is
the number of data-parallel ranks W at stages 1, 2 and 3, and 1 at stage 0. An element takes w bytes as a weight, g as a
gradient and u, the larger of w and 4, as a master weight. A rank holds, summed over its units:

- weights: w S m; at stage 3 w m.
- resident weights, at stage 3 and S > 1: w S m between gather and release. A tied unit is there while a user is.
- master weights: u m if w < u. Optimizer state: of at most m elements, those the optimizer owns.
- gradients, S > 1: u m from the reduction to the end of the step. S = 1: g n for good; from the step's beginning to its
  end u n more if g < u.
- gradient buffers, S > 1: g S m from the first backward until the reduction is awaited, g m beside it while it is under
  way, and u m at its end if g differs from u.
- copies of a tied unit on T pipeline ranks: u T m during the step, one unit after another.

Source: ``ds_lgamp/partition``, which a test compares with this. A reduction is awaited as late as possible: at stages
2 and 3 when another chunk's backward begins and ``resident_chunks`` buffers are held, at stage 1 at the step. Not
covered: activations (:attr:`Memory.stored_activations` counts them), posted receives, buffers of layers, temporaries of
layers, optimizer and norm, step counters, and a second copy of a gradient buffer while gloo reduces it.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.schedule.simulate import peak_live_activations

_MASTER_BYTES = 4


@dataclass(frozen=True)
class UnitSize:
    """What is gathered, released and reduced together: a chunk's own parameters, or a tied module on one rank."""

    parameters: int
    trainable: int
    """Those the optimizer owns."""
    chunks: tuple[int, ...]
    """The chunks of the rank that use it; one unless the module is tied."""
    tied: bool = False
    copies: int = 1
    """Pipeline ranks that hold the tied module."""

    def parts(self, zero_stage: int, data_ranks: int) -> int:
        """Into how many equal parts the unit is cut."""
        return data_ranks if zero_stage > 0 else 1

    def part(self, zero_stage: int, data_ranks: int) -> int:
        """Elements of a part, padding included."""
        return -(-self.parameters // self.parts(zero_stage, data_ranks))


@dataclass(frozen=True)
class ElementBytes:
    """Bytes per element."""

    weights: int = 4
    gradients: int = 4
    """In which gradients accumulate and travel."""
    optimizer: int | None = 0
    """Optimizer state per element, without master weights; None if unknown."""

    @property
    def master(self) -> int:
        """Of what the optimizer updates: half-precision weights have a copy in fp32."""
        return max(self.weights, _MASTER_BYTES)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank by kind, each at its highest in a step."""

    weights: int
    """Held between steps."""
    resident_weights: int
    master_weights: int
    optimizer_state: int | None
    """On the first data-parallel rank, which has most; None if unknown."""
    gradients: int
    """What the optimizer step reads."""
    gradient_buffers: int
    """Full gradients and what their reductions receive."""
    tied_copies: int
    peak: int
    """The most of all kinds together at any moment; without optimizer state if that is unknown."""
    stored_activations: int
    """Forwards whose backward is still to come, each of one chunk and micro-batch: with full recomputation, as many
    chunk inputs are stored. A number, not bytes: shapes are unknown before a batch is seen."""


def rank_memory(
    actions: Sequence[Action],
    units: Sequence[UnitSize],
    zero_stage: int,
    data_ranks: int,
    gradient_buffers: int,
    element_bytes: ElementBytes,
) -> Memory:
    """What a pipeline rank holds while it runs ``actions``, a training step's program.

    Args:
        units: those of the rank.
        gradient_buffers: how many full gradients of chunks are held before a reduction is awaited (stages 2 and 3).
    """
    size = element_bytes
    weights = master = trainable = 0
    for unit in units:
        part = unit.part(zero_stage, data_ranks)
        parts = 1 if zero_stage == 3 else unit.parts(zero_stage, data_ranks)
        weights += size.weights * part * parts
        master += size.master * part if size.weights < size.master else 0
        trainable += min(part, unit.trainable)
    optimizer = None if size.optimizer is None else size.optimizer * trainable
    walk = _Walk(units, zero_stage, data_ranks, gradient_buffers, size)
    for action in actions:
        walk.follow(action)
    return Memory(
        weights=weights,
        resident_weights=walk.most["resident"],
        master_weights=master,
        optimizer_state=optimizer,
        gradients=walk.most["gradients"],
        gradient_buffers=walk.most["buffers"],
        tied_copies=walk.most["copies"],
        peak=weights + master + (optimizer or 0) + walk.most_together,
        stored_activations=peak_live_activations(actions),
    )


class _Walk:
    """Takes and frees on paper what ``ZeroPartition`` takes and frees."""

    def __init__(
        self, units: Sequence[UnitSize], zero_stage: int, data_ranks: int, gradient_buffers: int, size: ElementBytes
    ) -> None:
        self.units = [_Unit(unit, zero_stage, data_ranks) for unit in units]
        self.using = {chunk: [unit for unit in self.units if chunk in unit.size.chunks] for chunk in _chunks(units)}
        self.partitioned = zero_stage > 0 and data_ranks > 1
        self.zero_stage, self.gradient_buffers, self.size = zero_stage, gradient_buffers, size
        self.reducing: deque[_Unit] = deque()
        self.held: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.most_together = 0
        if not self.partitioned:
            for unit in self.units:
                self.take("gradients", size.gradients * unit.part)

    def take(self, kind: str, amount: int) -> None:
        self.held[kind] += amount
        self.most[kind] = max(self.most[kind], self.held[kind])
        self.most_together = max(self.most_together, self.held.total())

    def free(self, kind: str, amount: int) -> None:
        self.held[kind] -= amount

    def follow(self, action: Action) -> None:
        using = self.using.get(action.chunk, [])
        if action.kind is Kind.GATHER:
            self.gather(using, action.chunk)
        elif action.kind is Kind.RELEASE:
            self.release(using, action.chunk)
        elif action.kind is Kind.BACKWARD and self.partitioned:
            self.begin_backward(using)
        elif action.kind is Kind.REDUCE and self.partitioned:
            self.reduce(using)
        elif action.kind is Kind.STEP:
            self.step()

    def gather(self, units: Sequence["_Unit"], chunk: int) -> None:
        for unit in units:
            if not unit.holders and self.partitioned and self.zero_stage == 3:
                self.take("resident", self.size.weights * unit.full)
            unit.holders.add(chunk)

    def release(self, units: Sequence["_Unit"], chunk: int) -> None:
        for unit in units:
            unit.holders.discard(chunk)
            if not unit.holders and self.partitioned and self.zero_stage == 3:
                self.free("resident", self.size.weights * unit.full)

    def begin_backward(self, units: Sequence["_Unit"]) -> None:
        beginning = [unit for unit in units if not unit.accumulating]
        for unit in beginning:
            while unit in self.reducing:
                self.await_oldest_reduction()
            if self.zero_stage >= 2 and not unit.size.tied:
                while self.reducing and self.buffers_of_chunks() >= self.gradient_buffers:
                    self.await_oldest_reduction()
        for unit in beginning:
            self.take("buffers", self.size.gradients * unit.full)
            unit.accumulating = True

    def buffers_of_chunks(self) -> int:
        return sum((unit.accumulating or unit in self.reducing) and not unit.size.tied for unit in self.units)

    def reduce(self, units: Sequence["_Unit"]) -> None:
        for unit in units:
            unit.users_done += 1
            if unit.users_done == len(unit.size.chunks):
                unit.users_done = 0
                unit.accumulating = False
                self.take("buffers", self.size.gradients * unit.part)
                self.reducing.append(unit)

    def await_oldest_reduction(self) -> None:
        unit = self.reducing.popleft()
        done_with = self.size.gradients * (unit.full + unit.part)
        if self.size.gradients != self.size.master:
            self.take("buffers", self.size.master * unit.part)
            done_with += self.size.master * unit.part
        self.free("buffers", done_with)
        if not unit.reduced:
            # A later group's gradient is added to this one.
            self.take("gradients", self.size.master * unit.part)
        unit.reduced = True

    def step(self) -> None:
        while self.reducing:
            self.await_oldest_reduction()
        # Tied units are summed last, one after another.
        for unit in sorted(self.units, key=lambda unit: unit.size.tied):
            if not self.partitioned and self.size.gradients != self.size.master:
                self.take("gradients", self.size.master * unit.part)
            if unit.size.copies > 1:
                self.take("copies", self.size.master * unit.part * unit.size.copies)
                self.free("copies", self.size.master * unit.part * unit.size.copies)


class _Unit:
    """A unit and where it stands in the program."""

    def __init__(self, size: UnitSize, zero_stage: int, data_ranks: int) -> None:
        self.size = size
        self.part = size.part(zero_stage, data_ranks)
        self.full = self.part * size.parts(zero_stage, data_ranks)
        self.holders: set[int] = set()
        self.users_done = 0
        self.accumulating = False
        self.reduced = False


def _chunks(units: Sequence[UnitSize]) -> set[int]:
    return {chunk for unit in units for chunk in unit.chunks}
