"""Lowering passes. Each takes the segments of a pipeline rank and returns them with new actions."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ds_lgamp.schedule.actions import COMPUTE, Action, Kind, Segments, send_of
from ds_lgamp.schedule.receives import receive_posts
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.waits import WAITING, Waits


class Window(NamedTuple):
    """What must have started when a visit begins: chunks in the order of need."""

    refreshed: list[int]
    """Chunks whose REFRESH has started."""
    resident: list[int]
    """Chunks whose GATHER has started, and that are not released."""


def each_action(segments: Segments, lower: Callable[[Action], Iterable[Action]]) -> Segments:
    """Returns the segments with what ``lower`` makes of each action, in the order of the program."""
    return [[lowered for action in segment for lowered in lower(action)] for segment in segments]


def mark_recomputed(spec: ProgramSpec, rank: int, segments: Segments) -> Segments:
    """Marks the forwards and backwards of chunks that are recomputed."""
    recomputed = {chunk for chunk in range(spec.chunks) if spec.is_recomputed(chunk)}
    return [
        [
            Action(kind, chunk, micro_batch, kind in COMPUTE and chunk in recomputed)
            for kind, chunk, micro_batch, _ in segment
        ]
        for segment in segments
    ]


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
    """Adds REDUCE once a chunk's gradient is final, after the SEND of the last backward."""
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
    """Adds the waits for collectives, as late as possible, and COMBINE after the wait for a reduction inside nodes."""
    waits = Waits(spec, after_step(spec, segments))
    lowered: Segments = []
    for segment in segments:
        lowered.append([])
        for action in segment:
            if action.kind in WAITING:
                lowered[-1].extend(waits.before(action))
            lowered[-1].append(action)
    return lowered


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


def computes_of(actions: Iterable[Action]) -> list[Action]:
    """Returns the forwards and backwards among ``actions``."""
    return [action for action in actions if action.kind in COMPUTE]


def chunk_visits(computes: Iterable[Action]) -> list[int]:
    """Returns the chunks in the order of their visits. A visit is a run of computes on one chunk."""
    visits: list[int] = []
    for action in computes:
        if not visits or visits[-1] != action.chunk:
            visits.append(action.chunk)
    return visits


def updated_windows(visits: Sequence[int], ahead: int, defers_gathers: bool) -> list[list[int]]:
    """Returns, for each visit, the chunks whose updated weights must be under way when it begins, in order of need.

    Every chunk is gathered once: behind the step, so that all are under way at the first visit, or deferred. Deferred
    gathers cover the chunk that computes and the ``ahead`` next ones.
    """
    if not defers_gathers:
        everything = list(dict.fromkeys(visits))
        return [everything for _ in visits]
    gathered: list[int] = []
    windows = []
    for upcoming in next_distinct(visits, 1 + ahead):
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
