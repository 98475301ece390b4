"""A batch for training whose program runs in pieces, between which the script has its turn."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from itertools import islice, takewhile

from ds_lgamp.integrations.split.call import Calls
from ds_lgamp.integrations.transformers.settings import whole_to_layers
from ds_lgamp.runtime.batch import BatchState
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.schedule.orders import chunks_of
from ds_lgamp.schedule.placement import Placement


class OpenBatch:
    """A batch that has begun.

    Args:
        state: that of the batch. Its program may change behind what has run.
        calls: those of the batch.
        kept: returns a context that keeps the random states of the script.
        measured: a context around the whole batch. A batch that fails never leaves it.
    """

    def __init__(
        self,
        executor: Executor,
        state: BatchState,
        calls: Calls,
        kept: Callable[[], AbstractContextManager[None]],
        measured: AbstractContextManager[None],
    ) -> None:
        self.state = state
        self._executor, self._calls, self._kept = executor, calls, kept
        self._measuring = ExitStack()
        self._measuring.enter_context(measured)

    def run_up_to(self, kind: Kind) -> None:
        """Executes the next actions, without the first one of ``kind``."""
        executor = self._executor
        last_compute = _last_compute(executor.placement, self.state.first_trained, executor.rank)
        with self._kept(), whole_to_layers(), executor.run_batch(self.state):
            for action in takewhile(lambda action: action.kind is not kind, self._rest()):
                executor.execute(action)
                if action[:2] == last_compute:
                    # Masks of long sequences are large.
                    self._calls.all[action.micro_batch].forget_blocks()

    def run_next(self) -> None:
        """Executes the next action."""
        with self._executor.run_batch(self.state):
            self._executor.execute(next(self._rest()))

    def run_to_the_end(self) -> None:
        """Executes all that is left."""
        with self._measuring, self._executor.run_batch(self.state):
            self._executor.run(self._rest())

    def _rest(self) -> Iterator[Action]:
        """Returns the actions of which none has run."""
        return islice(self.state.program, self.state.row + 1, None)


def _last_compute(placement: Placement, first_trained: int, rank: int) -> tuple[Kind, int]:
    """Returns with which compute, of which chunk, a rank is done with a micro-batch."""
    own = chunks_of(placement, rank)
    trained = [chunk for chunk in own if chunk >= first_trained]
    return (Kind.BACKWARD, trained[0]) if trained else (Kind.FORWARD, own[-1])
