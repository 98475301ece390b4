"""Executes a pipeline rank's program, action by action."""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ds_lgamp.partition.zero_partition import ZeroPartition
from ds_lgamp.runtime.chunk import Chunk, Tensors, as_tuple, differentiable
from ds_lgamp.runtime.links import Links
from ds_lgamp.runtime.random_state import RandomSource, read_states, replayed
from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.schedule.placement import Placement


class ActionError(RuntimeError):
    """An action failed; the message names the rank and the action."""


class Executor:
    """One pipeline rank's hands: chunks compute, links carry, the partition gathers and reduces.

    Chunks are recomputed in the backward pass from their stored input, random state restored.

    Args:
        placement: pipeline rank of every chunk.
        rank: this pipeline rank.
        chunks: the chunks of this rank.
        partition: their parameters.
        links: to the neighbours in the ring.
        loss_function: loss from (output of the last chunk, labels); None if the last chunk returns the loss.
        apply_step: the optimizer step, called when every gradient is final.
        random_sources: restored around recomputation.
        trace: where actions are recorded as they start; None records nothing.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        chunks: Mapping[int, Chunk],
        partition: ZeroPartition,
        links: Links,
        loss_function: Callable[[Any, Any], torch.Tensor] | None,
        apply_step: Callable[[], None],
        random_sources: Sequence[RandomSource],
        trace: list[str] | None = None,
    ) -> None:
        self.placement, self.rank = placement, rank
        self.chunks, self.partition, self.links = chunks, partition, links
        self.loss_function, self.apply_step = loss_function, apply_step
        self.random_sources = random_sources
        self.trace = trace
        self.current: Action | None = None
        self._broken = False
        self._states: list[Any] | None = None
        """The random states stored last."""
        self.losses: list[torch.Tensor] = []
        """Losses of the last run, on the rank of the last chunk, by micro-batch."""
        self._last_chunk = len(placement) - 1
        self._execute = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.SEND_FORWARD: self.send_forward,
            Kind.RECV_FORWARD: self.receive_forward,
            Kind.SEND_BACKWARD: self.send_backward,
            Kind.RECV_BACKWARD: self.receive_backward,
            Kind.GATHER: self.gather,
            Kind.RELEASE: self.release,
            Kind.REDUCE: self.reduce,
            Kind.STEP: self.step,
        }

    @contextmanager
    def batch(self, micro_batches: int, load: Callable[[], tuple[Any, Any]], training: bool = True) -> Iterator[None]:
        """Everything executed inside belongs to one batch of ``micro_batches``.

        Args:
            load: pulls the next micro-batch, (inputs of the first chunk, labels); called once per micro-batch on ranks
                that own an end of the model.
            training: whether backward passes follow.

        Raises ActionError if an action fails. What was under way then cannot be taken back: no batch follows.
        """
        if self._broken:
            raise ActionError("a batch failed or ended early; its communication cannot be taken back, start anew")
        self._broken = True
        self._micro_batches, self._load, self._training = micro_batches, load, training
        self._saved: dict[tuple[int, int], tuple[Any, list[Any]]] = {}
        self._results: dict[tuple[Kind, int, int], Any] = {}
        self._labels: dict[int, Any] = {}
        self.losses = []
        self.current = None
        try:
            yield
            self.current = None
            self.links.drain()
            self._broken = False
        except StopIteration:
            raise
        except Exception as error:
            action = "the end of the batch" if self.current is None else str(self.current)
            raise ActionError(
                f"rank {dist.get_rank()} (pipeline rank {self.rank}) failed at {action}: "
                f"{type(error).__name__}: {error}{_place_of(error)}"
            ) from error

    def run(self, program: Sequence[Action]) -> None:
        """Executes ``program``."""
        for action in program:
            self.execute(action)

    def execute(self, action: Action) -> None:
        """Executes one action."""
        self.current = action
        if self.trace is not None:
            self.trace.append(str(action))
        self._execute[action.kind](action)

    def forward(self, action: Action) -> None:
        _, chunk, micro_batch = action
        self.partition.wait_gathered(chunk)
        inputs = self._take_input(chunk, micro_batch)
        if self._training:
            self._states = read_states(self.random_sources, self._states)
            self._saved[chunk, micro_batch] = inputs, self._states
        if self._training or chunk == 0:
            # A layer that works in place must not change what the recomputation starts from, nor the user's batch.
            inputs = _cloned(inputs)
        with torch.no_grad():
            result = self.chunks[chunk](inputs, micro_batch)
            if chunk == self._last_chunk:
                self.losses.append(self._loss(result, micro_batch))
                if not self._training:
                    self._labels.pop(micro_batch, None)
            else:
                as_tuple(result)
                self._results[Kind.FORWARD, chunk, micro_batch] = result

    def backward(self, action: Action) -> None:
        _, chunk, micro_batch = action
        self.partition.wait_gathered(chunk)
        self.partition.begin_backward(chunk)
        inputs, states = self._saved.pop((chunk, micro_batch))
        if chunk > 0:
            inputs = _as_leaves(inputs)
        statistics = self.chunks[chunk].read_statistics()
        with torch.enable_grad(), replayed(self.random_sources, states):
            result = self.chunks[chunk](_cloned(inputs), micro_batch)
            if chunk == self._last_chunk:
                result = self._loss(result, micro_batch) / self._micro_batches
                self._labels.pop(micro_batch, None)
                if not result.requires_grad:
                    raise ValueError("the loss needs no gradient; it must depend on the model's parameters")
        # Only now, so that the gradient travels while the chunk is recomputed.
        gradients = [None] if chunk == self._last_chunk else self._take_gradients(chunk, micro_batch)
        roots = [(root, grad) for root, grad in zip(differentiable(result), gradients) if root.requires_grad]
        if roots:
            torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        self.chunks[chunk].write_statistics(statistics)
        if chunk > 0:
            self._results[Kind.BACKWARD, chunk, micro_batch] = [
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in differentiable(inputs)
            ]

    def send_forward(self, action: Action) -> None:
        self.links.send_activations(action.chunk, self._results.pop((Kind.FORWARD, action.chunk, action.micro_batch)))

    def receive_forward(self, action: Action) -> None:
        self.links.post_activations(action.chunk, action.micro_batch)

    def send_backward(self, action: Action) -> None:
        self.links.send_gradients(self._results.pop((Kind.BACKWARD, action.chunk, action.micro_batch)))

    def receive_backward(self, action: Action) -> None:
        self.links.post_gradients(action.chunk, action.micro_batch)

    def gather(self, action: Action) -> None:
        self.partition.gather(action.chunk)

    def release(self, action: Action) -> None:
        self.partition.release(action.chunk)

    def reduce(self, action: Action) -> None:
        self.partition.reduce(action.chunk)

    def step(self, action: Action) -> None:
        self.partition.finish_gradients()
        self.apply_step()
        self.partition.after_update()

    def _take_input(self, chunk: int, micro_batch: int) -> Tensors:
        if chunk == 0 or (chunk == self._last_chunk and micro_batch not in self._labels):
            first_input, labels = self._load()
            if self.placement[self._last_chunk] == self.rank:
                self._labels[micro_batch] = labels
            if chunk == 0:
                return first_input
        if self.placement[chunk - 1] == self.rank:
            return self._results.pop((Kind.FORWARD, chunk - 1, micro_batch))
        return self.links.take_activations(chunk, micro_batch)

    def _take_gradients(self, chunk: int, micro_batch: int) -> list[torch.Tensor]:
        if self.placement[chunk + 1] == self.rank:
            return self._results.pop((Kind.BACKWARD, chunk + 1, micro_batch))
        return self.links.take_gradients(chunk, micro_batch)

    def _loss(self, result: Any, micro_batch: int) -> torch.Tensor:
        if self.loss_function is None:
            return result
        return self.loss_function(result, self._labels[micro_batch])


def _cloned(value: Any) -> Any:
    """A copy of the tensors in ``value``, part of the graph."""
    if isinstance(value, tuple):
        return tuple(map(_cloned, value))
    return value.clone() if isinstance(value, torch.Tensor) else value


def _as_leaves(inputs: Tensors) -> Tensors:
    """Fresh leaves of the same data, so that their gradients can be read after the backward pass."""
    leaves = tuple(member.detach().requires_grad_(member.is_floating_point()) for member in as_tuple(inputs))
    return leaves if isinstance(inputs, tuple) else leaves[0]


def _place_of(error: BaseException) -> str:
    """Where the error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
