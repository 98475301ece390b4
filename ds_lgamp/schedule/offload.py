"""Offloading: what lies in the memory of the host while the device does not need it, and when it travels.

The host holds the optimizer's state and master weights, and updates them. Every chunk's gradient is stored once per
step, and its weights are loaded once after every update. If the host holds the parameters too, each gather of a chunk
takes a load of its own.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from ds_lgamp.schedule.actions import COMPUTE, OFFLOADING, RECEIVES, Action, Kind, awaited_by
from ds_lgamp.schedule.orders import pieces_of

DISK_BLOCK = 4096
"""The disk moves multiples of so many bytes."""
PIECE = 8 << 20
"""Bytes of a piece of a tensor that moves on its own."""
PIECES = 4
"""How many pieces move at once, and how many of each direction of the bus have a buffer."""
UPDATE_BUFFERS = 2
"""Units in memory: one that is updated, and one that is written and then read for the next update."""
_BEHIND_LOADS = RECEIVES | {Kind.WAIT_GATHER, Kind.WAIT_REDUCE}
"""What stands between the loads for the next visit and the first compute of this one."""


class Offload(NamedTuple):
    """What the host holds beside optimizer state and master weights."""

    parameters: bool = False
    """Whether it holds this rank's shards of the parameters (stage 3). Each gather then begins with a load."""
    on_device: tuple[int, ...] = ()
    """Chunks of which the host holds nothing (stage 3). STEP updates them on the device, and also what several chunks
    share, because copies on other ranks must be updated alike."""


def lowest_chunks(placement: Sequence[int], share: float) -> tuple[int, ...]:
    """Returns the lowest chunks of every rank that stay on the device if the host is to hold at least the ``share``,
    from 0 to 1, of each rank's chunks.

    A step begins with the lowest chunks. Their updates on the host would be the only ones that nothing hides.
    """
    own = [[chunk for chunk, rank in enumerate(placement) if rank == each] for each in range(max(placement) + 1)]
    return tuple(sorted(chunk for chunks in own for chunk in chunks[: len(chunks) - math.ceil(share * len(chunks))]))


def without_transfers(actions: Iterable[Action]) -> list[Action]:
    """Returns what remains of a program with offloading if everything stays on the device and STEP updates it."""
    return [action for action in actions if action.kind not in OFFLOADING]


def add_loads(offload: Offload, actions: Sequence[Action]) -> list[Action]:
    """Adds LOAD during the visit before the GATHER that needs it, so that the copy runs beside compute, and WAIT_LOAD
    directly ahead of that GATHER. The loads for the first visit of each piece stand ahead of all else, the others ahead
    of what their visit waits for. A LOAD begins when the update of its chunk is over, without a wait of the program.
    """
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


def add_stores(offload: Offload, updates: str, end_of_reduction: Kind, actions: Sequence[Action]) -> list[Action]:
    """Adds STORE behind the end of the last reduction of each chunk that the host updates. One STORE is under way at a
    time; its WAIT_STORE stands ahead of the next one, or of STEP. UPDATE follows that wait, or STEP if that decides
    whether and how to update."""
    last = {action.chunk: row for row, action in enumerate(actions) if action.kind is end_of_reduction}
    lowered: list[Action] = []
    stored: int | None = None

    def finish() -> list[Action]:
        if stored is None:
            return []
        update = [Action(Kind.UPDATE, stored)] if updates == "reduction" else []
        return [Action(Kind.WAIT_STORE, stored), *update]

    for row, action in enumerate(actions):
        if action.kind is Kind.STEP:
            lowered.extend(finish())
        lowered.append(action)
        if last.get(action.chunk) == row and action.chunk not in offload.on_device:
            lowered.extend(finish())
            stored = action.chunk
            lowered.append(Action(Kind.STORE, stored))
        if action.kind is Kind.STEP and updates == "next_step":
            visits = dict.fromkeys(each.chunk for each in actions if each.kind in COMPUTE)
            stores = last.keys() - set(offload.on_device)
            lowered.extend(Action(Kind.UPDATE, chunk) for chunk in visits if chunk in stores)
    return lowered


def fault_of(offload: Offload, actions: Sequence[Action]) -> tuple[int, str] | None:
    """Returns the row of the first fault in what offloading adds to a program, and the fault; None if it is sound.

    It knows the rules, and not where the passes place actions; :func:`misplaced` does.
    """
    check = _Check(offload, actions)
    for row, action in enumerate(actions):
        fault = check.follow(action)
        if fault is not None:
            return row, fault
    if check.under_way:
        return len(actions) - 1, f"nothing waits for {min(map(str, check.under_way))}"
    missing = check.stores_of - check.updated
    if missing:
        return len(actions) - 1, f"chunks {sorted(missing)} are not updated"
    return None


def misplaced(actions: Sequence[Action], expected: Sequence[Action]) -> tuple[int, str] | None:
    """Returns the first row where a sound program differs from the ``expected`` one, and the fault; None if nowhere."""
    for row, (found, right) in enumerate(zip_longest(actions, expected)):
        if found != right:
            return row, f"found {found or 'the end'} where {right or 'the end'} belongs"
    return None


class _Check:
    """Follows a program action by action."""

    def __init__(self, offload: Offload, actions: Sequence[Action]) -> None:
        self.offload = offload
        self.reductions = Counter(action.chunk for action in actions if action.kind is Kind.REDUCE)
        """How many of each chunk make its gradient."""
        self.stores_of = self.reductions.keys() - set(offload.on_device)
        """The chunks whose gradients the host needs."""
        self.under_way: set[Action] = set()
        """Transfers that nothing has awaited."""
        self.loaded: set[int] = set()
        """Chunks whose weights on the device are current."""
        self.reduced: Counter[int] = Counter()
        self.stored: set[int] = set()
        self.updated: set[int] = set()
        self.times: Counter[Action] = Counter()

    def follow(self, action: Action) -> str | None:
        """Returns what is wrong with ``action``; None if nothing is."""
        kind, chunk, _ = action
        self.times[action] += 1
        if kind in (Kind.WAIT_LOAD, Kind.WAIT_STORE):
            if awaited_by(action) not in self.under_way:
                return f"{action} waits for a transfer that is not under way"
            self.under_way.discard(awaited_by(action))
            (self.loaded if kind is Kind.WAIT_LOAD else self.stored).add(chunk)
        elif kind is Kind.LOAD:
            return self._load(action)
        elif kind is Kind.GATHER:
            if chunk not in self.loaded and chunk not in self.offload.on_device:
                return f"{action} needs weights that are on the host; WAIT_LOAD{chunk} comes first"
            if self.offload.parameters:
                self.loaded.discard(chunk)
        elif kind is Kind.WAIT_REDUCE:
            self.reduced[chunk] += 1
        elif kind is Kind.STORE:
            return self._store(action)
        elif kind is Kind.STEP:
            if missing := sorted(self.stores_of - self.stored):
                return f"{action} needs gradients on the host, but those of chunks {missing} are not"
        elif kind is Kind.UPDATE:
            if chunk not in self.stored or self.times[action] > 1:
                return f"{action} needs a gradient that is not on the host, or has used it already"
            self.updated.add(chunk)
        return None

    def _load(self, load: Action) -> str | None:
        if load in self.under_way or load.chunk in (*self.loaded, *self.offload.on_device):
            return f"{load} copies weights that the device has, or soon has"
        if load.chunk in self.updated:
            return f"{load} follows the update of the next step"
        self.under_way.add(load)
        return None

    def _store(self, store: Action) -> str | None:
        if store.chunk in self.offload.on_device:
            return f"{store} copies a gradient that the device needs"
        if self.reduced[store.chunk] < self.reductions[store.chunk] or self.times[store] > 1:
            return f"{store} copies a gradient that is not final, or is stored already"
        if any(other.kind is Kind.STORE for other in self.under_way):
            return f"{store} begins before the store ahead of it has ended"
        self.under_way.add(store)
        return None


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
