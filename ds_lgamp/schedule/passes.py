"""Lowering passes. Each takes the actions of a pipeline rank and returns them with new actions added."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ds_lgamp.schedule.actions import COMPUTE, Action, Kind, send_of
from ds_lgamp.schedule.orders import pieces_of
from ds_lgamp.schedule.receives import receive_posts
from ds_lgamp.schedule.residency import chunk_visits, next_distinct, updated_windows
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.waits import Waits


class Window(NamedTuple):
    """What must have started when a visit begins: chunks in the order of need."""

    refreshed: list[int]
    """Chunks whose REFRESH has started."""
    resident: list[int]
    """Chunks whose GATHER has started, and that are not released."""


def mark_recomputed(spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> list[Action]:
    """Marks the forwards and backwards of chunks that are recomputed."""
    own = {action.chunk for action in actions if action.kind in COMPUTE}
    recomputed = {chunk for chunk in own if spec.is_recomputed(chunk)}
    return [action._replace(recomputed=action.kind in COMPUTE and action.chunk in recomputed) for action in actions]


def add_residency(spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> list[Action]:
    """Adds RELEASE, REFRESH and GATHER before each visit of a chunk. Stage 3 ends by releasing every resident chunk. So
    does each piece that ends with RETURN, because the script may evaluate then."""
    windows = windows_of(spec, actions)
    refreshed, resident = started_of(spec, actions)
    lowered: list[Action] = []
    visited = None
    for action in actions:
        if action.kind is Kind.RETURN:
            visited = None
            if spec.zero_stage == 3:
                lowered.extend(Action(Kind.RELEASE, chunk) for chunk in sorted(resident))
                resident = []
        elif action.chunk != visited:
            visited = action.chunk
            window = next(windows)
            lowered.extend(Action(Kind.RELEASE, chunk) for chunk in sorted(set(resident) - set(window.resident)))
            lowered.extend(Action(Kind.REFRESH, chunk) for chunk in window.refreshed if chunk not in refreshed)
            lowered.extend(Action(Kind.GATHER, chunk) for chunk in window.resident if chunk not in resident)
            refreshed, resident = window
        lowered.append(action)
    if spec.zero_stage == 3:
        lowered.extend(Action(Kind.RELEASE, chunk) for chunk in sorted(resident))
    return lowered


def add_receives(spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> list[Action]:
    """Adds each RECV, ahead of the compute that consumes the message or when the message arrives."""
    posts = iter(receive_posts(spec, rank, _computes(actions)))
    lowered: list[Action] = []
    for action in actions:
        if action.kind in COMPUTE:
            lowered.extend(next(posts))
        lowered.append(action)
    return lowered


def add_sends(spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> list[Action]:
    """Adds SEND directly after each compute whose result another rank consumes."""
    lowered: list[Action] = []
    for action in actions:
        lowered.append(action)
        if action.kind in COMPUTE and spec.sends_output(action):
            lowered.append(send_of(action))
    return lowered


def add_reductions(spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> list[Action]:
    """Adds REDUCE once a chunk's gradient is final, after the SEND of the last backward."""
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
    return lowered


def add_step(spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> list[Action]:
    """Ends a training program with STEP and what brings its update to other ranks, unless that is deferred."""
    if spec.forward_only:
        return list(actions)
    return [*actions, Action(Kind.STEP), *behind_step(spec, actions)]


def add_waits(spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> list[Action]:
    """Adds the waits for collectives, as late as possible, and COMBINE behind the wait for a reduction inside nodes."""
    waits = Waits(spec, behind_step(spec, actions))
    lowered: list[Action] = []
    for action in actions:
        lowered.extend(waits.before(action))
        lowered.append(action)
    return lowered


def windows_of(spec: ProgramSpec, actions: Iterable[Action]) -> Iterator[Window]:
    """Returns what must have started at each visit, in the order of the visits.

    Deferred collectives cover one visit more than those that need them: at stages 1 and 2 the compute, at stage 3 the
    gathers inside a node.
    """
    pieces = [chunk_visits(_computes(piece)) for piece in pieces_of(actions)]
    visits = [chunk for piece in pieces for chunk in piece]
    nothing: list[list[int]] = [[] for _ in visits]
    refreshed = resident = nothing
    if spec.zero_stage == 3:
        resident = [window for piece in pieces for window in next_distinct(piece, spec.resident_chunks)]
    update = spec.update_of(visits[0])  # All travel alike.
    if update.brought_by is Kind.GATHER:
        resident = updated_windows(visits, 1, update.is_deferred)
    elif update.brought_by is Kind.REFRESH:
        refreshed = updated_windows(visits, spec.resident_chunks, update.is_deferred)
    return map(Window, refreshed, resident)


def started_of(spec: ProgramSpec, actions: Iterable[Action]) -> Window:
    """Returns what the previous step has started."""
    started = behind_step(spec, actions)
    refreshed, resident = (
        [action.chunk for action in started if action.kind is kind] for kind in (Kind.REFRESH, Kind.GATHER)
    )
    return Window(refreshed, resident)


def behind_step(spec: ProgramSpec, actions: Iterable[Action]) -> list[Action]:
    """Returns the collectives that stand behind STEP, in the order in which the next step needs them."""
    updates = {chunk: spec.update_of(chunk) for chunk in chunk_visits(_computes(actions))}
    return [
        Action(update.brought_by, chunk)
        for chunk, update in updates.items()
        if update.brought_by is not None and not update.is_deferred
    ]


def _computes(actions: Iterable[Action]) -> list[Action]:
    return [action for action in actions if action.kind in COMPUTE]
