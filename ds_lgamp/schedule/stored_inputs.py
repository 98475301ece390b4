"""Stores the inputs of chunks, from which backward passes recompute, on the host.

An input leaves for the host after its forward and comes back one compute before its backward, but not before the
script's turn. One of them leaves at a time. An input that is needed soon stays on the device. Inputs of chunk 0 stay
where the user's batch has them.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from ds_lgamp.schedule.actions import COMPUTE, SENDS, Action, Kind
from ds_lgamp.schedule.spec import NEAREST


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
