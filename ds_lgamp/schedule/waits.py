"""Which gathers and reductions an action must wait for: the one place that decides when ranks stand still."""

from ds_lgamp.schedule.actions import COMPUTE, Action, Kind
from ds_lgamp.schedule.spec import ProgramSpec


class Waits:
    """The gathers and reductions of a pipeline rank that nothing has awaited yet, followed action by action.

    A compute waits for the gather of its chunk. A reduction is awaited as late as possible: at STEP, or before the
    first backward of a chunk, if that chunk's own reduction is under way, or if ``resident_chunks`` full gradients are
    held already (stages 1 to 3). Reductions end in the order they began.

    Args:
        current: the chunks whose gathers the step before has launched.
    """

    def __init__(self, spec: ProgramSpec, current: list[int]) -> None:
        self._most_held = spec.resident_chunks if spec.zero_stage >= 1 else None
        self._gathering = set(current)
        self._accumulating: set[int] = set()
        """Chunks whose gradient is not final."""
        self._reducing: list[int] = []
        """Oldest first."""

    def before(self, action: Action) -> list[Action]:
        """The waits that stand before ``action``, the next one of the program."""
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
