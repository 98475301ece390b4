"""Stores the inputs of chunks, from which backward passes recompute, on the host.

An input leaves for the host behind its forward and comes back one compute ahead of its backward, but not ahead of the
script's turn. One of them leaves at a time. An input that is needed soon stays on the device, as all do of a last chunk
that turns at once, which is not recomputed. Inputs of chunk 0 stay where the user's batch has them.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from ds_lgamp.schedule.actions import COMPUTE, OF_INPUTS, SENDS, Action, Kind

NEAREST = 3
"""How many computes a backward must be behind its forward for the input to leave: one covers the way to the host,
another the way back. The script's turn in between is enough."""


def without_stored_inputs(actions: Sequence[Action]) -> list[Action]:
    """Returns what remains of a program if inputs stay on the device."""
    return [action for action in actions if action.kind not in OF_INPUTS]


def add_stored_inputs(actions: Sequence[Action]) -> list[Action]:
    """Adds STORE_A behind forwards, LOAD_A one compute ahead of their backwards, and the waits for both."""
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


def fault_of(actions: Sequence[Action]) -> tuple[int, str] | None:
    """Returns the row of the first fault in what storing inputs adds to a program, and the fault; None if it is
    sound."""
    forwards: set[tuple[int, int]] = set()
    under_way: set[Action] = set()
    away: set[tuple[int, int]] = set()
    for row, action in enumerate(actions):
        kind, chunk, micro_batch = action
        place = chunk, micro_batch
        if kind is Kind.FORWARD:
            forwards.add(place)
        elif kind is Kind.BACKWARD and (place in away or Action(Kind.STORE_INPUT, *place) in under_way):
            return (
                row,
                f"{action} needs an input that is not on the device; WAIT_LOAD_A{chunk}.{micro_batch} comes first",
            )
        elif kind is Kind.STORE_INPUT:
            if place not in forwards or chunk == 0:
                return row, f"{action} stores an input that is not there or that no backward recomputes from"
            if any(other.kind is kind for other in under_way):
                return row, f"{action} begins before the store ahead of it has ended"
            under_way.add(action)
        elif kind is Kind.LOAD_INPUT:
            if place not in away or action in under_way:
                return row, f"{action} loads an input that is not on the host, or is under way already"
            under_way.add(action)
        elif kind in (Kind.WAIT_STORE_INPUT, Kind.WAIT_LOAD_INPUT):
            waited = Action(Kind.STORE_INPUT if kind is Kind.WAIT_STORE_INPUT else Kind.LOAD_INPUT, *place)
            if waited not in under_way:
                return row, f"{action} waits for a transfer that is not under way"
            under_way.discard(waited)
            (away.add if kind is Kind.WAIT_STORE_INPUT else away.discard)(place)
    if under_way:
        return len(actions) - 1, f"nothing waits for {min(map(str, under_way))}"
    return None


def _leaving(order: Sequence[Action]) -> set[Action]:
    """Returns the forwards whose inputs leave, and their backwards."""
    forwards: dict[tuple[int, int], tuple[int, Action]] = {}
    leaving: set[Action] = set()
    place = 0
    for action in order:
        place += NEAREST if action.kind is Kind.RETURN else 1
        if action.kind is Kind.RETURN or action.chunk == 0:
            continue
        if action.kind is Kind.FORWARD:
            forwards[action[1:]] = place, action
            continue
        since, forward = forwards[action[1:]]
        if place - since >= NEAREST:
            leaving |= {forward, action}
    return leaving


def _of(kind: Kind, compute: Action | None) -> list[Action]:
    return [] if compute is None else [Action(kind, compute.chunk, compute.micro_batch)]
