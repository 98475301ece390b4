"""Lowering passes. Each takes the actions of a pipeline rank and returns them with new actions added."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ds_lgamp.schedule import offload, stored_inputs
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


def add_postponed_updates(spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> list[Action]:
    """Adds each UPDATE that the step before left to this one, ahead of the first gather or forward of its chunk."""
    if spec.forward_only or spec.updates_on_device != "next_step":
        return list(actions)
    lowered: list[Action] = []
    updated: set[int] = set()
    for action in actions:
        if action.chunk >= spec.first_trained and action.chunk not in updated:
            updated.add(action.chunk)
            lowered.append(Action(Kind.UPDATE, action.chunk))
        lowered.append(action)
    return lowered


def add_loads(spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> list[Action]:
    """Adds LOAD and its waits, where the host holds what a GATHER needs."""
    return list(actions) if spec.offload is None else offload.add_loads(spec.offload, actions)


def add_stores(spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> list[Action]:
    """Adds STORE, its wait, and UPDATE, where the host updates the chunks."""
    if spec.offload is None or spec.forward_only:
        return list(actions)
    return offload.add_stores(spec.offload, spec.updates, spec.end_of_reduction, actions)


def add_stored_inputs(spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> list[Action]:
    """Adds STORE_A, LOAD_A and their waits, where the host holds the inputs of chunks."""
    if not spec.stores_inputs or spec.forward_only:
        return list(actions)
    return stored_inputs.add_stored_inputs(actions)


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


def add_final_updates(spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> list[Action]:
    """Adds each UPDATE that need not wait for STEP, behind the end of its chunk's last reduction."""
    if spec.forward_only or spec.updates_on_device != "reduction":
        return list(actions)
    last = {action.chunk: row for row, action in enumerate(actions) if action.kind is spec.end_of_reduction}
    lowered: list[Action] = []
    for row, action in enumerate(actions):
        lowered.append(action)
        if last.get(action.chunk) == row:
            lowered.append(Action(Kind.UPDATE, action.chunk))
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
    if spec.updated_by is Kind.GATHER:
        resident = updated_windows(visits, 1, spec.defers_gathers)
    elif spec.updated_by is Kind.REFRESH:
        refreshed = updated_windows(visits, spec.resident_chunks, spec.defers_gathers)
    return map(Window, refreshed, resident)


def started_of(spec: ProgramSpec, actions: Iterable[Action]) -> Window:
    """Returns what the previous step has started."""
    chunks = [action.chunk for action in behind_step(spec, actions)]
    return Window(chunks, []) if spec.updated_by is Kind.REFRESH else Window([], chunks)


def behind_step(spec: ProgramSpec, actions: Iterable[Action]) -> list[Action]:
    """Returns the collectives that stand behind STEP, in the order in which the next step needs them."""
    kind = spec.updated_by
    if kind is None or spec.defers_gathers:
        return []
    return [Action(kind, chunk) for chunk in dict.fromkeys(chunk_visits(_computes(actions)))]


def _computes(actions: Iterable[Action]) -> list[Action]:
    return [action for action in actions if action.kind in COMPUTE]
