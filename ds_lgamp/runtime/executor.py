"""Executes a pipeline rank's program, action by action."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch.autograd import profiler

from ds_lgamp.runtime.batch import ActionError, BatchState
from ds_lgamp.runtime.graph import StoredInputs, drop_unfinished, on_this_thread
from ds_lgamp.runtime.passes import Passes
from ds_lgamp.runtime.trace import Trace
from ds_lgamp.schedule.actions import COMPUTE, STARTED, Action, Kind
from ds_lgamp.watch.this_rank import this_rank
from ds_lgamp.watch.whereabouts import Place


class Executor(Passes):
    """Executes the program of one pipeline rank: chunks compute, links carry, the partition gathers and reduces."""

    trace: Trace | None = None
    """Records steps; None if nobody has asked for it."""
    program: Sequence[Action] = ()
    """The actions of the current batch, which another thread reads: :mod:`ds_lgamp.watch.whereabouts`."""
    row = -1
    """The index of the last action that began; the length of the program once only sends are left."""

    @contextmanager
    def run_batch(self, batch: BatchState) -> Iterator[None]:
        """Executes the actions of ``batch`` inside the block. If the script has turns in between, each block goes on
        where the last one ended. Gradients are enabled inside it if the batch trains.

        Raises ActionError if an action fails. Its communication cannot be taken back, so every later batch on
        these links raises too. Where nothing is communicated, an evaluation raises what its layers raised.
        """
        self.refuse_after_failure()
        self.links.broken = True
        self._batch = batch
        self.links.begin(self.placement, batch.first_trained if batch.training else None)
        self.current, self.program, self.row = None, batch.program, batch.row
        this_rank.whereabouts.place = Place.BATCH
        # TorchScript saves other tensors once it has optimized a function, in its second call.
        recomputes = batch.recomputes or (batch.training and self.meter is not None)
        as_written = torch.jit.optimized_execution(False) if recomputes else nullcontext()
        try:
            turns = self.pairs.taking_turns() if batch.overlaps else nullcontext()
            with as_written, on_this_thread(), torch.set_grad_enabled(batch.training), turns:
                yield
            self.current, batch.row = None, self.row
            ended = self.row >= len(self.program) - 1
            if ended:
                self.row = len(self.program)
                with self._doing("send"):
                    self.links.drain()
                self.doing = ""
            self.links.broken = False
            if ended and batch.training and self.trace is not None:
                self.trace.end()
        except Exception as error:
            self.current = self.pairs.failed or self.current
            if self.trace is not None:
                self.trace.stop()
            if not batch.training and dist.get_world_size() == 1 and self.current is not None:
                self._release_all()
                raise
            batch.clear()
            drop_unfinished()
            if self._stored_inputs is not None:
                self._stored_inputs.clear()
            # contextlib would raise the StopIteration instead of the RuntimeError that it caused, and end a loop of the
            # script.
            cause = None if isinstance(error, StopIteration) else error
            raise batch.failure(self.rank, self.current, error) from cause

    def _release_all(self) -> None:
        """Ends a batch in which a compute has failed, as if the rest had been computed."""
        for action in self.program[self.row + 1 :]:
            if action.kind not in COMPUTE:
                self.execute(action)
        self.current, self.links.broken = None, False

    def refuse_after_failure(self) -> None:
        """Raises ActionError if a batch has failed. Between batches only."""
        if self.links.broken:
            raise ActionError("an earlier batch failed, and its communication cannot be undone; restart the run")

    @property
    def losses(self) -> list[torch.Tensor]:
        """Losses of the last batch by micro-batch, on the rank of the last chunk."""
        return self._batch.losses

    @property
    def recomputing(self) -> bool:
        """Whether a chunk is being computed for the second time."""
        return self.current is not None and self.current.kind is Kind.BACKWARD and self.current.recomputed

    def run(self, program: Iterable[Action]) -> None:
        for action in program:
            self.execute(action)

    def execute(self, action: Action) -> None:
        """Executes one action. While a profiler of torch records, the action is one of its ranges."""
        self.current = action
        self.row += 1
        self.doing = ""
        if profiler._is_profiler_enabled:
            with profiler.record_function(str(action)):
                _EXECUTE[action.kind](self, action)
        else:
            _EXECUTE[action.kind](self, action)

    def send_forward(self, action: Action) -> None:
        _, chunk, micro_batch, _, _ = action
        batch = self._batch
        with self._doing("send"):
            self.links.prepare(self.program, self.row)
            result = batch.results.pop((Kind.FORWARD, chunk, micro_batch))
            answered = batch.training and chunk >= batch.first_trained
            self.links.send_activations(chunk, micro_batch, result, answered)

    def send_backward(self, action: Action) -> None:
        with self._doing("send"):
            self.links.prepare(self.program, self.row)
            _, chunk, micro_batch, _, _ = action
            self.links.send_gradients(chunk, micro_batch, self._batch.results.pop((Kind.BACKWARD, chunk, micro_batch)))

    def update(self, action: Action) -> None:
        assert self._calls.update is not None, "programs with UPDATE come with an update"
        with self._doing("step"):
            self._calls.update(action.chunk)

    def store_input(self, action: Action) -> None:
        self._inputs_on_host.store(*action[1:3], self._batch.graphs[action[1:3]].beginning)

    def wait_store_input(self, action: Action) -> None:
        with self._doing("store"):
            self._inputs_on_host.wait_store(action.chunk, action.micro_batch)

    def wait_load_input(self, action: Action) -> None:
        with self._doing("load"):
            self._inputs_on_host.wait_load(action.chunk, action.micro_batch)

    @property
    def _inputs_on_host(self) -> StoredInputs:
        assert self._stored_inputs is not None, "programs with STORE_A come with stored inputs"
        return self._stored_inputs

    def return_outputs(self, action: Action) -> None:
        """Ends what belongs to a call, because the script may draw random numbers and evaluate now."""
        self.draws.leave()
        with self._doing("send"):
            self.links.drain()


def _of_partition(name: str, kind: str = "") -> Callable[[Executor, Action], None]:
    """Returns what calls the partition's method ``name`` for an action's chunk, and times it as ``kind``, if given."""

    def act(executor: Executor, action: Action) -> None:
        getattr(executor.partition, name)(action.chunk)

    def timed(executor: Executor, action: Action) -> None:
        with executor._doing(kind):
            getattr(executor.partition, name)(action.chunk)

    return timed if kind else act


_LAUNCHES = (
    *(Kind.GATHER, Kind.RELEASE, Kind.REDUCE, Kind.REFRESH, Kind.COMBINE),
    *(Kind.LOAD, Kind.STORE, Kind.STORE_WEIGHTS),
)
"""What the partition does by a method of the same name."""
_WAITS = {
    Kind.WAIT_GATHER: "gather",
    Kind.WAIT_REDUCE: "reduce",
    Kind.WAIT_REFRESH: "gather",
    Kind.WAIT_COMBINE: "reduce",
    Kind.WAIT_LOAD: "load",
    Kind.WAIT_STORE: "store",
    Kind.WAIT_STORE_WEIGHTS: "store",
}
"""What the partition waits for by a method of the same name, and how that is timed."""
_EXECUTE: dict[Kind, Callable[[Executor, Action], None]] = {
    **dict.fromkeys(STARTED, lambda executor, action: executor.pairs.start(action)),
    Kind.FORWARD: Executor.forward,
    Kind.BACKWARD: Executor.backward,
    Kind.WEIGHTS_BACKWARD: Executor.backward_of_weights,
    Kind.SEND_FORWARD: Executor.send_forward,
    Kind.RECV_FORWARD: lambda executor, action: executor.links.post_activations(*action[1:3]),
    Kind.SEND_BACKWARD: Executor.send_backward,
    Kind.RECV_BACKWARD: lambda executor, action: executor.links.post_gradients(*action[1:3]),
    **{kind: _of_partition(kind.name.lower()) for kind in _LAUNCHES},
    **{wait: _of_partition(wait.name.lower(), kind) for wait, kind in _WAITS.items()},
    # The partition knows what the host has a copy of.
    Kind.LOAD_WEIGHTS: _of_partition("gather"),
    Kind.WAIT_LOAD_WEIGHTS: _of_partition("wait_gather", "load"),
    Kind.STORE_INPUT: Executor.store_input,
    Kind.LOAD_INPUT: lambda executor, action: executor._inputs_on_host.load(*action[1:3]),
    Kind.WAIT_STORE_INPUT: Executor.wait_store_input,
    Kind.WAIT_LOAD_INPUT: Executor.wait_load_input,
    Kind.UPDATE: Executor.update,
    Kind.RETURN: Executor.return_outputs,
    Kind.STEP: lambda executor, action: executor._calls.step(),
}
"""Functions, because bound methods would form a reference cycle with the executor that only the garbage collector
frees."""
