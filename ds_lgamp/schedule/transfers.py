"""Passes that add what moves, beside collectives and sends: receives of messages; copies between device and host, of
gradients and weights of offloaded chunks, of gathered weights and of the inputs from which backward passes recompute;
and the optimizer's updates of single chunks.

:meth:`ds_lgamp.schedule.spec.ProgramSpec.chunk_updates` says when each chunk is updated, and by what. The weights of a
chunk are loaded once after every update. If the host holds the parameters too, each gather of a chunk takes a load of
its own.

Two ways to post receives exist, because two kinds of transport exist.

- **Early.** gloo matches messages by tag and keeps no order between links. A rank posts receives well before their
  use, so that a sender never waits for permission.
- **On arrival.** NCCL runs every operation in order on a stream, and streams may share one hardware queue of the GPU.
  There, a receive whose message is not under way yet blocks everything that is queued after it, sends of the same rank
  included. So a rank posts a receive when the simulated clock says that its message has just been sent. All ranks then
  queue their operations in the order of one clock, and an operation waits only for operations that are earlier on that
  clock. So no cycle of waits can form, however streams share queues; :mod:`ds_lgamp.schedule.validate` proves it for
  each program.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from ds_lgamp.schedule.actions import (
    COMPUTE,
    NEAREST,
    RECEIVES,
    SENDS,
    STARTS,
    Action,
    Kind,
    Segments,
    computes_of,
    each_action,
    joined,
    receive_of,
)
from ds_lgamp.schedule.orders import first_turning_chunk
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import RECEIVES_POSTED, Offload, ProgramSpec, Update
from ds_lgamp.schedule.split_backward import add_second_parts

_AFTER_LOADS = RECEIVES | {Kind.WAIT_GATHER, Kind.WAIT_LOAD_WEIGHTS, Kind.STORE_WEIGHTS, Kind.WAIT_REDUCE}
"""What runs between the loads for the next visit and the first compute of this one."""
_FROM_HOST = {Kind.GATHER: Kind.LOAD_WEIGHTS, Kind.WAIT_GATHER: Kind.WAIT_LOAD_WEIGHTS}
"""What takes the place of a gather, and of the wait for it, once the host has the weights."""


def add_stored_weights(spec: ProgramSpec, rank: int, segments: Segments) -> Segments:
    """Lets the host keep the weights of each chunk that a step gathers more than once. STORE_W follows the wait for the
    first gather, its wait comes before RELEASE, and each later gather becomes LOAD_W.

    If outputs return call by call, every chunk counts as gathered again, because a program does not depend on the
    number of calls that follow.
    """
    if not spec.stores_weights or spec.forward_only:
        return segments
    gathers = Counter(action.chunk for segment in segments for action in segment if action.kind is Kind.GATHER)
    again = {chunk for chunk, count in gathers.items() if count > 1 or spec.returns_outputs}
    stored: set[int] = set()
    leaving: set[int] = set()

    def lower(action: Action) -> Iterator[Action]:
        kind, chunk = action.kind, action.chunk
        if kind is Kind.RELEASE and chunk in leaving:
            leaving.remove(chunk)
            yield Action(Kind.WAIT_STORE_WEIGHTS, chunk)
        yield Action(_FROM_HOST[kind], chunk) if kind in _FROM_HOST and chunk in stored else action
        if kind is Kind.WAIT_GATHER and chunk in again - stored:
            stored.add(chunk)
            leaving.add(chunk)
            yield Action(Kind.STORE_WEIGHTS, chunk)

    return each_action(segments, lower)


def add_loads(spec: ProgramSpec, rank: int, segments: Segments) -> Segments:
    """Adds LOAD during the visit before the GATHER that needs it, so that the copy runs beside compute, and WAIT_LOAD
    directly before that GATHER. The loads for the first visit of each segment come before all else, the others before
    what their visit waits for. A LOAD begins when the update of its chunk is over, without a wait of the program.
    """
    if spec.offload is None:
        return segments
    known = set(spec.offload.on_device)
    return [_with_loads(spec.offload, segment, known) for segment in segments]


def _with_loads(offload: Offload, actions: Sequence[Action], known: set[int]) -> list[Action]:
    """Returns a segment with its loads. Adds to ``known`` the chunks that the device has from then on."""
    gathers = _gathers_by_visit(actions)
    loads = [[chunk for chunk in visit if chunk in new] for visit, new in zip(gathers, _new(gathers, offload, known))]
    lowered = [Action(Kind.LOAD, chunk) for chunk in loads[0]] if loads else []
    # A single data-parallel rank awaits its reductions where they begin.
    after_loads = _AFTER_LOADS - {Kind.WAIT_REDUCE} if offload.alone else _AFTER_LOADS
    visited, visit = None, -1
    for action in actions:
        if action.kind is Kind.GATHER and action.chunk in loads[visit + 1]:
            lowered.append(Action(Kind.WAIT_LOAD, action.chunk))
        elif action.kind in COMPUTE and action.chunk != visited:
            visited, visit = action.chunk, visit + 1
            row = len(lowered)
            while row > 0 and lowered[row - 1].kind in after_loads:
                row -= 1
            following = loads[visit + 1] if visit + 1 < len(loads) else []
            lowered[row:row] = [Action(Kind.LOAD, chunk) for chunk in following]
        lowered.append(action)
    return lowered


def _gathers_by_visit(actions: Sequence[Action]) -> list[list[int]]:
    """Returns the chunks that are gathered before each visit."""
    gathers: list[list[int]] = [[]]
    visited = None
    for action in actions:
        if action.kind is Kind.GATHER:
            gathers[-1].append(action.chunk)
        elif action.kind in COMPUTE and action.chunk != visited:
            visited = action.chunk
            gathers.append([])
    return gathers[:-1]


def _new(gathers: Sequence[Sequence[int]], offload: Offload, known: set[int]) -> list[set[int]]:
    """Returns, for each visit, the chunks that are loaded for it: all that are gathered and not ``known``, or those for
    the first time, which are known then."""
    if offload.parameters:
        return [set(visit) - known for visit in gathers]
    new = []
    for visit in gathers:
        new.append(set(visit) - known)
        known.update(visit)
    return new


def add_stored_inputs(spec: ProgramSpec, rank: int, segments: Segments) -> Segments:
    """Adds STORE_A after forwards, LOAD_A one compute before their backwards, and the waits for both.

    An input comes back in the segment of its backward. One of them leaves at a time. An input that is needed soon stays
    on the device. Inputs of chunk 0 stay where the user's batch has them.
    """
    if not spec.stores_inputs or spec.forward_only:
        return segments
    leaving = _leaving(segments)
    loads: defaultdict[Action, list[Action]] = defaultdict(list)
    for computes in map(computes_of, segments):
        for before, compute in zip([*computes[:1], *computes], computes):
            if compute.kind is Kind.BACKWARD and compute in leaving:
                loads[before].append(compute)
    lowered: Segments = []
    stored: Action | None = None
    """A forward whose input is on its way to the host."""
    for segment in segments:
        lowered.append([])
        computed: Action | None = None
        """A forward whose input leaves next."""
        for action in segment:
            if computed is not None and action.kind not in SENDS:
                lowered[-1].extend([*_of(Kind.WAIT_STORE_INPUT, stored), *_of(Kind.STORE_INPUT, computed)])
                computed, stored = None, computed
            if action in loads:
                lowered[-1].extend(_of(Kind.WAIT_STORE_INPUT, stored))
                stored = None
                lowered[-1].extend(load for backward in loads[action] for load in _of(Kind.LOAD_INPUT, backward))
            if action in leaving and action.kind is Kind.FORWARD:
                computed = action
            elif action in leaving:
                lowered[-1].extend(_of(Kind.WAIT_LOAD_INPUT, action))
            lowered[-1].append(action)
        if computed is not None:
            lowered[-1].extend([*_of(Kind.WAIT_STORE_INPUT, stored), *_of(Kind.STORE_INPUT, computed)])
            stored = computed
    return lowered


def _leaving(segments: Segments) -> set[Action]:
    """Returns the forwards whose inputs leave, and their backwards. The script's turn is long enough for that."""
    forwards: dict[tuple[int, int], tuple[int, Action]] = {}
    leaving: set[Action] = set()
    begin = 0
    for computes in map(computes_of, segments):
        for place, action in enumerate(computes, begin):
            if action.chunk == 0 or not action.recomputed:
                continue
            if action.kind is Kind.FORWARD:
                forwards[action.chunk, action.micro_batch] = place, action
                continue
            since, forward = forwards[action.chunk, action.micro_batch]
            if place - since >= NEAREST:
                leaving |= {forward, action}
        begin += len(computes) + NEAREST
    return leaving


def _of(kind: Kind, compute: Action | None) -> list[Action]:
    return [] if compute is None else [Action(kind, compute.chunk, compute.micro_batch)]


def add_starts(spec: ProgramSpec, rank: int, segments: Segments) -> Segments:
    """Adds START_F and START_B before the first of each two consecutive computes that overlap exchanges."""
    if not spec.overlaps_exchanges:
        return segments
    started: dict[Action, Action] = {}
    for segment in segments:
        before: Action | None = None
        for compute in computes_of(segment):
            overlap = before is not None and spec.overlaps(before, compute)
            if before is not None and overlap:
                started[before] = compute._replace(kind=STARTS[compute.kind])
            before = None if overlap else compute
    return each_action(segments, lambda action: [started[action], action] if action in started else [action])


def add_postponed_updates(spec: ProgramSpec, rank: int, segments: Segments) -> Segments:
    """Adds each UPDATE that the step before left to this one, before the first gather or forward of its chunk."""
    if spec.forward_only:
        return segments
    updates = spec.chunk_updates
    postponed = {chunk for chunk, update in updates.items() if update.when == "next_step" and not update.on_host}

    def lower(action: Action) -> Iterator[Action]:
        if action.chunk in postponed:
            postponed.remove(action.chunk)
            yield Action(Kind.UPDATE, action.chunk)
        yield action

    return each_action(segments, lower) if postponed else segments


def add_final_updates(spec: ProgramSpec, rank: int, segments: Segments) -> Segments:
    """Adds each UPDATE that need not wait for STEP, after the end of its chunk's last reduction."""
    at_once = {
        chunk for chunk, update in spec.chunk_updates.items() if update.when == "reduction" and not update.on_host
    }
    if spec.forward_only or not at_once:
        return segments
    *calls, actions = segments
    lowered: list[Action] = []
    for action, update in ready_gradients(spec, actions):
        lowered.append(action)
        if update is not None and action.chunk in at_once:
            lowered.append(Action(Kind.UPDATE, action.chunk))
    return [*calls, lowered]


def add_stores(spec: ProgramSpec, rank: int, segments: Segments) -> Segments:
    """Adds STORE after the end of the last reduction of each chunk that the host updates. One STORE is under way at a
    time; its WAIT_STORE comes before the next one, or before STEP. UPDATE follows that wait, or STEP if that decides
    whether and how to update."""
    if spec.offload is None or spec.forward_only:
        return segments
    *calls, actions = segments
    lowered: list[Action] = []
    stored: list[int] = []
    under_way: int | None = None

    def finish() -> list[Action]:
        if under_way is None:
            return []
        at_once = spec.chunk_updates[under_way].when == "reduction"
        return [Action(Kind.WAIT_STORE, under_way), *([Action(Kind.UPDATE, under_way)] if at_once else [])]

    for action, update in ready_gradients(spec, actions):
        if action.kind is Kind.STEP:
            lowered.extend(finish())
        lowered.append(action)
        if update is not None and update.on_host:
            lowered.extend(finish())
            under_way = action.chunk
            stored.append(under_way)
            lowered.append(Action(Kind.STORE, under_way))
        if action.kind is Kind.STEP:
            visits = dict.fromkeys(each.chunk for segment in segments for each in segment if each.kind in COMPUTE)
            postponed = {chunk for chunk in stored if spec.chunk_updates[chunk].when == "next_step"}
            lowered.extend(Action(Kind.UPDATE, chunk) for chunk in visits if chunk in postponed)
    return [*calls, lowered]


def ready_gradients(spec: ProgramSpec, actions: Sequence[Action]) -> Iterator[tuple[Action, Update | None]]:
    """Yields each action with the update of the chunk whose last reduction it ends; with None if it ends none."""
    updates = spec.chunk_updates
    last = {
        action.chunk: row
        for row, action in enumerate(actions)
        if action.chunk in updates and action.kind is updates[action.chunk].ready_after
    }
    for row, action in enumerate(actions):
        yield action, updates[action.chunk] if last.get(action.chunk) == row else None


def receive_posts(spec: ProgramSpec, rank: int, segments: Segments) -> list[list[Action]]:
    """Returns, for each compute of ``rank``, the receives to post directly before it.

    Args:
        segments: its computes. All messages of a segment arrive in it.
    """
    if spec.receives_on_arrival:
        return _on_arrival(spec, rank, [action for segment in segments for action in segment])
    return [posts for segment in segments for posts in _early(spec, rank, segment)]


def _early(spec: ProgramSpec, rank: int, computes: Sequence[Action]) -> list[list[Action]]:
    """Posts receives of one kind in the order of their consumers."""
    posts: list[list[Action]] = [[] for _ in computes]
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        sources = {index: spec.source_rank(action) for index, action in enumerate(computes) if action.kind is kind}
        links = set(sources.values()) - {None}
        window, places = _window(spec, rank, kind), dict[int, int]()
        for link in links:
            alike = [index for index, source in sources.items() if source is None or source == link]
            received = [order for order, index in enumerate(alike) if sources[index] == link]
            places.update(_places(alike, received, window, alone=len(links) == 1))
        for consumer in sorted(places):
            posts[places[consumer]].append(receive_of(computes[consumer]))
    return posts


def _places(alike: Sequence[int], received: Sequence[int], window: int, alone: bool) -> Iterator[tuple[int, int]]:
    """Yields the consumer of each message of one kind on one link, and the compute before which its receive is posted.

    With a window of n receives, each is posted n - 1 computes of its kind before its consumer, but not before the
    window has room. Forwards and backwards may alternate in between, so a receive is posted at most 2(n - 1) computes
    of any kind earlier. There is no such limit where two links bring messages of one kind: most computes in between
    then belong to the other link.

    Args:
        alike: the computes of the kind, without those that take messages of another link.
        received: the places in ``alike`` of those that take a message.
        window: n.
        alone: whether no other link brings messages of the kind.
    """
    for position, order in enumerate(received):
        consumer, earliest = alike[order], order - (window - 1)
        early = alike[earliest] if earliest >= 0 else alike[0] + earliest
        room = alike[received[position - window]] + 1 if position >= window else 0
        yield consumer, max(room, early, consumer - 2 * (window - 1) if alone else 0)


def _window(spec: ProgramSpec, rank: int, kind: Kind) -> int:
    """Returns how many receives of one kind ``rank`` keeps posted early on one link.

    This is ``RECEIVES_POSTED`` unless messages pile up. While a group larger than the ring passes, they do so on the
    wrap-around link and where the turn begins. zbv passes no groups, and in evaluation its last rank has them all
    before it sends any back.
    """
    if spec.schedule == "zbv":
        return RECEIVES_POSTED
    forward = kind is Kind.FORWARD
    # Evaluation ignores groups: all micro-batches pass through a chunk together. It has no turn.
    group = spec.micro_batches if spec.forward_only else min(spec.micro_batch_group, spec.micro_batches)
    turn = spec.chunks if spec.forward_only else first_turning_chunk(spec.placement)
    if spec.returns_outputs and forward:
        group, turn = spec.pipeline_ranks, spec.chunks
    for chunk, owner in enumerate(spec.placement):
        source = chunk - 1 if forward else chunk + 1
        if owner == rank and 0 <= source < spec.chunks and spec.placement[source] != rank:
            wraps = spec.placement[source] > rank if forward else spec.placement[source] < rank
            if wraps or max(chunk, source) == turn:
                return max(RECEIVES_POSTED, group - spec.pipeline_ranks + 2)
    return RECEIVES_POSTED


def _on_arrival(spec: ProgramSpec, rank: int, computes: Sequence[Action]) -> list[list[Action]]:
    """Posts each receive before the first compute that starts on the clock once the message has been sent."""
    posts: list[list[Action]] = [[] for _ in computes]
    clock = _clock(spec)
    arrivals = []
    for compute in filter(spec.receives_input, computes):
        source = compute.chunk + (-1 if compute.kind is Kind.FORWARD else 1)
        arrivals.append(
            (clock.ends[compute.kind, source, compute.micro_batch], compute.kind is Kind.BACKWARD, receive_of(compute))
        )
    for arrival, _, receive in sorted(arrivals, key=itemgetter(0, 1)):
        posts[bisect_left(clock.starts[rank], arrival)].append(receive)
    return posts


class _Clock(NamedTuple):
    starts: list[list[float]]
    """When each compute of each rank starts, in the rank's order."""
    ends: dict[tuple[Kind, int, int], float]
    """When each compute ends, by kind, chunk and micro-batch."""


@lru_cache(maxsize=1)
def _clock(spec: ProgramSpec) -> _Clock:
    """Runs the computes and sends of all ranks on the clock. The programs of all ranks share the result."""
    program = [
        joined(add_starts(spec, rank, add_second_parts(spec, rank, spec.segments(rank))))
        for rank in range(spec.pipeline_ranks)
    ]
    spans = simulate(spec, program, sends_at_once=True).spans
    starts = [[span.start for span in of_rank if span.action.kind in COMPUTE] for of_rank in spans]
    return _Clock(starts, {span.action[:3]: span.end for of_rank in spans for span in of_rank})
