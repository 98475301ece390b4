"""The memory formula: predicts the bytes on one pipeline rank by following its program.

A **unit** is gathered, released and reduced together. It holds the trainable or the frozen parameters of one chunk or
of one tied module. Symbols:

- W: data-parallel ranks.
- S: equal parts of a unit's storage. S is W at stages 1, 2 and 3, and 1 at stage 0.
- m: elements of one part, as ``storage.py`` counts them.
- T: pipeline ranks that hold a copy of a tied unit.
- w: bytes per element of a weight.
- g: bytes per element of a gradient that accumulates.
- c: bytes per element of a gradient that travels between data-parallel ranks. c is g unless gradients travel in another
  type.
- u: bytes per element of a master weight, the larger of w and 4.

**State**, summed over the units of the rank. Frozen units have only the first two kinds.

- weights: w S m; at stage 3 w m.
- resident weights, at stage 3 with S > 1: w S m from gather to release. A tied unit stays while any of its users does.
- master weights: u m if w < u.
- optimizer state: for the elements that the optimizer owns, at most m.
- gradients, S > 1: u m from the reduction to the end of the step.
- gradients, S = 1: g m all the time.
  - If gradients travel in another type: c m more from the reduction on.
  - If c < u: u m during STEP, in place of those c m.
- gradient buffers, S > 1:
  - g S m from the first backward until the reduction begins.
  - c S m from then until the reduction is awaited. If the types differ, both exist for a moment.
  - c m received while the reduction is under way; c S m if an all-to-all replaces the reduce-scatter.
  - u m at the end of the reduction, if c differs from u or this rank sums the parts.
- gradient buffers, stage 0 with W > 1, if gradients add up in rank order: c m from the reduction until it is awaited,
  and c m / W at its end.
- copies of a tied unit: u T m during STEP, one unit after another.
- temporary memory of the optimizer: for one unit's part after another, or for all parts together.

The program says when a reduction is awaited. The reduction of a tied unit is awaited with that of its last user, or
when the backward of another user begins. Stage 1 keeps the gradients of all chunks from the first micro-batch group to
the last.

**Activations**, summed over micro-batches.

- batch, on a rank that owns an end of the model: inputs and labels of all micro-batches, until chunk 0, or else the
  last chunk, takes them.
  - The rank of chunk 0 then keeps the inputs until the backward of chunk 0; without recomputation, until its forward.
  - The rank of the last chunk then keeps the labels until the backward of the last chunk.
- inputs of chunks, with recomputation: from the forward to the end of the backward.
- handed over: results, and gradients of results, from their compute until another chunk of the same rank takes them.
- receives: from when they are posted until they are taken.
- sends: from the compute of the tensor until the send is awaited. Two per link and kind stay under way until the end of
  the batch.
- saved, without recomputation: tensors that autograd keeps from the forward to the backward.
- working memory: the peak of the running forward or backward beside all that, and the tensor it computes on.
  - With recomputation, this tensor is a copy of the input.
  - Without recomputation, a forward computes on the input itself. It computes on a copy if the input is the result of a
    chunk on the same rank that is not recomputed either.
- random states, with recomputation: one set, and one more for every stored input if layers draw.

A last chunk whose backwards directly follow its forwards is never recomputed.

Source: ``ds_lgamp/partition`` and ``ds_lgamp/runtime``; tests compare both with this formula. It holds from the second
step on, because the first one learns shapes, and while shapes do not change. It does not cover:

- scalars and buffers of layers.
- the copy of labels from which a recomputation computes the loss.
- memory inside a kernel.
- data that the script itself holds.
- the place of micro-batches: beside a GPU, they wait in the host's memory.
- members of a result that have no gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_lgamp.cost.activations import ActivationBytes, ActivationMemory, ActivationWalk
from ds_lgamp.cost.ledger import Ledger
from ds_lgamp.cost.storage import part_size
from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.schedule.simulate import peak_live_activations

_MASTER_BYTES = 4


@dataclass(frozen=True)
class UnitSize:
    """The size of a unit: the trainable or the frozen parameters of one chunk, or of one tied module on one rank."""

    parameters: int
    """Elements that its parameters take in its storage, each rounded up by ``storage.aligned``."""
    trainable: int
    """How many of these elements the optimizer owns."""
    chunks: tuple[int, ...]
    """The chunks of the rank that use the unit; one unless the module is tied."""
    tied: bool = False
    copies: int = 1
    """How many pipeline ranks hold the tied module and sum their gradients."""
    frozen: bool = False
    """Whether no parameter has a gradient."""

    def parts(self, zero_stage: int, data_ranks: int) -> int:
        """Returns how many equal parts the unit is cut into."""
        return data_ranks if zero_stage > 0 else 1

    def part(self, zero_stage: int, data_ranks: int) -> int:
        """Returns the elements of one part, including padding."""
        return part_size(self.parameters, data_ranks) * (data_ranks // self.parts(zero_stage, data_ranks))


@dataclass(frozen=True)
class ElementBytes:
    """Bytes per element."""

    weights: int = 4
    gradients: int = 4
    """Gradients while they accumulate."""
    optimizer: int | None = 0
    """Optimizer state, without master weights; None if unknown."""
    update: int | None = 0
    """Temporary memory of the optimizer, per element it updates at once; None if unknown."""
    updates_together: bool = False
    """Whether the optimizer updates all elements at once (torch's ``foreach``) or one unit after another."""
    communication: int | None = None
    """Gradients while they travel, if they travel in another type; None if they travel as they accumulate."""

    @property
    def master(self) -> int:
        """Weights that the optimizer updates. Half-precision weights have a copy in fp32."""
        return max(self.weights, _MASTER_BYTES)

    @property
    def travelling(self) -> int:
        """Gradients while they are reduced."""
        return self.gradients if self.communication is None else self.communication


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank by kind, each at its peak in a step."""

    weights: int
    """Held between steps."""
    resident_weights: int
    master_weights: int
    optimizer_state: int | None
    """On the first data-parallel rank, which has the most; None if unknown."""
    gradients: int
    """Gradients that the optimizer step reads."""
    gradient_buffers: int
    """Full gradients and the receive buffers of their reductions."""
    tied_copies: int
    update: int | None
    """Temporary memory of the optimizer; None if unknown."""
    peak: int
    """The peak of all kinds together, without unknown ones."""
    stored_activations: int
    """The most forwards, one per chunk and micro-batch, whose backward is still to come; a number, not bytes. With full
    recomputation so many chunk inputs are stored, except inputs of a last chunk that turns at once."""
    activations: ActivationMemory | None
    """None if shapes are unknown."""


def rank_memory(
    actions: Sequence[Action],
    units: Sequence[UnitSize],
    zero_stage: int,
    data_ranks: int,
    element_bytes: ElementBytes,
    all_to_all: bool = False,
    activation_bytes: ActivationBytes | None = None,
    in_rank_order: bool = False,
) -> Memory:
    """Predicts the memory of a pipeline rank that runs ``actions``, the program of a training step.

    Args:
        units: the units of the rank.
        all_to_all: whether an all-to-all replaces the reduce-scatter, as on gloo.
        activation_bytes: None if shapes are unknown; the peak then excludes activations.
        in_rank_order: whether gradients add up in rank order at stage 0 too; requires ``all_to_all``.
    """
    size = element_bytes
    weights = master = trainable = 0
    for unit in units:
        part = unit.part(zero_stage, data_ranks)
        parts = 1 if zero_stage == 3 else unit.parts(zero_stage, data_ranks)
        weights += size.weights * part * parts
        master += size.master * part if size.weights < size.master and not unit.frozen else 0
        trainable += min(part, unit.trainable)
    optimizer = None if size.optimizer is None else size.optimizer * trainable
    ledger = Ledger()
    walks: list[_StateWalk | ActivationWalk] = [
        _StateWalk(units, zero_stage, data_ranks, size, all_to_all, in_rank_order, ledger)
    ]
    if activation_bytes is not None:
        walks.append(ActivationWalk(actions, activation_bytes, ledger))
    for action in actions:
        for walk in walks:
            walk.follow(action)
    return Memory(
        weights=weights,
        resident_weights=ledger.most["resident"],
        master_weights=master,
        optimizer_state=optimizer,
        gradients=ledger.most["gradients"],
        gradient_buffers=ledger.most["buffers"],
        tied_copies=ledger.most["copies"],
        update=None if size.update is None else ledger.most["update"],
        peak=weights + master + (optimizer or 0) + ledger.most_together,
        stored_activations=peak_live_activations(actions),
        activations=None if activation_bytes is None else ActivationMemory.of(ledger),
    )


class _StateWalk:
    """Takes and frees in a ledger what ``ZeroPartition`` takes and frees in memory."""

    def __init__(
        self,
        units: Sequence[UnitSize],
        zero_stage: int,
        data_ranks: int,
        size: ElementBytes,
        all_to_all: bool,
        in_rank_order: bool,
        ledger: Ledger,
    ) -> None:
        self.units = [_Unit(unit, zero_stage, data_ranks) for unit in units]
        self.training = [unit for unit in self.units if not unit.size.frozen]
        self.using = {chunk: [unit for unit in self.units if chunk in unit.size.chunks] for chunk in _chunks(units)}
        self.partitioned = zero_stage > 0 and data_ranks > 1
        self.data_ranks, self.receives = data_ranks, self.partitioned or (in_rank_order and data_ranks > 1)
        # One data-parallel rank alone sends no gradients.
        self.size = size if data_ranks > 1 else replace(size, communication=None)
        self.zero_stage, self.all_to_all, self.ledger = zero_stage, all_to_all, ledger
        self.reducing: dict[int, list[_Unit]] = {}
        """Units under reduction, by the chunk whose REDUCE launched it."""
        if not self.partitioned:
            for unit in self.training:
                ledger.take("gradients", size.gradients * unit.part)

    def follow(self, action: Action) -> None:
        using = self.using.get(action.chunk, [])
        if action.kind is Kind.GATHER:
            self.gather(using, action.chunk)
        elif action.kind is Kind.RELEASE:
            self.release(using, action.chunk)
        elif action.kind is Kind.BACKWARD and self.partitioned:
            self.begin_backward(using)
        elif action.kind is Kind.REDUCE:
            self.reducing[action.chunk] = self.reduce(using)
        elif action.kind is Kind.WAIT_REDUCE:
            for unit in self.reducing.pop(action.chunk):
                self.finish_reduction(unit)
        elif action.kind is Kind.STEP:
            self.step()

    def gather(self, units: Sequence["_Unit"], chunk: int) -> None:
        for unit in units:
            if not unit.holders and self.partitioned and self.zero_stage == 3:
                self.ledger.take("resident", self.size.weights * unit.full)
            unit.holders.add(chunk)

    def release(self, units: Sequence["_Unit"], chunk: int) -> None:
        for unit in units:
            unit.holders.discard(chunk)
            if not unit.holders and self.partitioned and self.zero_stage == 3:
                self.ledger.free("resident", self.size.weights * unit.full)

    def begin_backward(self, units: Sequence["_Unit"]) -> None:
        beginning = [unit for unit in units if not unit.size.frozen and not unit.accumulating]
        for unit in beginning:
            # The program waits for this chunk's REDUCE only. Another chunk's REDUCE may still reduce a tied unit.
            self.finish_reduction(unit)
        for unit in beginning:
            self.ledger.take("buffers", self.size.gradients * unit.full)
            unit.accumulating = True

    def reduce(self, units: Sequence["_Unit"]) -> list["_Unit"]:
        """Starts the reduction of each unit whose last user is done. Returns the units whose reduction must be
        finished."""
        done = []
        for unit in units:
            if unit.size.frozen:
                continue
            unit.users_done += 1
            if unit.users_done == len(unit.size.chunks):
                unit.users_done = 0
                if self.size.communication is not None:
                    kind = "buffers" if self.partitioned else "gradients"
                    self.ledger.take(kind, self.size.communication * unit.full)
                if self.receives:
                    self.start_reduction(unit)
                    done.append(unit)
        return done

    def start_reduction(self, unit: "_Unit") -> None:
        unit.accumulating, unit.reducing = False, True
        if self.size.communication is not None and self.partitioned:
            self.ledger.free("buffers", self.size.gradients * unit.full)
        self.ledger.take("buffers", self.received(unit))

    def received(self, unit: "_Unit") -> int:
        """Returns the bytes that the reduction of ``unit`` receives."""
        return self.size.travelling * (unit.full if self.all_to_all else unit.part)

    def finish_reduction(self, unit: "_Unit") -> None:
        if not unit.reducing:
            return
        unit.reducing = False
        done_with = self.received(unit)
        if not self.partitioned:
            self.ledger.pass_by("buffers", self.size.travelling * unit.full // self.data_ranks)
            self.ledger.free("buffers", done_with)
            return
        done_with += self.size.travelling * unit.full
        if self.all_to_all or self.size.travelling != self.size.master:
            self.ledger.take("buffers", self.size.master * unit.part)
            done_with += self.size.master * unit.part
        self.ledger.free("buffers", done_with)
        if not unit.reduced:
            # Later groups add their gradients to this one.
            self.ledger.take("gradients", self.size.master * unit.part)
        unit.reduced = True

    def step(self) -> None:
        # Tied units are summed last, one after another.
        for unit in sorted(self.training, key=lambda unit: unit.size.tied):
            if not self.partitioned and self.size.travelling != self.size.master:
                self.ledger.take("gradients", self.size.master * unit.part)
                self.ledger.free("gradients", (self.size.communication or 0) * unit.part)
            if unit.size.copies > 1:
                self.ledger.pass_by("copies", self.size.master * unit.part * unit.size.copies)
        owned = [min(unit.part, unit.size.trainable) for unit in self.units]
        at_once = sum(owned) if self.size.updates_together else max(owned, default=0)
        self.ledger.pass_by("update", (self.size.update or 0) * at_once)


class _Unit:
    """A unit and its state at the current action."""

    def __init__(self, size: UnitSize, zero_stage: int, data_ranks: int) -> None:
        self.size = size
        self.part = size.part(zero_stage, data_ranks)
        self.full = self.part * size.parts(zero_stage, data_ranks)
        self.holders: set[int] = set()
        self.users_done = 0
        self.accumulating = False
        self.reducing = False
        """Whether its reduction is under way."""
        self.reduced = False


def _chunks(units: Sequence[UnitSize]) -> set[int]:
    return {chunk for unit in units for chunk in unit.chunks}
