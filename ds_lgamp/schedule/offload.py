"""Offloading: what lies in the memory of the host while the device does not need it, and when it travels.

The host holds the optimizer's state and master weights, and updates them. Every chunk's gradient is stored once per
step, and its weights are loaded once after every update. If the host holds the parameters too, each gather of a chunk
takes a load of its own.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ds_lgamp.schedule.actions import COMPUTE, RECEIVES, Action, Kind
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
