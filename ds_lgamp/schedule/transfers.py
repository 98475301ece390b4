"""Passes that add copies between device and host: the weights of offloaded chunks, and the inputs from which backward
passes recompute.

The weights of a chunk are loaded once after every update. If the host holds the parameters too, each gather of a chunk
takes a load of its own.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from ds_lgamp.schedule.actions import COMPUTE, RECEIVES, SENDS, Action, Kind
from ds_lgamp.schedule.offload import Offload
from ds_lgamp.schedule.orders import pieces_of
from ds_lgamp.schedule.spec import NEAREST, ProgramSpec

_BEHIND_LOADS = RECEIVES | {Kind.WAIT_GATHER, Kind.WAIT_REDUCE}
"""What runs between the loads for the next visit and the first compute of this one."""


def add_loads(spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> list[Action]:
    """Adds LOAD during the visit before the GATHER that needs it, so that the copy runs beside compute, and WAIT_LOAD
    directly before that GATHER. The loads for the first visit of each piece come before all else, the others before
    what their visit waits for. A LOAD begins when the update of its chunk is over, without a wait of the program.
    """
    offload = spec.offload
    if offload is None:
        return list(actions)
    known = set(offload.on_device)
    lowered: list[Action] = []
    for piece in pieces_of(actions):
        lowered.extend(_with_loads(offload, piece, known))
    return lowered


def _with_loads(offload: Offload, actions: Sequence[Action], known: set[int]) -> list[Action]:
    """Returns a piece with its loads. Adds to ``known`` the chunks that the device has from then on."""
    gathers = _gathers_by_visit(actions)
    loads = [[chunk for chunk in visit if chunk in new] for visit, new in zip(gathers, _new(gathers, offload, known))]
    lowered = [Action(Kind.LOAD, chunk) for chunk in loads[0]] if loads else []
    visited, visit = None, -1
    for action in actions:
        if action.kind is Kind.GATHER and action.chunk in loads[visit + 1]:
            lowered.append(Action(Kind.WAIT_LOAD, action.chunk))
        elif action.kind in COMPUTE and action.chunk != visited:
            visited, visit = action.chunk, visit + 1
            row = len(lowered)
            while row > 0 and lowered[row - 1].kind in _BEHIND_LOADS:
                row -= 1
            following = loads[visit + 1] if visit + 1 < len(loads) else []
            lowered[row:row] = [Action(Kind.LOAD, chunk) for chunk in following]
        lowered.append(action)
    return lowered


def _gathers_by_visit(actions: Sequence[Action]) -> list[list[int]]:
    """Returns the chunks whose GATHER stands ahead of each visit."""
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


def add_stored_inputs(spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> list[Action]:
    """Adds STORE_A after forwards, LOAD_A one compute before their backwards, and the waits for both.

    An input comes back no earlier than the script's turn. One of them leaves at a time. An input that is needed soon
    stays on the device. Inputs of chunk 0 stay where the user's batch has them.
    """
    if not spec.stores_inputs or spec.forward_only:
        return list(actions)
    order = [action for action in actions if action.kind in COMPUTE or action.kind is Kind.RETURN]
    leaving = _leaving(order)
    loads: defaultdict[Action, list[Action]] = defaultdict(list)
    for before, action in pairwise(order):
        if action.kind is Kind.BACKWARD and action in leaving:
            loads[action if before.kind is Kind.RETURN else before].append(action)
    lowered: list[Action] = []
    computed: Action | None = None
    """A forward whose input leaves next."""
    stored: Action | None = None
    """A forward whose input is on its way to the host."""
    for action in actions:
        if computed is not None and action.kind not in SENDS:
            lowered.extend(_of(Kind.WAIT_STORE_INPUT, stored))
            lowered.extend(_of(Kind.STORE_INPUT, computed))
            computed, stored = None, computed
        if action in loads:
            lowered.extend(_of(Kind.WAIT_STORE_INPUT, stored))
            stored = None
            lowered.extend(load for backward in loads[action] for load in _of(Kind.LOAD_INPUT, backward))
        if action in leaving:
            if action.kind is Kind.FORWARD:
                computed = action
            else:
                lowered.extend(_of(Kind.WAIT_LOAD_INPUT, action))
        lowered.append(action)
    return lowered


def _leaving(order: Sequence[Action]) -> set[Action]:
    """Returns the forwards whose inputs leave, and their backwards."""
    forwards: dict[tuple[int, int], tuple[int, Action]] = {}
    leaving: set[Action] = set()
    place = 0
    for action in order:
        place += NEAREST if action.kind is Kind.RETURN else 1
        if action.chunk == 0 or not action.recomputed:
            continue
        if action.kind is Kind.FORWARD:
            forwards[action.chunk, action.micro_batch] = place, action
            continue
        since, forward = forwards[action.chunk, action.micro_batch]
        if place - since >= NEAREST:
            leaving |= {forward, action}
    return leaving


def _of(kind: Kind, compute: Action | None) -> list[Action]:
    return [] if compute is None else [Action(kind, compute.chunk, compute.micro_batch)]
