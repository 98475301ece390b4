"""Lowering passes: each takes the actions of a pipeline rank and returns them with its own added."""

from collections.abc import Iterable, Iterator, Sequence

from ds_lgamp.schedule.actions import COMPUTE, Action, Kind, receive_of, send_of
from ds_lgamp.schedule.residency import chunk_visits, current_chunks, resident_windows
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.waits import Waits


def add_residency(spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> list[Action]:
    """Before each visit of a chunk, RELEASEs what the visit does not hold and GATHERs what it lacks; at stage 3, the
    end RELEASEs the rest."""
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
    """Posts receives ahead of the computes that consume them."""
    posts = iter(receive_posts(spec, rank, _computes(actions)))
    lowered: list[Action] = []
    for action in actions:
        if action.kind in COMPUTE:
            lowered.extend(next(posts))
        lowered.append(action)
    return lowered


def add_sends(spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> list[Action]:
    """Sends each result that another rank consumes, right behind its compute."""
    lowered: list[Action] = []
    for action in actions:
        lowered.append(action)
        if action.kind in COMPUTE and spec.sends_output(action):
            lowered.append(send_of(action))
    return lowered


def add_reductions(spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> list[Action]:
    """REDUCEs a chunk's gradient once it is final, behind the SEND of its last backward."""
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
    """Ends a training program with STEP, and with the gathers that stages 1 and 2 do not defer."""
    if spec.forward_only:
        return list(actions)
    gathers = [Action(Kind.GATHER, chunk) for chunk in current_of(spec, actions)]
    return [*actions, Action(Kind.STEP), *gathers]


def add_waits(spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> list[Action]:
    """Waits for gathers and reductions, as late as possible."""
    waits = Waits(spec, current_of(spec, actions))
    lowered: list[Action] = []
    for action in actions:
        lowered.extend(waits.before(action))
        lowered.append(action)
    return lowered


def windows_of(spec: ProgramSpec, actions: Iterable[Action]) -> Iterator[list[int]]:
    """The resident chunks of each visit of a rank, in the order of visits."""
    visits = chunk_visits(_computes(actions))
    return iter(resident_windows(visits, spec.zero_stage, spec.resident_chunks, spec.defers_gathers))


def current_of(spec: ProgramSpec, actions: Iterable[Action]) -> list[int]:
    """The chunks of a rank that the step before has begun to gather."""
    return current_chunks(chunk_visits(_computes(actions)), spec.zero_stage, spec.defers_gathers)


def receive_posts(spec: ProgramSpec, rank: int, computes: Sequence[Action]) -> list[list[Action]]:
    """For every compute action, the receives posted just before it, each kind in the order it is consumed. A receive is
    posted as many computes of its kind ahead of its consumer as its window is wide, and no earlier than the window has
    room. Forwards and backwards may alternate in between, but not more than that."""
    posts: list[list[Action]] = [[] for _ in computes]
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        alike = [index for index, action in enumerate(computes) if action.kind is kind]
        received = [order for order, index in enumerate(alike) if spec.receives_input(computes[index])]
        window = spec.receive_window(rank, kind)
        for position, order in enumerate(received):
            consumer, ahead = alike[order], order - (window - 1)
            early = alike[ahead] if ahead >= 0 else alike[0] + ahead
            room = alike[received[position - window]] + 1 if position >= window else 0
            posts[max(room, early, consumer - 2 * (window - 1))].append(receive_of(computes[consumer]))
    return posts


def _computes(actions: Iterable[Action]) -> list[Action]:
    return [action for action in actions if action.kind in COMPUTE]
