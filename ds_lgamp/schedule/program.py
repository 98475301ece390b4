"""Builds a program from a compute order: the actions of every pipeline rank.

Passes add them. Each takes the segments of a pipeline rank and returns them with new actions. Around each compute,
actions come in this order: RELEASE, GATHER, RECV (posted before use), WAIT_GATHER and WAIT_REDUCE, START of the compute
that runs beside it, the compute, its SEND, second parts of earlier backwards, and REDUCE if a chunk's gradient is
final. The program ends with the last WAIT_REDUCEs, STEP, and the gathers that stages 1 and 2 do not defer. Where the
optimizer updates chunks one by one, UPDATE follows the end of a reduction or precedes a GATHER.
:mod:`ds_lgamp.schedule.transfers` says where RECV, LOAD and STORE come, :mod:`ds_lgamp.schedule.split_backward` where
second parts of backwards come.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ds_lgamp.schedule.actions import (
    COLLECTIVES,
    COMPUTE,
    STARTED,
    Action,
    Kind,
    Program,
    Segments,
    computes_of,
    each_action,
    joined,
    send_of,
)
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.split_backward import add_second_parts
from ds_lgamp.schedule.transfers import (
    add_final_updates,
    add_loads,
    add_postponed_updates,
    add_starts,
    add_stored_inputs,
    add_stored_weights,
    add_stores,
    receive_posts,
)


class Window(NamedTuple):
    """What must have started when a visit begins: chunks in the order of need."""

    refreshed: list[int]
    """Chunks whose REFRESH has started."""
    resident: list[int]
    """Chunks whose GATHER has started, and that are not released."""


def mark_recomputed(spec: ProgramSpec, rank: int, segments: Segments) -> Segments:
    """Marks the forwards and backwards that are recomputed, or whose layers recompute a part of themselves."""
    computes = COMPUTE | {Kind.WEIGHTS_BACKWARD, *STARTED}
    return [[spec.marked(action) if action.kind in computes else action for action in segment] for segment in segments]


def add_residency(spec: ProgramSpec, rank: int, segments: Segments) -> Segments:
    """Adds RELEASE, REFRESH and GATHER before each visit of a chunk. At stage 3, each segment ends by releasing every
    resident chunk, because the script may evaluate in its turn."""
    windows = windows_of(spec, segments)
    refreshed, resident = started_of(spec, segments)
    lowered: Segments = []
    for segment in segments:
        lowered.append([])
        visited = None
        for action in segment:
            if action.chunk != visited:
                visited = action.chunk
                window = next(windows)
                released = sorted(set(resident) - set(window.resident))
                lowered[-1].extend(Action(Kind.RELEASE, chunk) for chunk in released)
                lowered[-1].extend(Action(Kind.REFRESH, chunk) for chunk in window.refreshed if chunk not in refreshed)
                lowered[-1].extend(Action(Kind.GATHER, chunk) for chunk in window.resident if chunk not in resident)
                refreshed, resident = window
            lowered[-1].append(action)
        if spec.zero_stage == 3:
            lowered[-1].extend(Action(Kind.RELEASE, chunk) for chunk in sorted(resident))
            resident = []
    return lowered


def add_receives(spec: ProgramSpec, rank: int, segments: Segments) -> Segments:
    """Adds each RECV, well before the compute that consumes the message or when the message arrives."""
    posts = iter(receive_posts(spec, rank, [computes_of(segment) for segment in segments]))
    return each_action(segments, lambda action: [*next(posts), action] if action.kind in COMPUTE else [action])


def add_sends(spec: ProgramSpec, rank: int, segments: Segments) -> Segments:
    """Adds SEND directly after each compute whose result another rank consumes."""
    return each_action(
        segments,
        lambda action: [action, send_of(action)] if action.kind in COMPUTE and spec.sends_output(action) else [action],
    )


def add_reductions(spec: ProgramSpec, rank: int, segments: Segments) -> Segments:
    """Adds REDUCE once a chunk's gradient is final, after the SEND of the last backward or its second part."""
    *calls, actions = segments
    lowered: list[Action] = []
    final = None
    for action in actions:
        if final is not None and action.kind is not Kind.SEND_BACKWARD:
            lowered.append(Action(Kind.REDUCE, final))
            final = None
        lowered.append(action)
        if spec.is_final_backward(action):
            final = action.chunk
    if final is not None:
        lowered.append(Action(Kind.REDUCE, final))
    return [*calls, lowered]


def add_step(spec: ProgramSpec, rank: int, segments: Segments) -> Segments:
    """Ends a training program with STEP and what brings its update to other ranks, unless that is deferred."""
    if spec.forward_only:
        return segments
    *calls, actions = segments
    return [*calls, [*actions, Action(Kind.STEP), *after_step(spec, segments)]]


def add_waits(spec: ProgramSpec, rank: int, segments: Segments) -> Segments:
    """Adds the waits for collectives, as late as possible, and COMBINE after the wait for a reduction inside nodes. A
    single data-parallel rank that offloads waits at once, because its reductions move nothing."""
    waits = Waits(spec, after_step(spec, segments))
    alone = spec.offload is not None and spec.offload.alone

    def lower(action: Action) -> Iterator[Action]:
        if action.kind in WAITING:
            yield from waits.before(action)
        yield action
        if action.kind is Kind.REDUCE and alone:
            yield from waits.go_on()

    return each_action(segments, lower)


def windows_of(spec: ProgramSpec, segments: Segments) -> Iterator[Window]:
    """Returns what must have started at each visit, in the order of the visits.

    Deferred collectives cover one visit more than those that need them: at stages 1 and 2 the compute, at stage 3 the
    gathers inside a node.
    """
    by_segment = [chunk_visits(computes_of(segment)) for segment in segments]
    visits = [chunk for segment in by_segment for chunk in segment]
    nothing: list[list[int]] = [[] for _ in visits]
    refreshed = resident = nothing
    if spec.zero_stage == 3:
        resident = [window for segment in by_segment for window in next_distinct(segment, spec.resident_chunks)]
    update = spec.chunk_updates[visits[0]]  # All travel alike.
    if update.brought_by is Kind.GATHER:
        resident = updated_windows(visits, 1, update.is_deferred)
    elif update.brought_by is Kind.REFRESH:
        refreshed = updated_windows(visits, spec.resident_chunks, update.is_deferred)
    return map(Window, refreshed, resident)


def started_of(spec: ProgramSpec, segments: Segments) -> Window:
    """Returns what the previous step has started."""
    started = after_step(spec, segments)
    refreshed, resident = (
        [action.chunk for action in started if action.kind is kind] for kind in (Kind.REFRESH, Kind.GATHER)
    )
    return Window(refreshed, resident)


def after_step(spec: ProgramSpec, segments: Segments) -> list[Action]:
    """Returns the collectives that follow STEP, in the order in which the next step needs them."""
    updates = {chunk: spec.chunk_updates[chunk] for segment in segments for chunk in chunk_visits(computes_of(segment))}
    return [
        Action(kind, chunk)
        for chunk, update in updates.items()
        for kind in (Kind.GATHER, Kind.REFRESH)
        if kind is update.brought_by and not update.is_deferred
    ]


def chunk_visits(computes: Iterable[Action]) -> list[int]:
    """Returns the chunks in the order of their visits. A visit is a run of computes on one chunk."""
    visits: list[int] = []
    for action in computes:
        if not visits or visits[-1] != action.chunk:
            visits.append(action.chunk)
    return visits


def updated_windows(visits: Sequence[int], further: int, defers_gathers: bool) -> list[list[int]]:
    """Returns, for each visit, the chunks whose updated weights must be under way when it begins, in order of need.

    Every chunk is gathered once: after the step, so that all are under way at the first visit, or deferred. Deferred
    gathers cover the chunk that computes and the ``further`` next ones.
    """
    if not defers_gathers:
        everything = list(dict.fromkeys(visits))
        return [everything for _ in visits]
    gathered: list[int] = []
    windows = []
    for upcoming in next_distinct(visits, 1 + further):
        gathered.extend(chunk for chunk in upcoming if chunk not in gathered)
        windows.append(list(gathered))
    return windows


def next_distinct(visits: Sequence[int], count: int) -> list[list[int]]:
    """Returns, for each visit, the first ``count`` different chunks from there on; fewer if there are no more.

    At stage 3 these are the resident chunks. With two or more, a gather overlaps the compute of the chunk before it,
    and the turn drops no chunk that is still needed. With N chunks on the rank, the layered order in K groups takes
    K(2N - 2B) + B gathers for B < N resident chunks, else N.
    """
    windows: list[list[int]] = []
    upcoming: list[int] = []
    for chunk in reversed(visits):
        upcoming = [chunk, *(other for other in upcoming if other != chunk)][:count]
        windows.append(upcoming)
    return windows[::-1]


WAITING = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.GATHER, Kind.REFRESH, Kind.REDUCE, Kind.STEP})
"""The kinds of actions that may have to wait, or that others wait for."""


class Waits:
    """Tracks the collectives of a pipeline rank that nothing has awaited yet, action by action.

    - A compute waits for the gather of its chunk.
    - The first backward of a chunk waits for the chunk's own reduction if that is under way.
    - The first backward of a chunk also waits for reductions while ``resident_chunks`` full gradients are held (stages
      1 to 3).
    - STEP waits for all reductions.

    So reductions are awaited as late as possible. They end in the order they began, and waits follow that order.

    With hierarchical shards, a gather inside a node waits for the refresh of its chunk. A reduction inside a node runs
    after one compute. Then its wait follows, and COMBINE, which goes on between nodes. At most ``resident_chunks``
    are under way; the oldest one is awaited before another begins, when the next reduction of its chunk approaches, or
    at STEP.

    With offloading, too, the wait for a reduction follows one compute, because the gradient leaves for the host then;
    with a single data-parallel rank it follows the reduction.

    Every chunk counts as one full gradient, whatever parameters it has. A tied module is reduced with the last chunk
    that uses it; the partition itself waits if another chunk's backward accumulates into the module before that.

    Args:
        started: what the previous step has launched: gathers or refreshes.
    """

    def __init__(self, spec: ProgramSpec, started: Iterable[Action]) -> None:
        self._most_held = spec.resident_chunks if spec.zero_stage >= 1 else None
        self._combines = spec.hierarchy is not None
        self._goes_on_early = self._combines or spec.offload is not None
        """Whether a reduction is awaited after one compute, because something follows it."""
        self._under_way = set(started)
        """Gathers and refreshes."""
        self._accumulating: set[int] = set()
        """Chunks whose gradient is not final yet."""
        self._reducing: list[int] = []
        """Oldest first."""
        self._covered = 0
        """How many reductions, the oldest ones, a compute runs beside."""
        self._combining: list[int] = []
        """Oldest first."""

    def before(self, action: Action) -> list[Action]:
        """Returns the waits to place before ``action``, the next one of the program of a kind in :data:`WAITING`."""
        kind, chunk, *_ = action
        waits: list[Action] = []
        if kind in COMPUTE:
            if self._under_way:
                waits.extend(self._wait_for(Kind.WAIT_GATHER, Action(Kind.GATHER, chunk)))
            if self._goes_on_early:
                waits.extend(self.go_on(self._covered))
        if kind is Kind.BACKWARD and chunk not in self._accumulating:
            while chunk in self._reducing or self._is_full():
                waits.extend(self.go_on())
            while chunk in self._combining:
                waits.extend(self._combined())
            self._accumulating.add(chunk)
        elif kind is Kind.GATHER:
            waits.extend(self._wait_for(Kind.WAIT_REFRESH, Action(Kind.REFRESH, chunk)))
            self._under_way.add(action)
        elif kind is Kind.REFRESH:
            self._under_way.add(action)
        elif kind is Kind.REDUCE:
            self._accumulating.discard(chunk)
            self._reducing.append(chunk)
        elif kind is Kind.STEP:
            waits.extend(self.go_on(len(self._reducing)))
            while self._combining:
                waits.extend(self._combined())
        if kind in COMPUTE:
            self._covered = len(self._reducing)
        return waits

    def _wait_for(self, kind: Kind, collective: Action) -> list[Action]:
        """Returns the wait for ``collective`` if that is under way."""
        if collective not in self._under_way:
            return []
        self._under_way.discard(collective)
        return [Action(kind, collective.chunk)]

    def _is_full(self) -> bool:
        if self._most_held is None or not self._reducing:
            return False
        return len(self._accumulating) + len(self._reducing) >= self._most_held

    def go_on(self, reductions: int = 1) -> list[Action]:
        """Returns the waits for the oldest ``reductions``, and what goes on between nodes."""
        waits: list[Action] = []
        for chunk in self._reducing[:reductions]:
            waits.append(Action(Kind.WAIT_REDUCE, chunk))
            if self._combines:
                if len(self._combining) == self._most_held:
                    waits.extend(self._combined())
                waits.append(Action(Kind.COMBINE, chunk))
                self._combining.append(chunk)
        del self._reducing[:reductions]
        return waits

    def _combined(self) -> list[Action]:
        chunk = self._combining.pop(0)
        return [Action(Kind.WAIT_COMBINE, chunk)]


Pass = Callable[[ProgramSpec, int, Segments], Segments]
"""Adds actions to those of one pipeline rank."""
PASSES = (
    mark_recomputed,
    add_residency,
    add_postponed_updates,
    add_receives,
    add_sends,
    add_second_parts,
    add_reductions,
    add_step,
    add_waits,
    add_stored_weights,
    add_final_updates,
    add_loads,
    add_stores,
    add_stored_inputs,
    add_starts,
)
"""In the order they apply. All schedules share them."""
_TIMED_PASSES = tuple(add for add in PASSES if add not in (add_receives, add_sends))


def build_program(spec: ProgramSpec) -> Program:
    """Builds the programs of all pipeline ranks."""
    return [build_rank_program(spec, rank) for rank in range(spec.pipeline_ranks)]


def build_timed_program(spec: ProgramSpec) -> Program:
    """Builds the programs of all pipeline ranks without SEND and RECV, for the clock alone: ``simulate(...,
    sends_at_once=True)``.

    On the clock posts take no time, and each SEND directly follows its compute. So the times equal those of
    :func:`build_program`, with less work.
    """
    return [build_rank_program(spec, rank, _TIMED_PASSES) for rank in range(spec.pipeline_ranks)]


def build_rank_program(spec: ProgramSpec, rank: int, passes: Iterable[Pass] = PASSES) -> list[Action]:
    """Builds the program of one pipeline rank: applies every pass to its compute order."""
    segments = spec.segments(rank)
    for add in passes:
        segments = add(spec, rank, segments)
    return joined(segments)


def collectives_agree(replicas: Iterable[ProgramSpec]) -> bool:
    """Whether data-parallel ranks with these programs gather and reduce the same chunks in the same order. They have
    the same placement, but may have different numbers of micro-batches."""
    first, *others = set(replicas)
    return all(_collectives(other) == _collectives(first) for other in others)


def _collectives(spec: ProgramSpec) -> Program:
    """Returns the gathers and reductions of every pipeline rank. Waits do not change their order, but decide when the
    collectives between nodes run."""
    passes: tuple[Pass, ...] = (add_residency, add_second_parts, add_reductions)
    if spec.hierarchy is not None:
        passes += (add_step, add_waits)
    program = (build_rank_program(spec, rank, passes) for rank in range(spec.pipeline_ranks))
    return [[action for action in actions if action.kind in COLLECTIVES] for actions in program]
