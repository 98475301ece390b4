"""When a pipeline rank has the weights of a chunk: loads, refreshes, gathers and releases. Which chunks are recomputed,
and when their inputs travel to the host and back."""

from collections import defaultdict, deque
from collections.abc import Sequence
from heapq import nsmallest
from itertools import pairwise, takewhile
from typing import NamedTuple

from ds_lgamp.schedule.actions import NEAREST, OF_INPUTS, OF_WEIGHTS, SENDS, Action, Kind
from ds_lgamp.schedule.rules.order import Fault, Stop, brought_by, pieces, texts
from ds_lgamp.schedule.spec import ProgramSpec

_OF_WEIGHTS = frozenset(
    {
        Kind.LOAD,
        Kind.WAIT_LOAD,
        Kind.REFRESH,
        Kind.WAIT_REFRESH,
        Kind.GATHER,
        Kind.WAIT_GATHER,
        Kind.RELEASE,
        Kind.UPDATE,
        *OF_WEIGHTS,
    }
)


def check_weights(spec: ProgramSpec, stops: Sequence[Stop]) -> None:
    """- At stage 3, those chunks are resident that are needed soonest, ``resident_chunks`` of them and no others; none
      in a script's turn and after the last compute.
    - What a step updated is gathered, or with shards of nodes refreshed, once: after STEP; or, if deferred, one visit
      before its compute or gather.
    - A compute follows the wait for its gather, and a gather the waits for its refresh and its load.
    - A load comes one visit before its gather: of each gather if the host holds the parameters, else of the first.
    - If gathered weights wait on the host, the first gather of a chunk is stored after the wait for it, until the
      chunk is released, and all others are loads. Nothing is stored that no such load, nor a later call, needs.
    - An update that the last step postponed comes directly before the first use of its chunk.
    """
    rule = _Weights(spec, stops)
    for stop in stops:
        # Most computes are on the way of a visit, where nothing changes.
        if stop.row in rule.visits or not stop.computes or not _OF_WEIGHTS.isdisjoint(kind for kind, *_ in stop.before):
            rule.follow(stop)


class _Visit(NamedTuple):
    """A run of computes on one chunk, without a script's turn in between."""

    chunk: int
    gathers: list[int]
    """The chunks that are gathered before it."""
    number: int
    first: bool
    """Whether it is the first one of its piece."""
    end: int
    """The number of the first visit after its piece."""


def _visits(stops: Sequence[Stop]) -> dict[int, _Visit]:
    """Returns the visits by the row of their first compute."""
    visits: dict[int, _Visit] = {}
    for piece in pieces(stops):
        begun: list[tuple[int, Stop]] = []
        for stop in piece:
            if stop.action is not None and stop.computes and (not begun or stop.action.chunk != begun[-1][0]):
                begun.append((stop.action.chunk, stop))
        begin = len(visits)
        for number, (chunk, stop) in enumerate(begun, begin):
            gathers = [action.chunk for action in stop.of(Kind.GATHER)]
            visits[stop.row] = _Visit(chunk, gathers, number, number == begin, begin + len(begun))
    return visits


class _Weights:
    """Follows a program stop by stop."""

    def __init__(self, spec: ProgramSpec, stops: Sequence[Stop]) -> None:
        self.spec, self.visits = spec, _visits(stops)
        self.uses: defaultdict[int, deque[int]] = defaultdict(deque)
        """The numbers of the coming visits of each chunk."""
        for visit in self.visits.values():
            self.uses[visit.chunk].append(visit.number)
        self.loads = self._loads()
        self.brought_by = brought_by(spec)
        brought = [] if self.brought_by is None or spec.defers_gathers else list(self.uses)
        self.brought = set(brought)
        """Chunks of which this rank has what the last step updated, or soon has it."""
        self.refreshing = set(brought if self.brought_by is Kind.REFRESH else [])
        self.gathering = set(brought if self.brought_by is Kind.GATHER else [])
        self.resident: set[int] = set()
        self.stores = spec.stores_weights and not spec.forward_only
        """Whether gathered weights wait on the host."""
        loaded = {action.chunk for stop in stops for action in stop.of(Kind.LOAD_WEIGHTS)}
        self.needed_again = (set(self.uses) if spec.returns_outputs else loaded) if self.stores else set()
        """Chunks whose gathered weights the host stores."""
        self.stored: set[int] = set()
        """The chunks that were gathered before, if gathered weights wait on the host."""
        self.leaving: set[int] = set()
        """Chunks whose weights are on their way to the host."""
        self.updates = spec.offload is None and spec.updates == "next_step"
        postponed = self.updates and not spec.forward_only
        self.postponed = {chunk for chunk in self.uses if postponed and chunk >= spec.first_trained}
        """Chunks that the last step left to update."""

    def _loads(self) -> list[list[int]]:
        """Returns the chunks that each visit's gathers need from the host."""
        offload = self.spec.offload
        on_host = set() if offload is None else self.uses.keys() - set(offload.on_device)
        loads = []
        for visit in self.visits.values():
            loads.append([chunk for chunk in visit.gathers if chunk in on_host])
            if offload is not None and not offload.parameters:
                on_host.difference_update(visit.gathers)
        return loads

    def follow(self, stop: Stop) -> None:
        visit = self.visits.get(stop.row)
        refreshes, gathers = self._updated(stop, visit)
        releases: list[int] = []
        if self.spec.zero_stage == 3 and (visit is not None or not stop.computes):
            needed = [] if visit is None else self._soonest(visit, self.spec.resident_chunks, visit.end)
            releases = sorted(self.resident.difference(needed))
            gathers = [chunk for chunk in needed if chunk not in self.resident]
            self.resident = set(needed)
        self._check_releases(stop, releases)
        stop.require([Action(Kind.REFRESH, chunk) for chunk in refreshes], "refreshes", Kind.REFRESH)
        self.refreshing.update(refreshes)
        loading = self._check_loads(stop, visit)
        launches = []
        for chunk in gathers:
            launches += [Action(Kind.WAIT_REFRESH, chunk)] if chunk in self.refreshing else []
            launches += [Action(Kind.WAIT_LOAD, chunk)] if chunk in loading else []
            launches.append(Action(Kind.LOAD_WEIGHTS if chunk in self.stored else Kind.GATHER, chunk))
        kinds = Kind.WAIT_REFRESH, Kind.WAIT_LOAD, Kind.GATHER, Kind.LOAD_WEIGHTS
        stop.require(launches, "gathers and their waits", *kinds)
        self.refreshing.difference_update(gathers)
        self.gathering.update(gathers)
        if self.updates:
            self._check_postponed(stop)
        needed = [stop.action.chunk] if stop.action is not None and stop.action.chunk in self.gathering else []
        self._check_arrivals(stop, needed)
        self.gathering.difference_update(needed)

    def _check_releases(self, stop: Stop, releases: Sequence[int]) -> None:
        expected: list[Action] = []
        for chunk in releases:
            expected += [Action(Kind.WAIT_STORE_WEIGHTS, chunk)] if chunk in self.leaving else []
            expected.append(Action(Kind.RELEASE, chunk))
        self.leaving.difference_update(releases)
        stop.require(expected, "releases and their waits", Kind.WAIT_STORE_WEIGHTS, Kind.RELEASE)

    def _check_arrivals(self, stop: Stop, needed: Sequence[int]) -> None:
        expected: list[Action] = []
        for chunk in needed:
            again = chunk in self.stored
            expected.append(Action(Kind.WAIT_LOAD_WEIGHTS if again else Kind.WAIT_GATHER, chunk))
            if chunk in self.needed_again and not again:
                expected.append(Action(Kind.STORE_WEIGHTS, chunk))
                self.leaving.add(chunk)
            if self.stores:
                self.stored.add(chunk)
        kinds = Kind.WAIT_GATHER, Kind.WAIT_LOAD_WEIGHTS, Kind.STORE_WEIGHTS
        stop.require(expected, "waits for gathers", *kinds)

    def _updated(self, stop: Stop, visit: _Visit | None) -> tuple[list[int], list[int]]:
        """Returns the chunks to refresh and to gather before a stop because a step has updated them."""
        kind = self.brought_by
        due: list[int] = []
        if kind is not None and visit is not None:
            further = 1 if kind is Kind.GATHER else self.spec.resident_chunks
            due = [chunk for chunk in self._soonest(visit, 1 + further) if chunk not in self.brought]
            self.brought.update(due)
        elif stop.action is None and not self.spec.defers_gathers and not self.spec.forward_only:
            due = list(self.uses)
        return (due if kind is Kind.REFRESH else []), (due if kind is Kind.GATHER else [])

    def _soonest(self, visit: _Visit, count: int, end: int | None = None) -> list[int]:
        """Returns the ``count`` chunks that are needed soonest from ``visit`` on, in order of need, before the visit
        with the number ``end``."""
        coming = []
        for chunk, numbers in self.uses.items():
            while numbers and numbers[0] < visit.number:
                numbers.popleft()
            if numbers and (end is None or numbers[0] < end):
                coming.append((numbers[0], chunk))
        return [chunk for _, chunk in nsmallest(count, coming)]

    def _check_loads(self, stop: Stop, visit: _Visit | None) -> list[int]:
        """Checks the loads before a stop. Returns the chunks that its gathers need from the host."""
        if visit is None:
            stop.require([], "loads", Kind.LOAD)
            return []
        own = self.loads[visit.number]
        at_once = [Action(Kind.LOAD, chunk) for chunk in (own if visit.first else [])]
        following = self.loads[visit.number + 1] if visit.number + 1 < visit.end else []
        stop.require(at_once + [Action(Kind.LOAD, chunk) for chunk in following], "loads", Kind.LOAD)
        in_front = list(takewhile(lambda action: action.kind is Kind.LOAD, stop.before))
        if visit.first and visit.gathers and in_front != at_once:
            raise Fault(stop.first, f"the loads before all else are {texts(in_front)}; they must be {texts(at_once)}")
        return own

    def _check_postponed(self, stop: Stop) -> None:
        launch = Kind.REFRESH if self.brought_by is Kind.REFRESH else Kind.GATHER
        expected: list[Action] = []
        for action in [*stop.of(launch), *([stop.action] if stop.action is not None else [])]:
            if action.chunk in self.postponed:
                self.postponed.discard(action.chunk)
                expected.append(Action(Kind.UPDATE, action.chunk))
            if action.kind is launch:
                expected.append(action)
        stop.require(expected, "updates and what needs them", Kind.UPDATE, launch)


def check_recomputation(spec: ProgramSpec, stops: Sequence[Stop]) -> None:
    """A compute is recomputed if the spec recomputes, its chunk has backwards, it is not the model's last chunk with a
    backward directly after each forward, and the spec does not keep what its chunk saves of its micro-batch. Layers
    recompute a part of themselves if the spec says so of the pair."""
    actions = [stop.action for stop in stops if stop.action is not None]
    trained = {action.chunk for action in actions if action.kind is Kind.BACKWARD} if spec.recomputes else set()
    last = spec.chunks - 1
    if all(
        following[:3] == (Kind.BACKWARD, last, action.micro_batch)
        for action, following in pairwise(actions)
        if action.kind is Kind.FORWARD and action.chunk == last
    ):
        trained.discard(last)
    for stop in stops:
        if stop.action is None:
            continue
        _, chunk, micro_batch, recomputed, selective = stop.action
        if recomputed != (chunk in trained and (chunk, micro_batch) not in spec.kept):
            fault = "is not" if recomputed else "is"
            raise Fault(stop.row, f"{stop} {fault} to be recomputed")
        if selective != (chunk in trained and (chunk, micro_batch) in spec.selective):
            do = "recompute" if selective else "do not recompute"
            raise Fault(stop.row, f"{stop} has layers that {do} a part of themselves")


def check_inputs(spec: ProgramSpec, stops: Sequence[Stop]) -> None:
    """- An input of a chunk above 0 leaves if its backward is ``NEAREST`` computes after its forward, or the script's
      turn lies between: directly after its forward and the SEND of that.
    - One leaves at a time. A rank waits for it when the next one leaves, or comes back.
    - It comes back one compute before its backward, and not before the script's turn. The backward waits for it.
    """
    if not spec.stores_inputs:
        return
    leaving = _leaving(stops)
    under_way: Action | None = None
    before: Action | None = None
    for number, stop in enumerate(stops):
        first: list[Action] = []
        if before in leaving and before is not None and before.kind is Kind.FORWARD:
            first = [*_of(Kind.WAIT_STORE_INPUT, under_way), *_of(Kind.STORE_INPUT, before)]
            under_way = before
        loads: list[Action] = []
        if stop.computes:
            due = [stop.action] if before is not None and before.kind is Kind.RETURN else []
            due.append(stops[number + 1].action)
            loads = [load for each in due if _comes_back(each, leaving) for load in _of(Kind.LOAD_INPUT, each)]
        last = loads
        if loads:
            last = [*_of(Kind.WAIT_STORE_INPUT, under_way), *loads]
            under_way = None
        if _comes_back(stop.action, leaving):
            last = [*last, *_of(Kind.WAIT_LOAD_INPUT, stop.action)]
        _check(stop, first, last)
        before = stop.action


def _check(stop: Stop, first: list[Action], last: list[Action]) -> None:
    """Checks the actions directly after the compute before ``stop``, and those directly before ``stop``."""
    rest = [action for action in stop.before if action.kind not in SENDS]
    inner = rest[len(first) : len(rest) - len(last)]
    if rest != [*first, *inner, *last] or any(action.kind in OF_INPUTS for action in inner):
        fault = f"before {stop} inputs move by {texts(stop.of(*OF_INPUTS))}"
        raise Fault(stop.row, f"{fault}; first must stand {texts(first)}, and last {texts(last)}")


def _leaving(stops: Sequence[Stop]) -> set[Action]:
    """Returns the forwards whose inputs leave, and their backwards."""
    leaving: set[Action] = set()
    forwards: dict[tuple[int, int], int] = {}
    place = 0
    for stop in stops:
        action = stop.action
        place += NEAREST if action is not None and action.kind is Kind.RETURN else 1
        if action is None or action.chunk < 1 or not action.recomputed:
            continue
        if action.kind is Kind.FORWARD:
            forwards[action.chunk, action.micro_batch] = place
        elif place - forwards[action.chunk, action.micro_batch] >= NEAREST:
            leaving |= {action, action._replace(kind=Kind.FORWARD)}
    return leaving


def _comes_back(action: Action | None, leaving: set[Action]) -> bool:
    return action is not None and action.kind is Kind.BACKWARD and action in leaving


def _of(kind: Kind, compute: Action | None) -> list[Action]:
    return [] if compute is None else [Action(kind, compute.chunk, compute.micro_batch)]
