"""Backwards in two parts (zero bubble, arXiv 2401.10241): when the second part of each one runs.

The first part computes the gradient of a chunk's input, which other ranks wait for. The second part computes gradients
of weights. Nobody waits for it, so it fills the time in which a rank would wait for a message: where the turn begins,
between visits if a group has fewer micro-batches than there are pipeline ranks, and where the pipeline drains.

Every schedule keeps its order of forwards and backwards. All ranks are run on one clock, on which a forward, a
recomputation and each part of a backward take the same time. A rank whose next input is not there runs the second part
of its oldest backward that waits for one. Second parts also run

- once more of them wait than ``ProgramSpec.split_backward`` allows;
- before a backward of another chunk while ``resident_chunks`` chunks have some, because each of these chunks holds a
  full gradient (stages 1 to 3);
- before the next micro-batch group, where each group is reduced by itself (stages 2 and 3).

Those of a chunk run in ascending micro-batches, so that its gradient is summed in the order of a whole backward.
"""

from collections import deque
from functools import lru_cache
from heapq import heapify, heappop, heappush

from ds_lgamp.schedule.actions import SENDS, Action, Kind, Segments, computes_of
from ds_lgamp.schedule.spec import ProgramSpec

Compute = tuple[Kind, int, int]
"""Kind, chunk and micro-batch."""


def add_second_parts(spec: ProgramSpec, rank: int, segments: Segments) -> Segments:
    """Adds the second parts of backwards, each after another compute and the SEND of that."""
    if not spec.split_chunks:
        return segments
    *calls, actions = segments
    parts = iter(_second_parts(spec)[rank])
    lowered: list[Action] = []
    due: list[Action] = []
    for action in actions:
        if action.kind not in SENDS:
            lowered.extend(due)
            due = []
        lowered.append(action)
        if action.kind in (Kind.FORWARD, Kind.BACKWARD):
            due = next(parts)
    return [*calls, [*lowered, *due]]


@lru_cache(maxsize=1)
def _second_parts(spec: ProgramSpec) -> list[list[list[Action]]]:
    """Returns, for each rank and each compute of its last segment, the second parts that follow. The programs of all
    ranks share the result."""
    ranks = [_Rank(spec, computes_of(spec.segments(rank)[-1])) for rank in range(spec.pipeline_ranks)]
    arrivals = _known_from_the_start(spec, ranks)
    waiting: dict[Compute, tuple[float, int]] = {}
    """Ranks that wait for the input of a compute, and since when."""
    coming = [(0.0, rank) for rank in range(spec.pipeline_ranks)]
    heapify(coming)
    while coming:
        now, number = heappop(coming)
        rank = ranks[number]
        if rank.is_over:
            rank.run_all()
            continue
        now = rank.make_room(now)
        compute = rank.next[:3]
        arrival = arrivals.get(compute)
        if rank.waiting and (arrival is None or arrival > now):
            heappush(coming, (rank.run_oldest(now), number))
        elif arrival is None:
            waiting[compute] = now, number
        else:
            now = rank.run_next(max(now, arrival))
            heappush(coming, (now, number))
            following = _consumer(spec, compute)
            if following is not None:
                arrivals[following] = now if spec.placement[following[1]] == number else rank.sent
                if following in waiting:
                    heappush(coming, waiting.pop(following))
    return [rank.parts for rank in ranks]


def _known_from_the_start(spec: ProgramSpec, ranks: list["_Rank"]) -> dict[Compute, float]:
    """Returns the computes that need nothing of this segment: forwards of the first chunk, and what follows forwards of
    earlier segments."""
    own = {action[:3] for rank in ranks for action in rank.computes}
    made = {_consumer(spec, compute) for compute in own}
    return dict.fromkeys(own - made, 0.0)


def _consumer(spec: ProgramSpec, compute: Compute) -> Compute | None:
    """Returns the compute that takes the result of ``compute``."""
    kind, chunk, micro_batch = compute
    if kind is Kind.FORWARD:
        return (kind, chunk + 1, micro_batch) if chunk + 1 < spec.chunks else (Kind.BACKWARD, chunk, micro_batch)
    return (kind, chunk - 1, micro_batch) if chunk > spec.first_trained else None


class _Rank:
    """Runs the computes of a rank, one by one. Methods that run something take its start and return its end."""

    def __init__(self, spec: ProgramSpec, computes: list[Action]) -> None:
        self.spec, self.computes = spec, computes
        self.parts: list[list[Action]] = []
        """The second parts that follow each compute that has run."""
        self.waiting: deque[Action] = deque()
        """Second parts, the oldest first."""
        self.sent = 0.0
        """The end of the last compute, without second parts that follow it."""
        self.by_group = spec.zero_stage >= 2 and spec.micro_batch_group < spec.micro_batches

    @property
    def is_over(self) -> bool:
        return len(self.parts) == len(self.computes)

    @property
    def next(self) -> Action:
        return self.computes[len(self.parts)]

    def run_next(self, now: float) -> float:
        action = self.spec.marked(self.next)
        self.parts.append([])
        split = action.chunk in self.spec.split_chunks
        if action.kind is Kind.FORWARD:
            now += 1
        else:
            now += (1 if split else 2) + action.recomputed
        self.sent = now
        if action.kind is Kind.BACKWARD and split:
            self.waiting.append(action._replace(kind=Kind.WEIGHTS_BACKWARD))
            while len(self.waiting) > self.spec.split_backward:
                now = self.run_oldest(now)
        return now

    def run_oldest(self, now: float) -> float:
        self.parts[-1].append(self.waiting.popleft())
        return now + 1

    def run_all(self) -> None:
        while self.waiting:
            self.run_oldest(0.0)

    def make_room(self, now: float) -> float:
        """Runs what may not wait until after the next compute."""
        kind, chunk, micro_batch, *_ = self.next
        while self.waiting and (self._is_other_group(micro_batch) or (kind is Kind.BACKWARD and self._is_full(chunk))):
            now = self.run_oldest(now)
        return now

    def _is_other_group(self, micro_batch: int) -> bool:
        group = self.spec.micro_batch_group
        return self.by_group and micro_batch // group != self.waiting[0].micro_batch // group

    def _is_full(self, chunk: int) -> bool:
        chunks = {part.chunk for part in self.waiting}
        return self.spec.zero_stage >= 1 and chunk not in chunks and len(chunks) >= self.spec.resident_chunks
