"""What each interval of a recorded step waited for, and the chain of such causes that took the whole step.

A compute follows the compute before it on its rank, unless it waited for something that ended later: a message of
another rank, a collective, or a transfer. These follow the compute that launched them, or what preceded them in
their lane. A collective follows the rank that launched it last.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from ds_lgamp.schedule.actions import (
    BETWEEN_NODES,
    COLLECTIVES,
    SENDS,
    WAITS,
    Action,
    Kind,
    awaited_by,
    receive_matching,
    send_of,
)
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.view.recording import Interval, RankRecording, Step


class Peers:
    """Finds the ranks that exchange messages or run collectives together, by their place in ``ranks``. Tensor-parallel
    ranks share their pipeline rank and their data-parallel rank; their order tells them apart."""

    def __init__(self, spec: ProgramSpec, ranks: Sequence[RankRecording]) -> None:
        self._hierarchy = spec.hierarchy
        self._ranks = ranks
        self._alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.tensor_ranks: list[int] = []
        """The tensor-parallel rank of every rank."""
        for number, rank in enumerate(ranks):
            alike = self._alike[rank.pipeline_rank, rank.data_rank]
            self.tensor_ranks.append(len(alike))
            alike.append(number)

    def at(self, pipeline_rank: int, rank: int) -> int | None:
        """Returns the rank of another pipeline rank with which ``rank`` exchanges messages; None if it is missing."""
        alike, place = self._alike.get((pipeline_rank, self._ranks[rank].data_rank), ()), self.tensor_ranks[rank]
        return alike[place] if place < len(alike) else None

    def group(self, rank: int, kind: Kind) -> tuple[int, int, int]:
        """Returns a key that ``rank`` shares with the ranks that run a collective of this kind with it, and with no
        other rank."""
        data_rank, part = self._ranks[rank].data_rank, 0
        if self._hierarchy is not None:
            node, place = divmod(data_rank, self._hierarchy.node_ranks)
            part = place if kind in BETWEEN_NODES else node
        return self._ranks[rank].pipeline_rank, self.tensor_ranks[rank], part


NEGLIGIBLE = 0.01
"""A wait below this share of the compute after it delayed nothing: what has long arrived takes a moment to receive,
too."""
_MESSAGES = ("activation", "gradient")
_EARLIER = {Kind.LOAD: Kind.UPDATE, Kind.UPDATE: Kind.STORE}
"""What a transfer or update on the host follows for the same chunk."""


class Place(NamedTuple):
    """The place of an interval."""

    rank: int
    """In the list of ranks."""
    interval: int
    """In the intervals of the rank's step."""


Causes = list[dict[int, Place]]
"""For every rank, the cause of each interval that has one."""


def causes(spec: ProgramSpec, ranks: Sequence[RankRecording], steps: Sequence[Step]) -> Causes:
    """Returns what each compute, and each interval beside the computes, followed in the same step of all ``ranks``."""
    lanes = [_Lanes(step) for step in steps]
    search = _Search(spec, ranks, lanes)
    return [dict(search.of_rank(rank)) for rank in range(len(ranks))]


def critical_path(steps: Sequence[Step], found: Causes) -> list[Place]:
    """Returns the chain of causes that leads to the end of the step, in the order of time."""
    over = max(step.end for step in steps)
    # What goes on beside the computes may outlast the step: the next one waits for it.
    ends = [
        (each.end, Place(rank, index))
        for rank, step in enumerate(steps)
        for index, each in enumerate(step.intervals)
        if each.lane == "compute" or (each.lane == "host update" and each.end <= over)
    ]
    place = max(ends)[1] if ends else None
    path: list[Place] = []
    seen = set()
    # Clocks of several ranks agree to some microseconds only, so causes may form a circle.
    while place is not None and place not in seen:
        seen.add(place)
        path.append(place)
        place = found[place.rank].get(place.interval)
    return path[::-1]


class _Lanes:
    """The intervals of one rank's step, by lane and by name."""

    def __init__(self, step: Step) -> None:
        self.all = step.intervals
        self.by_lane: dict[str, list[int]] = defaultdict(list)
        self.by_name: dict[str, list[int]] = defaultdict(list)
        self.numbers: dict[int, int] = {}
        """Of every interval that is no wait, how many of its name precede it."""
        for index, each in sorted(enumerate(step.intervals), key=lambda pair: (pair[1].start, pair[1].end)):
            self.by_lane[each.lane].append(index)
            if each.lane != "wait":
                self.numbers[index] = len(self.by_name[each.name])
                self.by_name[each.name].append(index)

    def before(self, time: float) -> int | None:
        """Returns the last compute that has ended at ``time``."""
        computes = self.by_lane["compute"]
        count = bisect_right(computes, time, key=lambda index: self.all[index].end)
        return computes[count - 1] if count else None

    def waits_between(self, start: float, end: float) -> Iterator[Interval]:
        """Yields the waits that begin from ``start`` on and end by ``end``."""
        waits = self.by_lane["wait"]
        first, last = (bisect_left(waits, time, key=lambda index: self.all[index].start) for time in (start, end))
        yield from (self.all[index] for index in waits[first:last] if self.all[index].end <= end)

    def latest(self, name: str, before: float) -> int | None:
        """Returns the last interval of this name that has begun before a time."""
        begun = (index for index in reversed(self.by_name.get(name, ())) if self.all[index].start < before)
        return next(begun, None)


class _Search:
    def __init__(self, spec: ProgramSpec, ranks: Sequence[RankRecording], lanes: Sequence[_Lanes]) -> None:
        self.spec, self.lanes = spec, lanes
        self.peers = Peers(spec, ranks)

    def of_rank(self, rank: int) -> Iterator[tuple[int, Place]]:
        for lane, indices in list(self.lanes[rank].by_lane.items()):
            if lane == "wait":
                continue
            previous = None
            for index in indices:
                cause = self.of_compute(rank, index, previous) if lane == "compute" else self.beside(rank, index)
                if cause is not None:
                    yield index, cause
                previous = index

    def of_compute(self, rank: int, index: int, previous: int | None) -> Place | None:
        lanes = self.lanes[rank]
        compute = lanes.all[index]
        cause = None if previous is None else Place(rank, previous)
        ready = -float("inf") if previous is None else lanes.all[previous].end
        for wait in lanes.waits_between(ready, compute.start):
            if wait.end - wait.start <= NEGLIGIBLE * (compute.end - compute.start):
                continue
            awaited = self.awaited(rank, wait, compute)
            if awaited is not None and wait.end > ready:
                cause, ready = awaited, wait.end
        return cause

    def awaited(self, rank: int, wait: Interval, compute: Interval) -> Place | None:
        """Returns what ended the wait: a message or the compute that sent it, a collective or a transfer."""
        action = action_of(wait.name)
        if wait.kind in _MESSAGES:
            return self.sender(rank, action_of(compute.name), wait.end)
        if action is not None and action.kind is Kind.STEP:
            return self.last_to_come(wait.end)
        if action is None or action.kind not in WAITS:
            return None
        index = self.lanes[rank].latest(str(awaited_by(action)), wait.end)
        return None if index is None else Place(rank, index)

    def sender(self, rank: int, compute: Action | None, before: float) -> Place | None:
        """Returns the message that brought the input of a compute; the compute that made it if none is recorded."""
        if compute is None or compute.kind not in (Kind.FORWARD, Kind.BACKWARD):
            return None
        chunk = self.spec.source_chunk(compute)
        if chunk is None:
            return None
        source = self.peers.at(self.spec.placement[chunk], rank)
        if source is None:
            return None
        made = Action(compute.kind, chunk, compute.micro_batch)
        names = (str(send_of(made)), str(made))
        found = (self.lanes[source].latest(name, before) for name in names)
        return next((Place(source, index) for index in found if index is not None), None)

    def last_to_come(self, time: float) -> Place | None:
        """Returns the compute of any rank that ended last by ``time``. Ranks that share modules begin STEP together."""
        ended = [(rank, lanes.before(time)) for rank, lanes in enumerate(self.lanes)]
        places = [Place(rank, index) for rank, index in ended if index is not None]
        return max(places, key=lambda place: self.lanes[place.rank].all[place.interval].end, default=None)

    def beside(self, rank: int, index: int) -> Place | None:
        """Returns what an interval beside the computes followed."""
        each = self.lanes[rank].all[index]
        action = action_of(each.name)
        if action is not None and action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            kind = Kind.FORWARD if action.kind is Kind.SEND_FORWARD else Kind.BACKWARD
            made = self.lanes[rank].latest(str(action._replace(kind=kind)), each.end)
            return None if made is None else Place(rank, made)
        if action is not None and action.kind in COLLECTIVES:
            last = self.last_launches[self.launch_of(rank, index, action)]
            # A rank that launched at the same time as the last one waited for nobody.
            if self.lanes[last.rank].all[last.interval].start > each.start:
                rank, index = last
        return self.latest_before(rank, index)

    def launch_of(self, rank: int, index: int, action: Action) -> tuple[Any, ...]:
        """Returns what is the same for a collective on all ranks that take part in it."""
        return *self.peers.group(rank, action.kind), action, self.lanes[rank].numbers[index]

    @cached_property
    def last_launches(self) -> dict[tuple[Any, ...], Place]:
        """Where each collective was launched last."""
        launches: dict[tuple[Any, ...], tuple[float, Place]] = {}
        for rank, lanes in enumerate(self.lanes):
            for index, each in enumerate(lanes.all):
                action = None if each.lane in ("compute", "wait") else action_of(each.name)
                if action is not None and action.kind in COLLECTIVES:
                    launch, here = self.launch_of(rank, index, action), (each.start, Place(rank, index))
                    launches[launch] = max(launches.get(launch, here), here)
        return {launch: place for launch, (_, place) in launches.items()}

    def latest_before(self, rank: int, index: int) -> Place | None:
        """Returns the last to end of: the compute before it, what precedes it in its lane, and in its chunk."""
        lanes = self.lanes[rank]
        each, action = lanes.all[index], action_of(lanes.all[index].name)
        in_lane = lanes.by_lane[each.lane]
        position = in_lane.index(index)
        candidates = [lanes.before(each.start), in_lane[position - 1] if position else None]
        if action is not None and action.kind in _EARLIER:
            candidates.append(lanes.latest(str(Action(_EARLIER[action.kind], action.chunk)), each.start))
        ended = [(lanes.all[one].end, one) for one in candidates if one is not None and lanes.all[one].end <= each.end]
        return Place(rank, max(ended)[1]) if ended else None


@lru_cache(maxsize=1 << 16)
def action_of(name: str) -> Action | None:
    """Returns the action that an interval's name is the text form of; None if it is plain words."""
    try:
        return Action.parse(name)
    except ValueError:
        return None


def use_of(send: Action) -> Action:
    """Returns the compute that uses the message of ``send`` on the other rank."""
    kind = Kind.FORWARD if send.kind is Kind.SEND_FORWARD else Kind.BACKWARD
    return receive_matching(send)._replace(kind=kind)


def with_arrivals(spec: ProgramSpec, ranks: Sequence[RankRecording], steps: Sequence[Step]) -> list[Step]:
    """Returns the steps with sends that end when the compute that uses their message begins, if that is earlier.

    A rank learns that a send is over when it looks, which may be much later.
    """
    peers = Peers(spec, ranks)
    begun: dict[tuple[int | None, str], float] = {}
    for rank, step in enumerate(steps):
        for each in step.intervals:
            if each.lane == "compute":
                # A backward that recomputes has two intervals. The second uses the gradient.
                begun[rank, each.name] = each.start

    def arrived(rank: int, each: Interval) -> Interval:
        send = action_of(each.name) if each.lane == "send" else None
        if send is None or send.kind not in SENDS:
            return each
        use = use_of(send)
        start = begun.get((peers.at(spec.placement[use.chunk], rank), str(use)), each.end)
        return each._replace(end=min(each.end, max(each.start, start)))

    return [
        step._replace(intervals=[arrived(rank, each) for each in step.intervals]) for rank, step in enumerate(steps)
    ]


def micro_batches_of(step: Step) -> int:
    """Returns how many micro-batches a step has. Data-parallel ranks of different speeds have different numbers."""
    computes = (action_of(each.name) for each in step.intervals if each.lane == "compute")
    return max((action.micro_batch + 1 for action in computes if action is not None), default=0)
