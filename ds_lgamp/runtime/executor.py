"""Executes a pipeline rank's program, action by action."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import profiler

from ds_lgamp.runtime.batch import ANEW, ActionError, BatchState, Begun, Calls, Graph, Position, Storage
from ds_lgamp.runtime.chunk import (
    Chunk,
    Tensors,
    Turns,
    Watch,
    as_leaves,
    as_tuple,
    cloned,
    detached,
    detached_outputs,
    exchanges_seen,
    passed_on,
    tensors_in,
)
from ds_lgamp.runtime.clocks import Stopwatch, Timing
from ds_lgamp.runtime.compiled import has_compiled
from ds_lgamp.runtime.graph import (
    StoredInputs,
    backpropagate,
    begin_graph,
    checked_loss,
    drop_unfinished,
    end_graph,
    end_outputs,
    gradients_of,
    on_this_thread,
    own_loss,
)
from ds_lgamp.runtime.layer_state import Moment
from ds_lgamp.runtime.links import Links
from ds_lgamp.runtime.measure import ChunkMeter, NotedTensors
from ds_lgamp.runtime.recompute import Draws, RandomSource, SavedTensors
from ds_lgamp.runtime.split_backward import splitting
from ds_lgamp.runtime.trace import Trace
from ds_lgamp.schedule.actions import COMPUTE, STARTED, Action, Kind
from ds_lgamp.watch.this_rank import this_rank
from ds_lgamp.watch.whereabouts import Neighbours, Place


class Second(NamedTuple):
    """The second of two computes beside each other."""

    action: Action
    state: Moment | None
    """What its action gets."""
    turns: Turns


class Executor:
    """Executes the program of one pipeline rank: chunks compute, links carry, the partition gathers and reduces.

    Args:
        chunks: the chunks of this rank.
        links: connect this rank to those with neighbouring chunks.
        random_sources: generators whose states recomputation restores.
        timing: records where the time goes.
    """

    def __init__(
        self,
        position: Position,
        chunks: Mapping[int, Chunk],
        storage: Storage,
        links: Links,
        calls: Calls,
        random_sources: Sequence[RandomSource],
        timing: Timing | None = None,
    ) -> None:
        self.placement, self.rank, alike = position
        self.chunks, self.links = chunks, links
        self._marked = links.narrow is not None
        """Whether inputs say which of their tensors need gradients."""
        self.partition, self.owns, self._stored_inputs = storage
        self._calls = calls
        self.draws = Draws(random_sources)
        self.meter: ChunkMeter | None = None
        """Measures what micro-batches take on chunks; None if nobody asks."""
        self.compiled = False
        """Whether a rank with which layers exchange data has compiled anything. A recomputation that ends early leaves
        out the last exchange of a chunk, so these ranks recompute alike."""
        self.trace: Trace | None = None
        """Records steps; None if nobody has asked for it."""
        self.timing = Stopwatch(torch.device("cpu")) if timing is None else timing
        self.current: Action | None = None
        """The action that runs; None between actions."""
        self.program: Sequence[Action] = ()
        """The actions of the current batch. Another thread reads this and the next attributes
        (:mod:`ds_lgamp.watch.whereabouts`)."""
        self.row = -1
        """The index of the last action that began; the length of the program once only sends are left."""
        self.doing = ""
        """What the current action does, as it is timed."""
        self.neighbours = Neighbours(tuple(links.pipeline[owner] for owner in self.placement), alike)
        self.begun: set[bool] = set()
        """Which kinds of batches have run: True for training, False for evaluation."""
        self._batch: BatchState
        """The current batch; between batches, the last one."""
        self._started: Action | None = None
        """What the next compute begins beside itself."""
        self._second: Second | None = None
        """The second of two computes beside each other, once both have begun."""
        self._pairs = Counter[int]()
        """How many pairs of computes each chunk has begun."""
        self._last_chunk = len(self.placement) - 1

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
            turns = self._taking_turns() if batch.overlaps else nullcontext()
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

    def _doing(self, kind: str) -> AbstractContextManager[Any]:
        """Times the block as ``kind``, and says that this rank does that. Passes do both by themselves: a call less."""
        self.doing = kind
        return self.timing.time(kind)

    def start(self, action: Action) -> None:
        """Lets the next compute begin the one that ``action`` names beside itself."""
        self._started = action._replace(kind=STARTED[action.kind])

    def forward(self, action: Action) -> None:
        if self._second is not None:
            compute = self._take_second()[1]
        else:
            compute = partial(self._run_forward, self._begin(action))
            if self._started is not None:
                other = self._begin(self._started)
                compute = self._beside(other.inputs, None, partial(self._run_forward, other), compute)
        self.doing = "forward"
        with self.timing.time("forward"):
            compute()

    @contextmanager
    def _taking_turns(self) -> Iterator[None]:
        """Lets computes take turns inside the block. None is left at its end, whatever ends it."""
        try:
            with exchanges_seen():
                yield
        except BaseException as error:
            if self._second is not None:
                self._second.turns.abandon()
                if self._second.turns.has_raised(error):
                    self.current = self._second.action
            self._second = self._started = None
            raise

    def _beside(
        self, inputs: Any, state: Moment | None, second: Callable[[], None], first: Callable[[], None]
    ) -> Callable[[], None]:
        """Returns what computes ``first``, beside which the ``second`` compute runs where tokens travel, on ``inputs``.
        Its own action computes the rest of that, and gets ``state``."""
        started, self._started = self._started, None
        assert started is not None, "START precedes the first of two computes"
        chunk, before = started.chunk, self._pairs[started.chunk]
        self._pairs[chunk] += 1
        # Looking takes time, and layers hardly begin late to keep what they take away again.
        watch = Watch(self.chunks[chunk], chunk, self.draws.sources, closely=not before & (before + 1))
        self._second = Second(started, state, Turns(second, tensors_in(inputs), watch))
        return partial(self._second.turns.first, first)

    def _take_second(self) -> tuple[Moment | None, Callable[[], None]]:
        """Returns what the second of two computes gets, and what computes the rest of it."""
        assert self._second is not None, "the first one has begun it"
        (_, state, turns), self._second = self._second, None
        return state, turns.second

    def _begin(self, action: Action) -> Begun:
        """Takes the input of a forward, and what a recomputation of it needs."""
        _, chunk, micro_batch, recomputed = action
        batch = self._batch
        inputs: Any = None
        if chunk == 0 or (chunk == self._last_chunk and micro_batch not in batch.labels):
            inputs, labels = batch.load(micro_batch)
            if self.placement[self._last_chunk] == self.rank:
                batch.labels[micro_batch] = labels
        if chunk > 0 and self.placement[chunk - 1] == self.rank:
            inputs = batch.results.pop((Kind.FORWARD, chunk - 1, micro_batch))
        elif chunk > 0:
            with self._doing("activation"):
                inputs = self.links.take_activations(chunk, micro_batch)
        state: Moment | None = None
        beginning: Tensors = ()
        trains = batch.training and chunk >= batch.first_trained
        meter = self.meter if batch.training else None
        if meter is not None and not meter.is_outgrown(chunk, inputs):
            meter = None
        if meter is not None and trains:
            # Nobody knows yet what autograd would keep of it.
            recomputed, action = True, action._replace(recomputed=True)
        saved = (SavedTensors() if meter is None else NotedTensors()) if recomputed else None
        if saved is not None:
            self.draws.forward(chunk, micro_batch)
            state = self.chunks[chunk].state.read()
            beginning = inputs = as_leaves(inputs, self._marked) if chunk > 0 else inputs
        else:
            self.draws.leave()
            if trains and chunk > 0:
                # Layers may change their input in place. Only this chunk reads a received input. A result of this rank
                # is copied if its chunk is not recomputed, because that chunk's graph may have saved it.
                is_own = chunk > batch.first_trained and self.placement[chunk - 1] == self.rank
                saved_here = is_own and batch.graphs[chunk - 1, micro_batch].state is None
                beginning, inputs = begin_graph(cloned(inputs) if saved_here else inputs, self._marked)
        return Begun(action, trains, inputs, beginning, state, saved, meter)

    def _run_forward(self, begun: Begun) -> None:
        """Computes a forward that has begun, keeps its graph, and hands over its result."""
        action, trains, inputs, beginning, state, saved, meter = begun
        _, chunk, micro_batch, _ = action
        batch = self._batch
        hooks = nullcontext() if saved is None else saved.dropped()
        gradients = nullcontext() if trains == batch.training else torch.no_grad()
        metered = nullcontext() if meter is None else meter.begin(action, inputs)
        with gradients, hooks:
            with metered:
                result = self._compute(action, inputs)
            if chunk == self._last_chunk:
                result = own_loss(result)
            if trains:
                if state is not None and state.values:
                    self.chunks[chunk].state.moved(state)
                ends = end_graph(result) if chunk < self._last_chunk else self._ends_of_last(result)
                places = saved
                if saved is not None and (self.compiled or has_compiled()):
                    # torch may run other code the next time, which saves other tensors.
                    places, ends = None, [None if end is None else ANEW for end in ends]
                batch.graphs[chunk, micro_batch] = Graph(beginning, ends, places, state)
        if meter is not None:
            meter.end_forward(action, result if chunk < self._last_chunk else None, saved)
        if chunk == self._last_chunk:
            if batch.training and not batch.returns_outputs:
                batch.losses.append(detached(result))
            else:
                # The script may change in place what autograd has saved, and a release frees parameters.
                saves, owns = trains and saved is None, self.owns
                batch.losses.append(
                    detached_outputs(result, lambda each: saves or (owns is not None and owns(chunk, each)))
                )
            if not batch.training:
                batch.labels.pop(micro_batch, None)
        else:
            # A release frees the chunk's parameters.
            owns = None if self.owns is None else partial(self.owns, chunk)
            batch.results[Kind.FORWARD, chunk, micro_batch] = passed_on(result, owns, self._marked and trains)

    def backward(self, action: Action) -> None:
        _, chunk, micro_batch, _ = action
        batch = self._batch
        self.partition.begin_backward(chunk)
        graph = batch.graphs.pop((chunk, micro_batch)) if self._second is None else batch.graphs[chunk, micro_batch]
        state: Moment | None = None
        if graph.state is not None:
            if not action.recomputed:
                # Its forward was measured, so it is recomputed whatever the program says.
                self.current = action = action._replace(recomputed=True)
            self.doing = "backward"
            with self.timing.time("backward"):
                graph, state = self._recompute(action, graph, graph.state)
        if chunk == self._last_chunk:
            batch.labels.pop(micro_batch, None)
        gradients = self._take_gradients(chunk, micro_batch, graph.ends)
        self.doing = "backward"
        metered = nullcontext() if self.meter is None else self.meter.backward(action)
        splits = chunk in batch.split_chunks
        part = batch.second_parts.first(chunk, micro_batch, graph.ends) if splits else nullcontext()
        with self.timing.time("backward"), metered, part:
            backpropagate(graph.ends, gradients)
        if state is not None:
            # Buffers change back only now, because autograd may have saved them for the backward pass.
            state.write()
        if chunk > batch.first_trained:
            batch.results[Kind.BACKWARD, chunk, micro_batch] = gradients_of(graph.beginning)

    def backward_of_weights(self, action: Action) -> None:
        self.partition.begin_backward(action.chunk)
        with self._doing("backward"):
            self._batch.second_parts.run(action.chunk, action.micro_batch)

    def send_forward(self, action: Action) -> None:
        _, chunk, micro_batch, _ = action
        batch = self._batch
        with self._doing("send"):
            self.links.prepare(self.program, self.row)
            result = batch.results.pop((Kind.FORWARD, chunk, micro_batch))
            answered = batch.training and chunk >= batch.first_trained
            self.links.send_activations(chunk, micro_batch, result, answered)

    def receive_forward(self, action: Action) -> None:
        self.links.post_activations(action.chunk, action.micro_batch)

    def send_backward(self, action: Action) -> None:
        with self._doing("send"):
            self.links.prepare(self.program, self.row)
            _, chunk, micro_batch, _ = action
            self.links.send_gradients(chunk, micro_batch, self._batch.results.pop((Kind.BACKWARD, chunk, micro_batch)))

    def receive_backward(self, action: Action) -> None:
        self.links.post_gradients(action.chunk, action.micro_batch)

    def update(self, action: Action) -> None:
        assert self._calls.update is not None, "programs with UPDATE come with an update"
        with self._doing("step"):
            self._calls.update(action.chunk)

    def store_input(self, action: Action) -> None:
        _, chunk, micro_batch, _ = action
        self._inputs_on_host.store(chunk, micro_batch, self._batch.graphs[chunk, micro_batch].beginning)

    def wait_store_input(self, action: Action) -> None:
        with self._doing("store"):
            self._inputs_on_host.wait_store(action.chunk, action.micro_batch)

    def load_input(self, action: Action) -> None:
        self._inputs_on_host.load(action.chunk, action.micro_batch)

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

    def step(self, action: Action) -> None:
        self._calls.step()

    def _compute(self, action: Action, inputs: Any) -> Any:
        """Returns the chunk's result; for the last chunk, the loss."""
        _, chunk, micro_batch, recomputed = action
        if chunk == 0 or recomputed:
            # Layers may change their input in place. The stored input and the user's batch must stay as they are.
            inputs = cloned(inputs)
        with splitting() if chunk in self._batch.split_chunks else nullcontext():
            result = self.chunks[chunk](inputs, micro_batch)
        if chunk < self._last_chunk:
            as_tuple(result)
        elif self._calls.loss_function is not None:
            labels = self._batch.labels[micro_batch]
            result = self._calls.loss_function(result, cloned(labels) if recomputed else labels)
        return result

    def _ends_of_last(self, result: Any) -> Sequence[Any]:
        """Returns where gradients enter the graph of the last chunk's ``result``."""
        return end_outputs(result) if self._batch.returns_outputs else [result]

    def _recompute(self, backward: Action, graph: Graph, state: Moment) -> tuple[Graph, Moment | None]:
        """Restores the tensors that autograd saved, from the input, random states and modules' ``state`` of the first
        forward.

        Returns the graph: a new one if the first forward left only its beginning. Returns also the state of the modules
        before this call; None if nothing changes it.
        """
        _, chunk, micro_batch, _ = backward
        if self._second is not None:
            current, restore = self._take_second()
            restore()
            return self._batch.graphs.pop((chunk, micro_batch)), current
        current = self.chunks[chunk].state.rewind(state)
        if self._started is not None:
            self._repeat_two((backward, graph), self._started, current)
            return self._batch.graphs.pop((chunk, micro_batch)), current
        metered = nullcontext() if self.meter is None else self.meter.again(backward)
        with self.draws.again(chunk, micro_batch) as completely, metered:
            return self._repeat(backward, graph, completely), current

    def _repeat(self, backward: Action, graph: Graph, completely: bool) -> Graph:
        inputs, chunk = graph.beginning, backward.chunk
        if graph.saved is None:
            result = self._compute(backward, inputs)
            ends = end_graph(result) if chunk < self._last_chunk else self._ends_of_last(result)
            return Graph(inputs, ends, None, graph.state)
        graph.saved.restore(partial(self._compute, backward, inputs), completely)
        return graph

    def _repeat_two(self, first: tuple[Action, Graph], second: Action, current: Moment | None) -> None:
        """Begins to repeat the forwards of two backwards, and repeats the first one. Their graphs take the places of
        those that they restore. Layers draw nothing and change only what counts, so that the ``current`` state comes
        back after each."""
        graphs = self._batch.graphs

        def repeat(backward: Action, graph: Graph) -> None:
            graphs[backward[1:3]] = self._repeat(backward, graph, False)

        other = graphs[second[1:3]]
        for backward in (first[0], second):
            self.draws.forget(backward.chunk, backward.micro_batch)
        self._beside(other.beginning, current, partial(repeat, second, other), partial(repeat, *first))()

    def _take_gradients(self, chunk: int, micro_batch: int, ends: Sequence[Any]) -> Sequence[torch.Tensor | None]:
        """Returns the gradients of the chunk's result. They travel while the caller recomputes."""
        if chunk == self._last_chunk:
            if self._batch.returns_outputs:
                return self._batch.output_gradients.pop(micro_batch)
            return [self._calls.loss_gradient(checked_loss(ends[0]), self._batch.micro_batches)]
        if self.placement[chunk + 1] == self.rank:
            return self._batch.results.pop((Kind.BACKWARD, chunk + 1, micro_batch))
        with self._doing("gradient"):
            return self.links.take_gradients(chunk, micro_batch)


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
    **dict.fromkeys(STARTED, Executor.start),
    Kind.FORWARD: Executor.forward,
    Kind.BACKWARD: Executor.backward,
    Kind.WEIGHTS_BACKWARD: Executor.backward_of_weights,
    Kind.SEND_FORWARD: Executor.send_forward,
    Kind.RECV_FORWARD: Executor.receive_forward,
    Kind.SEND_BACKWARD: Executor.send_backward,
    Kind.RECV_BACKWARD: Executor.receive_backward,
    **{kind: _of_partition(kind.name.lower()) for kind in _LAUNCHES},
    **{wait: _of_partition(wait.name.lower(), kind) for wait, kind in _WAITS.items()},
    # The partition knows what the host has a copy of.
    Kind.LOAD_WEIGHTS: _of_partition("gather"),
    Kind.WAIT_LOAD_WEIGHTS: _of_partition("wait_gather", "load"),
    Kind.STORE_INPUT: Executor.store_input,
    Kind.LOAD_INPUT: Executor.load_input,
    Kind.WAIT_STORE_INPUT: Executor.wait_store_input,
    Kind.WAIT_LOAD_INPUT: Executor.wait_load_input,
    Kind.UPDATE: Executor.update,
    Kind.RETURN: Executor.return_outputs,
    Kind.STEP: Executor.step,
}
"""Functions, because bound methods would form a reference cycle with the executor that only the garbage collector
frees."""
