"""The order in a finished program: of its computes, of the actions between them, and of the messages between pipeline
ranks."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product, zip_longest
from typing import NamedTuple

from ds_lgamp.schedule.actions import (
    COMPUTE,
    OF_INPUTS,
    RECEIVES,
    SENDS,
    STARTED,
    STARTS,
    Action,
    Kind,
    Program,
    receive_matching,
    receive_of,
    send_of,
)
from ds_lgamp.schedule.spec import RECEIVES_POSTED, ProgramSpec

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
    """The actions between the stop before and this one."""

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
    """Between two computes, actions come in one order of kinds: what belongs to the first, then what the second
    needs. Inputs on the host have a rule of their own. A single data-parallel rank that offloads ends its reductions,
    and stores their gradients, where they begin."""
    sections = _sections(spec)
    places = {kind: place for place, kinds in enumerate(sections) for kind in kinds}
    ends = {Kind.WAIT_REDUCE, Kind.STORE} if spec.offload is not None and spec.offload.alone else set()
    fresh = True
    for stop in stops:
        place, between = 0, stop.before
        if fresh:
            # The loads for the first visit of a piece come before all else.
            between = between[next((n for n, each in enumerate(between) if each.kind is not Kind.LOAD), len(between)) :]
        fresh = stop.action is not None and stop.action.kind is Kind.RETURN
        rows = range(stop.row - len(between), stop.row)
        last_end = max((row for row, action in zip(rows, between) if action.kind in ends), default=-1)
        for row, action in zip(rows, between):
            if spec.stores_inputs and action.kind in OF_INPUTS:
                continue
            if action.kind not in places:
                raise Fault(row, f"{action} does not belong here")
            own = places[action.kind]
            if row <= last_end and own == places[Kind.WAIT_REDUCE]:
                own = places[Kind.REDUCE]
            if own < place:
                order = ", ".join(" and ".join(sorted(kinds)) for kinds in sections)
                raise Fault(row, f"{action} is out of order: {order} stand in this order")
            place = own


def _sections(spec: ProgramSpec) -> list[set[Kind]]:
    refreshes, gathers = {Kind.REFRESH}, {Kind.WAIT_REFRESH, Kind.WAIT_LOAD, Kind.GATHER}
    releases, arrivals = {Kind.RELEASE}, {Kind.WAIT_GATHER}
    if spec.stores_weights:
        releases.add(Kind.WAIT_STORE_WEIGHTS)
        gathers.add(Kind.LOAD_WEIGHTS)
        arrivals |= {Kind.WAIT_LOAD_WEIGHTS, Kind.STORE_WEIGHTS}
    reductions = {Kind.WAIT_REDUCE, Kind.COMBINE, Kind.WAIT_COMBINE, Kind.STORE, Kind.WAIT_STORE}
    if spec.offload is None and spec.updates == "next_step":
        (refreshes if brought_by(spec) is Kind.REFRESH else gathers).add(Kind.UPDATE)
    elif spec.updates != "step":
        reductions.add(Kind.UPDATE)
    of_first = [{Kind.SEND_FORWARD, Kind.SEND_BACKWARD}, {Kind.WEIGHTS_BACKWARD, Kind.REDUCE}]
    receives = {Kind.RECV_FORWARD, Kind.RECV_BACKWARD}
    return [*of_first, releases, refreshes, gathers, {Kind.LOAD}, receives, arrivals, reductions, {*STARTED}]


def check_starts(spec: ProgramSpec, stops: Sequence[Stop]) -> None:
    """If exchanges overlap, the second of two consecutive forwards of a chunk, or of backwards that repeat them, starts
    directly before the first one, and a forward has its message by then. None is in two pairs, and none of the model's
    last chunk is in one."""
    begun = False
    for stop, following in zip(stops, stops[1:]):
        first, second = stop.action, following.action
        due: list[Action] = []
        if first is not None and second is not None and spec.overlaps_exchanges and not begun:
            alike = first.kind is second.kind and first.chunk == second.chunk and first.chunk + 1 < spec.chunks
            forwards = first.kind is Kind.FORWARD or (first.kind is Kind.BACKWARD and first.recomputed)
            due = [second._replace(kind=STARTS[second.kind])] if alike and forwards else []
        stop.require(due, "starts", *STARTED)
        if due and stop.before[-1] != due[0]:
            raise Fault(stop.row, f"{due[0]} must stand directly before {stop}")
        late = following.of(Kind.RECV_FORWARD) if due and due[0].kind is Kind.START_FORWARD else []
        if any(receive[1:3] == due[0][1:3] for receive in late):
            raise Fault(following.row, f"the message for {following} is not there at {due[0]}")
        begun = bool(due)


def brought_by(spec: ProgramSpec) -> Kind | None:
    """The kind of collective that brings what other ranks have updated: once per step, of every chunk. None if all
    ranks update alike, or if stage 3 gathers it with each use."""
    if spec.zero_stage in (1, 2):
        return Kind.GATHER
    return Kind.REFRESH if spec.hierarchy is not None and not spec.hierarchy.replicated else None


def texts(actions: Sequence[Action]) -> str:
    return " ".join(map(str, actions)) or "none"


def check_sends(spec: ProgramSpec, stops: Sequence[Stop]) -> None:
    """A result that another rank consumes leaves directly after its compute."""
    for stop, following in zip(stops, stops[1:]):
        due = [send_of(stop.action)] if stop.action is not None and _leaves(spec, stop.action) else []
        if list(following.before[: len(due)]) != due:
            found = following.before[0] if following.before else following
            raise Fault(following.first, f"the result must be sent at once by {due[0]}, found {found}")
        for row, action in enumerate(following.before[len(due) :], following.first + len(due)):
            if action.kind in SENDS:
                raise Fault(row, f"{action} does not stand directly after the compute whose result it sends")


def _leaves(spec: ProgramSpec, action: Action) -> bool:
    """Whether another rank consumes the result of an action."""
    if action.kind is Kind.FORWARD:
        target = action.chunk + 1
    elif action.kind is Kind.BACKWARD:
        target = action.chunk - 1
    else:
        return False
    exists = spec.first_trained <= target if action.kind is Kind.BACKWARD else target < spec.chunks
    return exists and spec.placement[target] != spec.placement[action.chunk]


def _arrives(spec: ProgramSpec, compute: Action) -> bool:
    """Whether another rank makes the input of a compute."""
    source = compute.chunk - 1 if compute.kind is Kind.FORWARD else compute.chunk + 1
    return 0 <= source < spec.chunks and spec.placement[source] != spec.placement[compute.chunk]


def check_receives(spec: ProgramSpec, rank: int, stops: Sequence[Stop]) -> None:
    """Each message has one receive, posted before the compute that takes it, and none in a script's turn.

    With early receives, so many of a kind are posted at once for each link (:func:`_most_posted`), each when there is
    room, in the order of their consumers, and no earlier than as many computes of its kind before that take nothing of
    another link. A single link of the kind also posts none earlier than twice as many computes of any kind before.
    """
    for piece in pieces(stops):
        computes = [(stop, stop.action) for stop in piece if stop.action is not None and stop.computes]
        for stop in piece:
            if not stop.computes:
                stop.require([], "receives", *RECEIVES)
        due = {receive_of(action): place for place, (_, action) in enumerate(computes) if _arrives(spec, action)}
        taken = dict(zip(due.values(), due))
        """The receive that each compute takes, by its number."""
        places: dict[Action, int] = {}
        for place, (stop, action) in enumerate(computes):
            receives = stop.of(*RECEIVES) if stop.before else []
            for receive in receives:
                if receive in places or due.get(receive, -1) < place:
                    raise Fault(stop.row, f"{receive} is posted twice, or no later compute takes its message")
                places[receive] = place
            if place in taken and taken[place] not in places:
                raise Fault(stop.row, f"{action} needs {taken[place]} before it")
            if len(receives) > 1 and not spec.receives_on_arrival:
                in_order = sorted(receives, key=lambda each: (each.kind is Kind.RECV_BACKWARD, due[each]))
                stop.require(in_order, "receives", *RECEIVES)
        if not spec.receives_on_arrival:
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                most = _most_posted(spec, rank, kind is Kind.FORWARD)
                for consumer, right in _early_places(spec, [action for _, action in computes], kind, most).items():
                    receive = taken[consumer]
                    if places[receive] != right:
                        fault = f"{receive} is posted here; its place is before {computes[right][1]}"
                        raise Fault(computes[places[receive]][0].row, fault)


def _early_places(spec: ProgramSpec, computes: Sequence[Action], kind: Kind, most: int) -> dict[int, int]:
    """Returns before which compute the receive of each one of ``kind`` is posted, by their numbers.

    Args:
        most: how many of a link may be posted at once.
    """
    makers = {place: _maker(spec, action) for place, action in enumerate(computes) if action.kind is kind}
    links = {maker for maker in makers.values() if maker is not None}
    places = {}
    for link in links:
        # Before the first compute of the link, others count as if they were of it.
        alike = [place for place, maker in makers.items() if maker in (None, link)]
        counted = [*range(alike[0]), *alike]
        number = {place: index for index, place in enumerate(counted)}
        consumers = [place for place in alike if makers[place] == link]
        for index, consumer in enumerate(consumers):
            early = counted[max(0, number[consumer] - (most - 1))]
            room = consumers[index - most] + 1 if index >= most else 0
            limit = consumer - 2 * (most - 1) if len(links) == 1 else 0
            places[consumer] = max(early, room, limit)
    return places


def _maker(spec: ProgramSpec, compute: Action) -> int | None:
    """Returns the other rank that makes the input of a compute; None if there is none."""
    source = compute.chunk - 1 if compute.kind is Kind.FORWARD else compute.chunk + 1
    return spec.placement[source] if _arrives(spec, compute) else None


def _most_posted(spec: ProgramSpec, rank: int, forward: bool) -> int:
    """Returns how many receives of one kind a rank may have posted at once for one link.

    While a group larger than the ring passes, messages pile up where it comes around the ring to the next chunk, and
    where the turn begins: at the first chunk from which on no rank owns two. They do not if calls pass one by one, nor
    with zbv, which has no groups and whose last rank evaluates all micro-batches before it sends any back.
    """
    placement, most = spec.placement, RECEIVES_POSTED
    group = spec.micro_batches if spec.forward_only else min(spec.micro_batch_group, spec.micro_batches)
    if (spec.returns_outputs and forward) or spec.schedule == "zbv":
        return most
    for chunk in (chunk for chunk, owner in enumerate(placement) if owner == rank):
        source = chunk - 1 if forward else chunk + 1
        if not 0 <= source < spec.chunks or placement[source] == rank:
            continue
        upper = max(chunk, source)
        begins_turn = len(set(placement[upper:])) == spec.chunks - upper and placement[upper - 1] in placement[upper:]
        comes_around = placement[source] > rank if forward else placement[source] < rank
        if comes_around or (begins_turn and not spec.forward_only):
            most = max(most, group - spec.pipeline_ranks + 2)
    return most


def check_arrivals(stops: Sequence[Stop], starts: Sequence[float], ends: Mapping[tuple[Kind, int, int], float]) -> None:
    """A receive that is posted on arrival comes directly before the first compute that begins once its message has
    been sent; several, in the order in which they were sent, activations first.

    Args:
        stops: of the rank.
        starts: when each of its computes starts on the clock.
        ends: when each compute of all ranks ends, by kind, chunk and micro-batch.
    """
    consumers = {receive_of(stop.action): stop.row for stop in stops if stop.action is not None and stop.computes}

    def sent(receive: Action) -> tuple[float, bool, int]:
        forward = receive.kind is Kind.RECV_FORWARD
        kind, source = (Kind.FORWARD, receive.chunk - 1) if forward else (Kind.BACKWARD, receive.chunk + 1)
        return ends[kind, source, receive.micro_batch], not forward, consumers[receive]

    for place, stop in enumerate(stop for stop in stops if stop.computes):
        receives = stop.of(*RECEIVES)
        stop.require(sorted(receives, key=sent), "receives", *RECEIVES)
        for receive in receives:
            time = sent(receive)[0]
            if starts[place] < time or (place > 0 and starts[place - 1] >= time):
                raise Fault(stop.row, f"{receive} is not posted when its message arrives")


def check_channels(spec: ProgramSpec, program: Program) -> None:
    """Sends and posts of each channel (source, destination, kind) come in the same order. A channel delivers messages
    in order."""
    sends: dict[tuple[int, int, bool], list[tuple[int, int, int]]] = defaultdict(list)
    posts: dict[tuple[int, int, bool], list[tuple[int, int, int]]] = defaultdict(list)
    for rank, actions in enumerate(program):
        for row, action in enumerate(actions):
            kind = action.kind
            if kind in SENDS:
                target = receive_matching(action).chunk
                channel = rank, spec.placement[target], kind is Kind.SEND_FORWARD
                sends[channel].append((target, action.micro_batch, row))
            elif kind in RECEIVES:
                forward = kind is Kind.RECV_FORWARD
                maker = action.chunk - 1 if forward else action.chunk + 1
                posts[spec.placement[maker], rank, forward].append((action.chunk, action.micro_batch, row))
    for channel in sends.keys() | posts.keys():
        source, destination, _ = channel
        sent, posted = sends[channel], posts[channel]
        for send, post in zip(sent, posted):
            if send[:2] != post[:2]:
                receive, sending = program[destination][post[2]], program[source][send[2]]
                raise Fault(post[2], f"{receive} is posted where rank {source} sends {sending}", destination)
        if len(sent) != len(posted):
            rank, rows = (source, sent) if len(sent) > len(posted) else (destination, posted)
            row = rows[min(len(sent), len(posted))][2]
            raise Fault(row, f"{program[rank][row]} has no counterpart on the other rank", rank)
