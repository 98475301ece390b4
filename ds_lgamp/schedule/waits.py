"""Decides which collectives an action must wait for."""

from collections.abc import Iterable

from ds_lgamp.schedule.actions import COMPUTE, Action, Kind
from ds_lgamp.schedule.spec import ProgramSpec

WAITING = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.GATHER, Kind.REFRESH, Kind.REDUCE, Kind.STEP})
"""The kinds of actions that may have to wait, or that others wait for."""


class Waits:
    """Tracks the collectives of a pipeline rank that nothing has awaited yet, action by action.

    - A compute waits for the gather of its chunk.
    - The first backward of a chunk waits for the chunk's own reduction if that is under way.
    - The first backward of a chunk also waits for reductions while ``resident_chunks`` full gradients are held (stages
      1 to 3).
    - STEP waits for all reductions.

    So reductions are awaited as late as possible. They end in the order they began, and waits follow that order.

    With hierarchical shards, a gather inside a node waits for the refresh of its chunk. A reduction inside a node runs
    behind one compute. Then its wait follows, and COMBINE, which goes on between nodes. At most ``resident_chunks``
    are under way; the oldest one is awaited before another begins, when the next reduction of its chunk approaches, or
    at STEP.

    With offloading, too, the wait for a reduction follows one compute, because the gradient leaves for the host then.

    Every chunk counts as one full gradient, whatever parameters it has. A tied module is reduced with the last chunk
    that uses it; the partition itself waits if another chunk's backward accumulates into the module before that.

    Args:
        started: what the previous step has launched: gathers or refreshes.
    """

    def __init__(self, spec: ProgramSpec, started: Iterable[Action]) -> None:
        self._most_held = spec.resident_chunks if spec.zero_stage >= 1 else None
        self._combines = spec.hierarchy is not None
        self._goes_on_early = self._combines or spec.offload is not None
        """Whether a reduction is awaited behind one compute, because something follows it."""
        self._under_way = set(started)
        """Gathers and refreshes."""
        self._accumulating: set[int] = set()
        """Chunks whose gradient is not final yet."""
        self._reducing: list[int] = []
        """Oldest first."""
        self._covered = 0
        """How many reductions, the oldest ones, a compute runs beside."""
        self._combining: list[int] = []
        """Oldest first."""

    def before(self, action: Action) -> list[Action]:
        """Returns the waits to place before ``action``, the next one of the program of a kind in :data:`WAITING`."""
        kind, chunk, _, _ = action
        waits: list[Action] = []
        if kind in COMPUTE:
            if self._under_way:
                waits.extend(self._wait_for(Kind.WAIT_GATHER, Action(Kind.GATHER, chunk)))
            if self._goes_on_early:
                waits.extend(self._go_on(self._covered))
        if kind is Kind.BACKWARD and chunk not in self._accumulating:
            while chunk in self._reducing or self._is_full():
                waits.extend(self._go_on())
            while chunk in self._combining:
                waits.extend(self._combined())
            self._accumulating.add(chunk)
        elif kind is Kind.GATHER:
            waits.extend(self._wait_for(Kind.WAIT_REFRESH, Action(Kind.REFRESH, chunk)))
            self._under_way.add(action)
        elif kind is Kind.REFRESH:
            self._under_way.add(action)
        elif kind is Kind.REDUCE:
            self._accumulating.discard(chunk)
            self._reducing.append(chunk)
        elif kind is Kind.STEP:
            waits.extend(self._go_on(len(self._reducing)))
            while self._combining:
                waits.extend(self._combined())
        if kind in COMPUTE:
            self._covered = len(self._reducing)
        return waits

    def _wait_for(self, kind: Kind, collective: Action) -> list[Action]:
        """Returns the wait for ``collective`` if that is under way."""
        if collective not in self._under_way:
            return []
        self._under_way.discard(collective)
        return [Action(kind, collective.chunk)]

    def _is_full(self) -> bool:
        if self._most_held is None or not self._reducing:
            return False
        return len(self._accumulating) + len(self._reducing) >= self._most_held

    def _go_on(self, reductions: int = 1) -> list[Action]:
        """Returns the waits for the oldest ``reductions``, and what goes on between nodes."""
        waits: list[Action] = []
        for chunk in self._reducing[:reductions]:
            waits.append(Action(Kind.WAIT_REDUCE, chunk))
            if self._combines:
                if len(self._combining) == self._most_held:
                    waits.extend(self._combined())
                waits.append(Action(Kind.COMBINE, chunk))
                self._combining.append(chunk)
        del self._reducing[:reductions]
        return waits

    def _combined(self) -> list[Action]:
        chunk = self._combining.pop(0)
        return [Action(Kind.WAIT_COMBINE, chunk)]
