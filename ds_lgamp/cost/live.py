"""Predicts what live states take in their folder, and what a step writes there.

A state of a rank holds master weights and optimizer state of its part of every unit that trains, and the weights of
frozen units. Ranks that hold the same part share it. A step writes what trains. Frozen units are written once per slot.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ds_lgamp.cost.state import ElementBytes, UnitSize
from ds_lgamp.schedule.hierarchy import Hierarchy


def slots_of(updates: str) -> int:
    """Returns how many states a rank's folder has at most, for ``updates`` of :class:`ProgramSpec`. The checkpoint's
    ``live.py`` has the reason."""
    return 3 if updates == "reduction" else 2


class LiveUse(NamedTuple):
    """Bytes of one rank, at most; None if the optimizer's state is unknown."""

    held: int | None
    """In the folder."""
    written: int | None
    """In a step."""


def live_use(
    units: Sequence[UnitSize],
    zero_stage: int,
    data_ranks: int,
    size: ElementBytes,
    hierarchy: Hierarchy | None,
    updates: str,
) -> LiveUse:
    """Returns what live states take, without buffers and random states."""
    if size.optimizer is None:
        return LiveUse(None, None)
    written = frozen = 0
    for unit in units:
        copies = data_ranks // unit.parts(zero_stage, data_ranks, hierarchy)
        own = unit.part(zero_stage, data_ranks, hierarchy) // copies
        if unit.frozen:
            frozen += size.weights * own
        else:
            written += (size.master + size.optimizer) * own
    return LiveUse(slots_of(updates) * (written + frozen), written)
