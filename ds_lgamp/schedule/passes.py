"""Lowering passes. Each takes the actions of a pipeline rank and returns them with new actions added."""

from collections.abc import Iterable, Iterator, Sequence

from ds_lgamp.schedule.actions import COMPUTE, Action, Kind, send_of
from ds_lgamp.schedule.receives import receive_posts
from ds_lgamp.schedule.residency import chunk_visits, current_chunks, resident_windows
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.waits import Waits


def add_residency(spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> list[Action]:
    """Adds GATHER and RELEASE before each visit of a chunk. Stage 3 ends by releasing every resident chunk."""
    windows = windows_of(spec, actions)
    resident = current_of(spec, actions)
    lowered: list[Action] = []
    visited = None
    for action in actions:
        if action.chunk != visited:
            visited = action.chunk
            window = next(windows)
            lowered.extend(Action(Kind.RELEASE, chunk) for chunk in sorted(set(resident) - set(window)))
            lowered.extend(Action(Kind.GATHER, chunk) for chunk in window if chunk not in resident)
            resident = window
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
    """Ends a training program with STEP and the gathers that stages 1 and 2 do not defer."""
    if spec.forward_only:
        return list(actions)
    gathers = [Action(Kind.GATHER, chunk) for chunk in current_of(spec, actions)]
    return [*actions, Action(Kind.STEP), *gathers]


def add_waits(spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> list[Action]:
    """Adds the waits for gathers and reductions, as late as possible."""
    waits = Waits(spec, current_of(spec, actions))
    lowered: list[Action] = []
    for action in actions:
        lowered.extend(waits.before(action))
        lowered.append(action)
    return lowered


def windows_of(spec: ProgramSpec, actions: Iterable[Action]) -> Iterator[list[int]]:
    """Returns the resident chunks of each visit, in the order of the visits."""
    visits = chunk_visits(_computes(actions))
    return iter(resident_windows(visits, spec.zero_stage, spec.resident_chunks, spec.defers_gathers))


def current_of(spec: ProgramSpec, actions: Iterable[Action]) -> list[int]:
    """Returns the chunks whose gathers the previous step has launched."""
    return current_chunks(chunk_visits(_computes(actions)), spec.zero_stage, spec.defers_gathers)


def _computes(actions: Iterable[Action]) -> list[Action]:
    return [action for action in actions if action.kind in COMPUTE]
