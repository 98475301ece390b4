"""The project's only clock: runs a program on paper.

Forward, backward and hop take time; posts, sends, gathers and reductions are free. A hop delays the receiver only.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ds_lgamp.schedule.actions import COMPUTE, RECEIVES, SENDS, Action, Kind
from ds_lgamp.schedule.program import Program, ProgramSpec, receive_matching


class Durations(NamedTuple):
    """Time of one chunk's forward and backward for one micro-batch, and of a tensor's way to the next rank."""

    forward: float = 1.0
    backward: float = 2.0
    hop: float = 0.0


UNIT_DURATIONS = Durations()


class Span(NamedTuple):
    """A compute action and when it ran."""

    start: float
    end: float
    action: Action


@dataclass
class Timeline:
    """When every compute action ran, per pipeline rank."""

    spans: list[list[Span]]
    ideal: float
    """Compute time of a rank if work were spread evenly and nobody waited."""
    step_time: float = field(init=False)
    bubble: float = field(init=False)
    """(step_time - ideal) / ideal."""

    def __post_init__(self) -> None:
        self.step_time = max((spans[-1].end for spans in self.spans if spans), default=0.0)
        self.bubble = (self.step_time - self.ideal) / self.ideal if self.ideal else 0.0


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
    forwards = spec.chunks * spec.micro_batches / spec.pipeline_ranks
    cost = durations.forward if spec.forward_only else durations.forward + durations.backward
    return Timeline(run.spans, forwards * cost)


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


class _Run:
    """Advances each rank until it waits for another one, which wakes it again."""

    def __init__(self, spec: ProgramSpec, program: Program, durations: Durations, blocking_sends: bool) -> None:
        self.spec = spec
        self.program = program
        self.hop = durations.hop
        self.cost = {Kind.FORWARD: durations.forward, Kind.BACKWARD: durations.backward}
        self.blocking_sends = blocking_sends
        self.position = [0] * len(program)
        self.now = [0.0] * len(program)
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
                self.finish(self.sent_compute(action), self.now[rank] + self.hop, woken)
            elif kind in RECEIVES:
                self.posted.add(action)
                woken.extend(self.waiting.pop(action, ()))
            self.position[rank] += 1
        return woken

    def compute(self, rank: int, action: Action, woken: list[int]) -> bool:
        start = self.now[rank]
        if action.kind is Kind.BACKWARD and (action.chunk, action.micro_batch) not in self.stored:
            return False
        source = self.spec.source_chunk(action)
        if source is not None:
            needed = Action(action.kind, source, action.micro_batch)
            available = self.finished.get(needed)
            if available is None:
                self.waiting[needed].append(rank)
                return False
            start = max(start, available)
        end = self.now[rank] = start + self.cost[action.kind]
        self.spans[rank].append(Span(start, end, action))
        if action.kind is Kind.FORWARD:
            self.stored.add((action.chunk, action.micro_batch))
        if not self.spec.sends_output(action):
            self.finish(action, end, woken)
        return True

    def finish(self, compute: Action, end: float, woken: list[int]) -> None:
        self.finished[compute] = end
        woken.extend(self.waiting.pop(compute, ()))

    @staticmethod
    def sent_compute(send: Action) -> Action:
        kind = Kind.FORWARD if send.kind is Kind.SEND_FORWARD else Kind.BACKWARD
        return Action(kind, send.chunk, send.micro_batch)
