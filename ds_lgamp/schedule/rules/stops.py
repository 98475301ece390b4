"""A finished program of one pipeline rank, cut at its computes: whether it computes all, and what stands between."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product, zip_longest
from typing import NamedTuple

from ds_lgamp.schedule.actions import COMPUTE, OF_INPUTS, Action, Kind
from ds_lgamp.schedule.spec import ProgramSpec

_STOPS = COMPUTE | {Kind.RETURN, Kind.STEP}


class Fault(Exception):
    """A program breaks a rule in one ``row``: that of the rank that is looked at, or else of ``rank``."""

    def __init__(self, row: int, text: str, rank: int | None = None) -> None:
        super().__init__(text)
        self.row, self.rank = row, rank


class Stop(NamedTuple):
    """A compute, RETURN, STEP or the end of a program."""

    action: Action | None
    """None at the end."""
    row: int
    before: Sequence[Action]
    """What stands between the stop before and this one."""

    @property
    def first(self) -> int:
        """The row of the first of these actions."""
        return self.row - len(self.before)

    @property
    def computes(self) -> bool:
        return self.action is not None and self.action.kind in COMPUTE

    def __str__(self) -> str:
        return str(self.action or "the end")

    def of(self, *kinds: Kind) -> list[Action]:
        """Returns the actions before it that have one of ``kinds``."""
        return [action for action in self.before if action.kind in kinds]

    def require(self, expected: list[Action], what: str, *kinds: Kind) -> None:
        """Raises Fault if the actions before some ``kinds`` are not the ``expected`` ones."""
        found = self.of(*kinds)
        if found != expected:
            raise Fault(self.row, f"{what} before {self} are {texts(found)}; they must be {texts(expected)}")


def cut(actions: Sequence[Action]) -> list[Stop]:
    """Returns the stops of a program."""
    stops, first = [], 0
    for row, action in enumerate(actions):
        if action.kind in _STOPS:
            stops.append(Stop(action, row, actions[first:row]))
            first = row + 1
    return [*stops, Stop(None, len(actions), actions[first:])]


def pieces(stops: Iterable[Stop]) -> list[list[Stop]]:
    """Returns the stops in pieces, cut after each RETURN: a script's turn is between two of them."""
    found: list[list[Stop]] = [[]]
    for stop in stops:
        found[-1].append(stop)
        if stop.action is not None and stop.action.kind is Kind.RETURN:
            found.append([])
    return found


def check_order(spec: ProgramSpec, rank: int, stops: Sequence[Stop]) -> None:
    """A rank computes in the order of its schedule, and STEP comes last.

    Every chunk sees every micro-batch once forward and, from the first one that trains on, once backward. Backwards
    come in ascending micro-batches, so that gradients are summed in one order. A call returns when its micro-batches
    have passed.
    """
    order = [*spec.computes(rank), *([] if spec.forward_only else [Action(Kind.STEP)])]
    for stop, right in zip_longest(stops[:-1], order):
        found = stops[-1] if stop is None else stop
        if _identity(found.action) != _identity(right):
            raise Fault(found.row, f"the schedule's next compute is {right or 'none'}, found {found}")
    own = [chunk for chunk, owner in enumerate(spec.placement) if owner == rank]
    trained = [] if spec.forward_only else [chunk for chunk in own if chunk >= spec.first_trained]
    micro_batches = range(spec.micro_batches)
    forwards, backwards = (product([kind], own, micro_batches) for kind, own in zip(Kind, (own, trained)))
    times = Counter(_identity(stop.action) for stop in stops if stop.computes)
    if times != Counter((*forwards, *backwards)):
        raise Fault(stops[-1].row, "some chunk does not see every micro-batch once in each direction")
    done: Counter[Action | None] = Counter()
    for stop in stops:
        if stop.action is None or stop.action.kind is Kind.FORWARD:
            done[Action(Kind.FORWARD)] += stop.action is not None
        elif stop.action.kind is Kind.BACKWARD:
            if done[Action(Kind.BACKWARD, stop.action.chunk)] != stop.action.micro_batch:
                raise Fault(stop.row, f"{stop.action} sums gradients in another order than that of micro-batches")
            done[Action(Kind.BACKWARD, stop.action.chunk)] += 1
        elif stop.action.kind is Kind.RETURN:
            called = (stop.action.micro_batch + 1) * spec.pipeline_ranks
            if done[Action(Kind.FORWARD)] != called * len(own):
                raise Fault(stop.row, f"{stop.action} stands where its call is not over")


def _identity(action: Action | None) -> tuple[Kind, int, int] | None:
    return None if action is None else action[:3]


def check_layout(spec: ProgramSpec, stops: Sequence[Stop]) -> None:
    """Between two computes, actions stand in one order of kinds: what belongs to the first, then what the second
    needs. Inputs on the host have a rule of their own."""
    sections = _sections(spec)
    places = {kind: place for place, kinds in enumerate(sections) for kind in kinds}
    fresh = True
    for stop in stops:
        place, between = 0, stop.before
        if fresh:
            # The loads for the first visit of a piece stand before all else.
            between = between[next((n for n, each in enumerate(between) if each.kind is not Kind.LOAD), len(between)) :]
        fresh = stop.action is not None and stop.action.kind is Kind.RETURN
        for row, action in enumerate(between, stop.row - len(between)):
            if spec.stores_inputs and action.kind in OF_INPUTS:
                continue
            if action.kind not in places:
                raise Fault(row, f"{action} does not belong here")
            if places[action.kind] < place:
                order = ", ".join(" and ".join(sorted(kinds)) for kinds in sections)
                raise Fault(row, f"{action} is out of order: {order} stand in this order")
            place = places[action.kind]


def _sections(spec: ProgramSpec) -> list[set[Kind]]:
    refreshes, gathers = {Kind.REFRESH}, {Kind.WAIT_REFRESH, Kind.WAIT_LOAD, Kind.GATHER}
    reductions = {Kind.WAIT_REDUCE, Kind.COMBINE, Kind.WAIT_COMBINE, Kind.STORE, Kind.WAIT_STORE}
    if spec.offload is None and spec.updates == "next_step":
        (refreshes if brought_by(spec) is Kind.REFRESH else gathers).add(Kind.UPDATE)
    elif spec.updates != "step":
        reductions.add(Kind.UPDATE)
    of_first = [{Kind.SEND_FORWARD, Kind.SEND_BACKWARD}, {Kind.REDUCE}]
    receives = {Kind.RECV_FORWARD, Kind.RECV_BACKWARD}
    return [*of_first, {Kind.RELEASE}, refreshes, gathers, {Kind.LOAD}, receives, {Kind.WAIT_GATHER}, reductions]


def brought_by(spec: ProgramSpec) -> Kind | None:
    """The kind of collective that brings what other ranks have updated: once per step, of every chunk. None if all
    ranks update alike, or if stage 3 gathers it with each use."""
    if spec.zero_stage in (1, 2):
        return Kind.GATHER
    return Kind.REFRESH if spec.hierarchy is not None and not spec.hierarchy.replicated else None


def texts(actions: Sequence[Action]) -> str:
    return " ".join(map(str, actions)) or "none"
