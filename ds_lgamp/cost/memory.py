"""The memory formula: bytes on one pipeline rank, by following its program.

**State.** A unit is a chunk's own parameters or a tied module, those of either that train or those that are frozen. Its
storage has S equal parts of m elements, which ``storage.py`` counts: S is the number of data-parallel ranks W at stages
1, 2 and 3, and 1 at stage 0. An element takes w bytes as a weight, g as a gradient, c as a gradient that travels and u,
the larger of w and 4, as a master weight. A rank holds, summed over its units, of frozen ones the first two only:

- weights: w S m; at stage 3 w m.
- resident weights, at stage 3 and S > 1: w S m between gather and release. A tied unit is there while a user is.
- master weights: u m if w < u. Optimizer state: of at most m elements, those the optimizer owns.
- gradients, S > 1: u m from the reduction to the end of the step. S = 1: g m for good; where they travel in a type of
  their own, c m more from the reduction on; from the step's beginning to its end u m, instead of those c m, if what
  was reduced takes less.
- gradient buffers, S > 1: g S m from the first backward until the reduction begins, c S m from there until it is
  awaited, for a moment both where the types differ; beside it, while it is under way, what it receives: c m, or c S m
  where an all-to-all stands for the reduce-scatter; and u m at its end, if c differs from u or parts are summed here.
- gradient buffers, stage 0 and W > 1, where gradients add up in rank order: c m more from the reduction until it is
  awaited, and c m / W at its end.
- copies of a tied unit on T pipeline ranks: u T m during the step, one unit after another.
- the optimizer's temporaries: of one unit's part after another, or of all together.

A reduction is awaited where the program says so. That of a tied unit is awaited with its last user's, or when another
user's backward begins. Stage 1 keeps the gradients of all chunks from the first micro-batch group to the last.

**Activations**, of every micro-batch:

- batch: all micro-batches from the beginning, on a rank that owns an end of the model. Of one that chunk 0, or else the
  last chunk, has taken, inputs stay until the backward of chunk 0 (without recomputation its forward), labels until
  the backward of the last chunk, on their ranks.
- inputs of chunks, with recomputation, from the forward to the end of the backward.
- results and gradients of results that a chunk of the same rank takes, from when they are computed until then.
- receives, from when they are posted until they are taken; sends, from when the tensor is computed until they are
  awaited: two per link and kind are under way until the end of the batch.
- saved: without recomputation, what autograd keeps from the forward to the backward.
- working memory: what the forward or backward that runs takes beside all that, and what it computes on: with
  recomputation a copy of the input; without it, in the forward, the input itself or a copy of the result of another
  chunk that is not recomputed either.
- random states, with recomputation: one set; where layers draw, one more for every input stored.

A last chunk whose backwards follow its forwards at once is never recomputed.

Source: ``ds_lgamp/partition`` and ``ds_lgamp/runtime``, which tests compare with this. It holds from the second step on
(the first learns shapes) and where shapes do not change. Not covered: scalars, buffers of layers, the copy of
labels that a repeated loss is computed on, memory inside a kernel, what a script holds of its data itself, that beside
a GPU micro-batches wait in the host's memory, and members of a result that have no gradient.
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
    """What is gathered, released and reduced together: a chunk's own parameters, or a tied module on one rank; of
    either those that train or those that are frozen."""

    parameters: int
    """Elements its parameters take in its storage, as ``storage.aligned`` rounds them up."""
    trainable: int
    """Of those the optimizer owns."""
    chunks: tuple[int, ...]
    """The chunks of the rank that use it; one unless the module is tied."""
    tied: bool = False
    copies: int = 1
    """Pipeline ranks that hold the tied module and sum their gradients."""
    frozen: bool = False
    """Whether none of its parameters has a gradient."""

    def parts(self, zero_stage: int, data_ranks: int) -> int:
        """Into how many equal parts the unit is cut."""
        return data_ranks if zero_stage > 0 else 1

    def part(self, zero_stage: int, data_ranks: int) -> int:
        """Elements of a part, padding included."""
        return part_size(self.parameters, data_ranks) * (data_ranks // self.parts(zero_stage, data_ranks))


@dataclass(frozen=True)
class ElementBytes:
    """Bytes per element."""

    weights: int = 4
    gradients: int = 4
    """In which gradients accumulate."""
    optimizer: int | None = 0
    """Optimizer state per element, without master weights; None if unknown."""
    update: int | None = 0
    """What the optimizer takes for the moment per element it updates at once; None if unknown."""
    updates_together: bool = False
    """Whether it updates all elements at once (torch's ``foreach``) or those of one unit after another."""
    communication: int | None = None
    """Of the copy in which gradients travel, if that is a type of their own; None if they travel as they are."""

    @property
    def master(self) -> int:
        """Of what the optimizer updates: half-precision weights have a copy in fp32."""
        return max(self.weights, _MASTER_BYTES)

    @property
    def travelling(self) -> int:
        """Of a gradient that is reduced."""
        return self.gradients if self.communication is None else self.communication


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
    update: int | None
    """What the optimizer takes for the moment; None if unknown."""
    peak: int
    """The most of all kinds together at any moment; without what is unknown."""
    stored_activations: int
    """Forwards whose backward is still to come, each of one chunk and micro-batch: with full recomputation, as many
    chunk inputs are stored, those of a last chunk that turns at once aside. A number, not bytes."""
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
    """What a pipeline rank holds while it runs ``actions``, a training step's program.

    Args:
        units: those of the rank.
        all_to_all: whether that stands for the reduce-scatter, as on gloo.
        activation_bytes: None if shapes are unknown; the peak is without activations then.
        in_rank_order: whether gradients add up in rank order at stage 0 too; then ``all_to_all`` is true.
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
    """Takes and frees on paper what ``ZeroPartition`` takes and frees."""

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
        # With one data-parallel rank nothing travels.
        self.size = size if data_ranks > 1 else replace(size, communication=None)
        self.zero_stage, self.all_to_all, self.ledger = zero_stage, all_to_all, ledger
        self.reducing: dict[int, list[_Unit]] = {}
        """By the chunk whose REDUCE launched their reductions."""
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
            # The program waits for chunks; a tied unit may still be under way from another chunk's REDUCE.
            self.finish_reduction(unit)
        for unit in beginning:
            self.ledger.take("buffers", self.size.gradients * unit.full)
            unit.accumulating = True

    def reduce(self, units: Sequence["_Unit"]) -> list["_Unit"]:
        """The units whose reductions begin: those with no user left."""
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
        """Bytes a reduction receives."""
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
            # A later group's gradient is added to this one.
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
    """A unit and where it stands in the program."""

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
