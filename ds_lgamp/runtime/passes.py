"""Forwards and backwards of a rank's chunks, with what recomputation repeats."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from ds_lgamp.runtime.batch import ANEW, BatchState, Begun, Calls, Graph, Position, Storage
from ds_lgamp.runtime.chunk import (
    Chunk,
    Moment,
    Tensors,
    as_leaves,
    as_tuple,
    cloned,
    detached,
    detached_outputs,
    passed_on,
)
from ds_lgamp.runtime.clocks import Stopwatch, Timing
from ds_lgamp.runtime.compiled import has_compiled
from ds_lgamp.runtime.graph import (
    backpropagate,
    begin_graph,
    checked_loss,
    end_graph,
    end_outputs,
    gradients_of,
    own_loss,
    parameters_below,
)
from ds_lgamp.runtime.links import Links
from ds_lgamp.runtime.meter import ChunkMeter, NotedTensors
from ds_lgamp.runtime.recompute import Draws, RandomSource, SavedTensors
from ds_lgamp.runtime.split_backward import splitting
from ds_lgamp.runtime.turns import Pairs
from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.watch.whereabouts import Neighbours


class Passes:
    """Computes forwards and backwards of the chunks of one pipeline rank, in the batch that runs. Results stay in the
    batch until another chunk or a send takes them.

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
        self.draws, self.pairs = Draws(random_sources), Pairs(chunks, random_sources)
        self.meter: ChunkMeter | None = None
        """Measures what micro-batches take on chunks; None if nobody asks."""
        self.compiled = False
        """Whether a rank with which layers exchange data has compiled anything. A recomputation that ends early leaves
        out the last exchange of a chunk, so these ranks recompute alike."""
        self.timing = Stopwatch(torch.device("cpu")) if timing is None else timing
        self.current: Action | None = None
        """The action that runs; None between actions."""
        self.doing = ""
        """What the current action does, as it is timed."""
        self.neighbours = Neighbours(tuple(links.pipeline[owner] for owner in self.placement), alike)
        self.begun: set[bool] = set()
        """Which kinds of batches have run: True for training, False for evaluation."""
        self._batch: BatchState
        """The current batch; between batches, the last one."""
        self._last_chunk = len(self.placement) - 1

    def forward(self, action: Action) -> None:
        if self.pairs.second is not None:
            compute = self.pairs.take_second()[1]
        else:
            compute = partial(self._run_forward, self._begin(action))
            if self.pairs.started is not None:
                other = self._begin(self.pairs.started)
                compute = self.pairs.beside(other.inputs, None, partial(self._run_forward, other), compute)
        self.doing = "forward"
        with self.timing.time("forward"):
            compute()

    def backward(self, action: Action) -> None:
        _, chunk, micro_batch, _, _ = action
        batch, at = self._batch, (chunk, micro_batch)
        self.partition.begin_backward(chunk)
        graph = batch.graphs.pop(at) if self.pairs.second is None else batch.graphs[at]
        state: Moment | None = None
        if graph.state is not None:
            if self.meter is not None:
                # If its forward was measured, it is recomputed whatever the program says.
                self.current = action = self.meter.marked(action)
            self.doing = "backward"
            with self.timing.time("backward"):
                graph, state = self._recompute(action, graph, graph.state)
        if chunk == self._last_chunk:
            batch.labels.pop(micro_batch, None)
        gradients = self._take_gradients(chunk, micro_batch, graph.ends)
        self.doing = "backward"
        metered = nullcontext() if self.meter is None else self.meter.backward(action)
        splits = chunk in batch.split_chunks
        part: AbstractContextManager[Any] = nullcontext()
        if splits:
            part = batch.second_parts.first(chunk, micro_batch, graph.ends)
        if self.meter is not None:
            part = self.meter.checked(action, part)
        with self.timing.time("backward"), part, metered:
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

    def _begin(self, action: Action) -> Begun:
        """Takes the input of a forward, and what a recomputation of it needs."""
        _, chunk, micro_batch, recomputed, _ = action
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
        in_part = False
        if meter is not None and not meter.is_outgrown(chunk, inputs):
            in_part = trains and meter.tells_selective(chunk, inputs)
            meter = meter if in_part else None
        if meter is not None and trains:
            # Nobody knows yet what autograd would keep of it.
            recomputed, action = True, action._replace(recomputed=True, selective=in_part)
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
        _, chunk, micro_batch, _, _ = action
        batch = self._batch
        hooks = nullcontext() if saved is None else saved.dropped()
        gradients = nullcontext() if trains == batch.training else torch.no_grad()
        metered = nullcontext() if meter is None else meter.begin(action, inputs)
        with gradients, hooks:
            with metered:
                # If its backward will compute all again, this graph is the one of the whole.
                whole = saved is not None and action.selective
                result = self._compute(action._replace(selective=False) if whole else action, inputs)
            if chunk == self._last_chunk:
                result = own_loss(result)
            if trains:
                if state is not None and state.values:
                    self.chunks[chunk].state.moved(state)
                ends = end_graph(result) if chunk < self._last_chunk else self._ends_of_last(result)
                places = saved
                if meter is not None and action.selective:
                    meter.note_graph(action, parameters_below(ends))
                if saved is not None and (action.selective or self.compiled or has_compiled()):
                    # torch may run other code the next time, which saves other tensors, and so do layers in part.
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

    def _compute(self, action: Action, inputs: Any) -> Any:
        """Returns the chunk's result; for the last chunk, the loss."""
        _, chunk, micro_batch, recomputed, _ = action
        if chunk == 0 or recomputed:
            # Layers may change their input in place. The stored input and the user's batch must stay as they are.
            inputs = cloned(inputs)
        split = splitting() if chunk in self._batch.split_chunks else nullcontext()
        with self.chunks[chunk].selectively(split) if action.selective else split:
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
        _, chunk, micro_batch, _, _ = backward
        if self.pairs.second is not None:
            current, restore = self.pairs.take_second()
            restore()
            return self._batch.graphs.pop((chunk, micro_batch)), current
        current = self.chunks[chunk].state.rewind(state)
        if self.pairs.started is not None:
            self._repeat_two((backward, graph), self.pairs.started, current)
            return self._batch.graphs.pop((chunk, micro_batch)), current
        metered = nullcontext() if self.meter is None else self.meter.again(backward)
        with self.draws.again(chunk, micro_batch) as completely, metered:
            return self._repeat(backward, graph, completely), current

    def _repeat(self, backward: Action, graph: Graph, completely: bool) -> Graph:
        compute = partial(self._compute, backward, graph.beginning)
        if graph.saved is None:
            ends_of, result = end_graph if backward.chunk < self._last_chunk else self._ends_of_last, compute()
            if self.meter is not None:
                self.meter.end_again(backward, result if backward.chunk < self._last_chunk else None)
            return graph._replace(ends=ends_of(result))
        graph.saved.restore(compute, completely)
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
        self.pairs.beside(other.beginning, current, partial(repeat, second, other), partial(repeat, *first))()

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

    def _doing(self, kind: str) -> AbstractContextManager[Any]:
        """Times the block as ``kind``, and says that this rank does that. Passes do both by themselves: a call less."""
        self.doing = kind
        return self.timing.time(kind)
