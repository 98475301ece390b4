"""The project's only clock: runs a program on paper.

Forward, backward and hop take time; posts and sends are free. A hop delays the receiver only. What a rank sends follows
one after another where :class:`Durations` says how long one keeps the link busy. Gathers and reductions take time where
it says so: those of a rank run one after another, as in one communicator, beside its compute. The program says where
they begin and where they are awaited. A step is one of many: the gathers that its program launches behind STEP are
those of the step before, and run from the beginning. Data-parallel ranks are alike. Tied modules, which travel beside
chunks, take no time.
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
    awaited_by,
    receive_matching,
)
from ds_lgamp.schedule.program import Program
from ds_lgamp.schedule.spec import ProgramSpec


class Durations(NamedTuple):
    """Time of one chunk's forward and backward for one micro-batch, of a tensor's way to the next rank, of one chunk's
    gather and reduction, for which a tensor on its way keeps the sender's link busy, and by which a backward takes
    longer if its chunk is recomputed; a last chunk that turns at once is not."""

    forward: float = 1.0
    backward: float = 2.0
    hop: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    message: float = 0.0
    recompute: float = 0.0


UNIT_DURATIONS = Durations()


class Span(NamedTuple):
    """An action that takes time and when it ran."""

    start: float
    end: float
    action: Action


class Wait(NamedTuple):
    """A WAIT_GATHER or WAIT_REDUCE and when it ran; it takes no time if the collective was over."""

    start: float
    end: float
    action: Action


@dataclass
class Timeline:
    """When everything ran and what waited, per pipeline rank."""

    spans: list[list[Span]]
    """Compute actions."""
    collectives: list[list[Span]]
    """Gathers and reductions."""
    waits: list[list[Wait]]
    """In order."""
    ideal: float
    """Compute time of a rank if work were spread evenly and nobody waited."""
    step_time: float = field(init=False)
    bubble: float = field(init=False)
    """(step_time - ideal) / ideal."""

    def __post_init__(self) -> None:
        ends = [spans[-1].end for spans in self.spans if spans] + [waits[-1].end for waits in self.waits if waits]
        self.step_time = max(ends, default=0.0)
        self.bubble = (self.step_time - self.ideal) / self.ideal if self.ideal else 0.0

    def exposed(self, kind: Kind) -> list[float]:
        """How long each rank stood still for its collectives of a ``kind``, GATHER or REDUCE."""
        return [
            sum(wait.end - wait.start for wait in waits if awaited_by(wait.action).kind is kind) for waits in self.waits
        ]


class DeadlockError(RuntimeError):
    """No rank can go on. ``positions`` holds the row each rank stands at."""

    def __init__(self, positions: Sequence[int]) -> None:
        super().__init__("deadlock: every pipeline rank waits for another")
        self.positions = list(positions)


def simulate(
    spec: ProgramSpec, program: Program, durations: Durations = UNIT_DURATIONS, blocking_sends: bool = False
) -> Timeline:
    """Runs ``program``; raises DeadlockError if it gets stuck.

    ``blocking_sends``: a SEND waits until the matching RECV is posted, as the validator assumes. The engine's sends
    wait only when several of a link are under way.
    """
    run = _Run(spec, program, durations, blocking_sends)
    run.to_the_end()
    lanes = run.lanes
    return Timeline(run.spans, [lane.spans for lane in lanes], [lane.waits for lane in lanes], _ideal(spec, durations))


def _ideal(spec: ProgramSpec, durations: Durations) -> float:
    """Compute time of a rank if work were spread evenly and nobody waited."""
    cost = spec.chunks * durations.forward
    if not spec.forward_only:
        recomputed = spec.chunks - spec.turns_at_once
        cost += spec.chunks * durations.backward + recomputed * durations.recompute
    return cost * spec.micro_batches / spec.pipeline_ranks


def peak_live_activations(actions: Sequence[Action]) -> int:
    """The most (chunk, micro-batch) inputs a rank stores at once: forward done, backward not."""
    live = peak = 0
    for action in actions:
        if action.kind is Kind.FORWARD:
            live += 1
            peak = max(peak, live)
        elif action.kind is Kind.BACKWARD:
            live -= 1
    return peak


class _Lane:
    """The collectives of one rank, one after another, and the waits for them."""

    def __init__(self, durations: Durations) -> None:
        self.cost = {Kind.GATHER: durations.gather, Kind.REDUCE: durations.reduce}
        self.spans: list[Span] = []
        self.waits: list[Wait] = []
        self.free = 0.0
        """When the last one launched is over."""
        self.under_way: dict[Action, Span] = {}

    def launch(self, action: Action, now: float) -> None:
        start = max(now, self.free)
        self.free = start + self.cost[action.kind]
        self.under_way[action] = span = Span(start, self.free, action)
        self.spans.append(span)

    def wait(self, action: Action, now: float) -> float:
        """When ``action``, which begins ``now``, is over. An evaluation finds its gathers done."""
        span = self.under_way.pop(awaited_by(action), None)
        if span is None:
            return now
        end = max(now, span.end)
        self.waits.append(Wait(now, end, action))
        return end


class _Run:
    """Advances each rank until it waits for another one, which wakes it again."""

    def __init__(self, spec: ProgramSpec, program: Program, durations: Durations, blocking_sends: bool) -> None:
        self.spec = spec
        self.program = program
        self.hop, self.message = durations.hop, durations.message
        self.durations = durations
        self.last_chunk = spec.chunks - 1
        self.lanes = [_Lane(durations) for _ in program]
        self.ends = [_end_of_step(actions) for actions in program]
        """Behind each rank's STEP: what stands there runs when the next step begins."""
        for lane, actions, end in zip(self.lanes, program, self.ends):
            for action in actions[end:]:
                if action.kind in COLLECTIVES:
                    lane.launch(action, 0.0)
        self.blocking_sends = blocking_sends
        self.position = [0] * len(program)
        self.now = [0.0] * len(program)
        self.link_free = [0.0] * len(program)
        """When the next tensor of a rank can start on its way."""
        self.spans: list[list[Span]] = [[] for _ in program]
        self.finished: dict[Action, float] = {}
        """End of every compute action whose result its consumer can use."""
        self.stored: set[tuple[int, int]] = set()
        """(chunk, micro-batch) of the forwards that ran: a backward needs its own rank's."""
        self.posted: set[Action] = set()
        self.waiting: dict[Action, list[int]] = defaultdict(list)

    def to_the_end(self) -> None:
        runnable = list(range(len(self.program)))
        while runnable:
            runnable.extend(self.advance(runnable.pop()))
        if any(position < len(actions) for position, actions in zip(self.position, self.program)):
            raise DeadlockError(self.position)

    def advance(self, rank: int) -> list[int]:
        """Runs ``rank`` as far as it gets; returns the ranks that can go on because of it."""
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
    """The row behind STEP; behind the last one, where there is none."""
    steps = (row for row, action in enumerate(actions) if action.kind is Kind.STEP)
    return next(steps, len(actions) - 1) + 1
