"""Decides which gathers and reductions an action must wait for."""

from ds_lgamp.schedule.actions import COMPUTE, Action, Kind
from ds_lgamp.schedule.spec import ProgramSpec


class Waits:
    """Tracks the gathers and reductions of a pipeline rank that nothing has awaited yet, action by action.

    - A compute waits for the gather of its chunk.
    - The first backward of a chunk waits for the chunk's own reduction if that is under way.
    - The first backward of a chunk also waits for reductions while ``resident_chunks`` full gradients are held (stages
      1 to 3).
    - STEP waits for all reductions.

    So reductions are awaited as late as possible. They end in the order they began, and waits follow that order.

    Every chunk counts as one full gradient, whatever parameters it has. A tied module is reduced with the last chunk
    that uses it; the partition itself waits if another chunk's backward accumulates into the module before that.

    Args:
        current: the chunks whose gathers the previous step has launched.
    """

    def __init__(self, spec: ProgramSpec, current: list[int]) -> None:
        self._most_held = spec.resident_chunks if spec.zero_stage >= 1 else None
        self._gathering = set(current)
        self._accumulating: set[int] = set()
        """Chunks whose gradient is not final yet."""
        self._reducing: list[int] = []
        """Oldest first."""

    def before(self, action: Action) -> list[Action]:
        """Returns the waits to place before ``action``, the next action of the program."""
        kind, chunk, _ = action
        waits: list[Action] = []
        if kind in COMPUTE and chunk in self._gathering:
            self._gathering.discard(chunk)
            waits.append(Action(Kind.WAIT_GATHER, chunk))
        if kind is Kind.BACKWARD and chunk not in self._accumulating:
            while chunk in self._reducing or self._is_full():
                waits.append(self._oldest())
            self._accumulating.add(chunk)
        elif kind is Kind.GATHER:
            self._gathering.add(chunk)
        elif kind is Kind.REDUCE:
            self._accumulating.discard(chunk)
            self._reducing.append(chunk)
        elif kind is Kind.STEP:
            while self._reducing:
                waits.append(self._oldest())
        return waits

    def _is_full(self) -> bool:
        if self._most_held is None or not self._reducing:
            return False
        return len(self._accumulating) + len(self._reducing) >= self._most_held

    def _oldest(self) -> Action:
        return Action(Kind.WAIT_REDUCE, self._reducing.pop(0))
