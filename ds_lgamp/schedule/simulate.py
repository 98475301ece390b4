"""The project's only clock: runs a program on paper.

- Forwards, backwards and hops take time. Posts and sends are free.
- A hop delays only the receiver. A rank's messages leave one after another; each keeps the link busy for
  :attr:`Durations.message`.
- The gathers and reductions of a rank run one after another, as on one communicator, beside its compute. The program
  says when they are launched and awaited.
- The simulated step is one of many. The gathers behind STEP count as those of the previous step and start at time 0.
- All data-parallel ranks behave alike.
- Tied modules travel beside chunks and take no time.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ds_lgamp.schedule.actions import (
    COLLECTIVES,
    COMPUTE,
    RECEIVES,
    SENDS,
    WAITS,
    Action,
    Kind,
    Program,
    awaited_by,
    receive_matching,
)
from ds_lgamp.schedule.spec import ProgramSpec


class Durations(NamedTuple):
    """How long each thing takes, in one unit of time."""

    forward: float = 1.0
    """One chunk's forward for one micro-batch."""
    backward: float = 2.0
    """One chunk's backward for one micro-batch, without recomputation."""
    hop: float = 0.0
    """The way of a message to the next rank."""
    gather: float = 0.0
    """The gather of one chunk."""
    reduce: float = 0.0
    """The reduction of one chunk."""
    message: float = 0.0
    """How long one message keeps the sender's link busy."""
    recompute: float = 0.0
    """Added to the backward of a recomputed chunk. A last chunk that turns at once is not recomputed."""


UNIT_DURATIONS = Durations()


class Span(NamedTuple):
    """An action that takes time, and when it ran."""

    start: float
    end: float
    action: Action


class Wait(NamedTuple):
    """A WAIT_GATHER or WAIT_REDUCE, and when it ran. It takes no time if the collective was done."""

    start: float
    end: float
    action: Action


@dataclass
class Timeline:
    """When everything ran, and what waited, for each pipeline rank."""

    spans: list[list[Span]]
    """Compute actions."""
    collectives: list[list[Span]]
    """Gathers and reductions."""
    waits: list[list[Wait]]
    """In the order they ran."""
    ideal: float
    """Compute time of a rank if work were spread evenly and no rank waited."""
    step_time: float = field(init=False)
    """When the last compute or wait ends."""
    bubble: float = field(init=False)
    """(step_time - ideal) / ideal."""

    def __post_init__(self) -> None:
        ends = [spans[-1].end for spans in self.spans if spans] + [waits[-1].end for waits in self.waits if waits]
        self.step_time = max(ends, default=0.0)
        self.bubble = (self.step_time - self.ideal) / self.ideal if self.ideal else 0.0

    def exposed(self, kind: Kind) -> list[float]:
        """Returns how long each rank stood still for its collectives of one ``kind``, GATHER or REDUCE."""
        return [
            sum(wait.end - wait.start for wait in waits if awaited_by(wait.action).kind is kind) for waits in self.waits
        ]


class DeadlockError(RuntimeError):
    """No rank can advance. ``positions`` holds the row where each rank stands."""

    def __init__(self, positions: Sequence[int]) -> None:
        super().__init__("deadlock: every pipeline rank waits for another")
        self.positions = list(positions)


def simulate(
    spec: ProgramSpec, program: Program, durations: Durations = UNIT_DURATIONS, blocking_sends: bool = False
) -> Timeline:
    """Runs ``program`` and returns its timeline.

    Args:
        blocking_sends: whether each SEND waits until its RECV is posted, as the validator assumes. The engine's sends
            wait only if several of a link are under way.

    Raises DeadlockError if no rank can advance.
    """
    run = _Run(spec, program, durations, blocking_sends)
    run.to_the_end()
    lanes = run.lanes
    return Timeline(run.spans, [lane.spans for lane in lanes], [lane.waits for lane in lanes], _ideal(spec, durations))


def _ideal(spec: ProgramSpec, durations: Durations) -> float:
    """Returns the compute time of a rank if work were spread evenly and no rank waited."""
    cost = spec.chunks * durations.forward
    if not spec.forward_only:
        recomputed = spec.chunks - spec.turns_at_once
        cost += spec.chunks * durations.backward + recomputed * durations.recompute
    return cost * spec.micro_batches / spec.pipeline_ranks


def peak_live_activations(actions: Sequence[Action]) -> int:
    """Returns the most inputs a rank stores at once, one per chunk and micro-batch between forward and backward."""
    live = peak = 0
    for action in actions:
        if action.kind is Kind.FORWARD:
            live += 1
            peak = max(peak, live)
        elif action.kind is Kind.BACKWARD:
            live -= 1
    return peak


class _Lane:
    """The collectives of one rank, which run one after another, and the waits for them."""

    def __init__(self, durations: Durations) -> None:
        self.cost = {Kind.GATHER: durations.gather, Kind.REDUCE: durations.reduce}
        self.spans: list[Span] = []
        self.waits: list[Wait] = []
        self.free = 0.0
        """When the last launched collective ends."""
        self.under_way: dict[Action, Span] = {}

    def launch(self, action: Action, now: float) -> None:
        start = max(now, self.free)
        self.free = start + self.cost[action.kind]
        self.under_way[action] = span = Span(start, self.free, action)
        self.spans.append(span)

    def wait(self, action: Action, now: float) -> float:
        """Returns when ``action`` ends if it begins at ``now``. An evaluation finds its gathers done."""
        span = self.under_way.pop(awaited_by(action), None)
        if span is None:
            return now
        end = max(now, span.end)
        self.waits.append(Wait(now, end, action))
        return end


class _Run:
    """Advances each rank until it waits for another rank, which later wakes it."""

    def __init__(self, spec: ProgramSpec, program: Program, durations: Durations, blocking_sends: bool) -> None:
        self.spec = spec
        self.program = program
        self.hop, self.message = durations.hop, durations.message
        self.durations = durations
        self.last_chunk = spec.chunks - 1
        self.lanes = [_Lane(durations) for _ in program]
        self.ends = [_end_of_step(actions) for actions in program]
        """The row behind each rank's STEP. Collectives from there on run when the next step begins."""
        for lane, actions, end in zip(self.lanes, program, self.ends):
            for action in actions[end:]:
                if action.kind in COLLECTIVES:
                    lane.launch(action, 0.0)
        self.blocking_sends = blocking_sends
        self.position = [0] * len(program)
        self.now = [0.0] * len(program)
        self.link_free = [0.0] * len(program)
        """When each rank's link is free for the next message."""
        self.spans: list[list[Span]] = [[] for _ in program]
        self.finished: dict[Action, float] = {}
        """When the consumer can use the result of each compute."""
        self.stored: set[tuple[int, int]] = set()
        """(chunk, micro-batch) of the forwards that ran. A backward needs the forward of its own rank."""
        self.posted: set[Action] = set()
        self.waiting: dict[Action, list[int]] = defaultdict(list)

    def to_the_end(self) -> None:
        runnable = list(range(len(self.program)))
        while runnable:
            runnable.extend(self.advance(runnable.pop()))
        if any(position < len(actions) for position, actions in zip(self.position, self.program)):
            raise DeadlockError(self.position)

    def advance(self, rank: int) -> list[int]:
        """Runs ``rank`` as far as it gets. Returns the ranks that this wakes."""
        woken: list[int] = []
        actions = self.program[rank]
        while self.position[rank] < len(actions):
            action = actions[self.position[rank]]
            kind = action.kind
            if kind in COMPUTE:
                if not self.compute(rank, action, woken):
                    break
            elif kind in SENDS:
                receive = receive_matching(action)
                if self.blocking_sends and receive not in self.posted:
                    self.waiting[receive].append(rank)
                    break
                start = max(self.now[rank], self.link_free[rank])
                self.link_free[rank] = start + self.message
                self.finish(self.sent_compute(action), start + self.hop, woken)
            elif kind in RECEIVES:
                self.posted.add(action)
                woken.extend(self.waiting.pop(action, ()))
            elif kind in COLLECTIVES and self.position[rank] < self.ends[rank]:
                self.lanes[rank].launch(action, self.now[rank])
            elif kind in WAITS:
                self.now[rank] = self.lanes[rank].wait(action, self.now[rank])
            self.position[rank] += 1
        return woken

    def compute(self, rank: int, action: Action, woken: list[int]) -> bool:
        if action.kind is Kind.BACKWARD and (action.chunk, action.micro_batch) not in self.stored:
            return False
        available = 0.0
        source = self.spec.source_chunk(action)
        if source is not None:
            needed = Action(action.kind, source, action.micro_batch)
            if needed not in self.finished:
                self.waiting[needed].append(rank)
                return False
            available = self.finished[needed]
        start = max(self.now[rank], available)
        end = self.now[rank] = start + self.cost(action)
        self.spans[rank].append(Span(start, end, action))
        if action.kind is Kind.FORWARD:
            self.stored.add((action.chunk, action.micro_batch))
        if not self.spec.sends_output(action):
            self.finish(action, end, woken)
        return True

    def cost(self, compute: Action) -> float:
        if compute.kind is Kind.FORWARD:
            return self.durations.forward
        kept = compute.chunk == self.last_chunk and self.spec.turns_at_once
        return self.durations.backward + (0.0 if kept else self.durations.recompute)

    def finish(self, compute: Action, end: float, woken: list[int]) -> None:
        self.finished[compute] = end
        woken.extend(self.waiting.pop(compute, ()))

    @staticmethod
    def sent_compute(send: Action) -> Action:
        kind = Kind.FORWARD if send.kind is Kind.SEND_FORWARD else Kind.BACKWARD
        return Action(kind, send.chunk, send.micro_batch)


def _end_of_step(actions: Sequence[Action]) -> int:
    """Returns the row behind STEP, or behind the last action if there is no STEP."""
    steps = (row for row, action in enumerate(actions) if action.kind is Kind.STEP)
    return next(steps, len(actions) - 1) + 1
