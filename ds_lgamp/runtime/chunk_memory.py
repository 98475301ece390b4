"""The memory that one micro-batch takes on a chunk, measured without ranks or a schedule."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ds_lgamp.cost.activations import ChunkBytes
from ds_lgamp.runtime.chunk import as_leaves, cloned, tensors_in
from ds_lgamp.runtime.graph import backpropagate, begin_graph, end_graph, on_this_thread, own_loss
from ds_lgamp.runtime.measure import PeakMemory
from ds_lgamp.runtime.recompute import SavedTensors
from ds_lgamp.runtime.split_backward import SecondParts, splitting


class Way(NamedTuple):
    """How a backward runs."""

    recompute: bool
    """Whether it computes the chunk again."""
    split: bool = False
    """Whether it has two parts."""


def chunk_bytes(
    compute: Callable[[Any], Any],
    inputs: Any,
    gradients: Sequence[torch.Tensor] | None,
    existing: Iterable[torch.Tensor],
    result_bytes: int,
    is_first: bool,
    way: Way,
) -> ChunkBytes:
    """Runs a forward and a backward as the executor does, and returns the bytes they take. If tensors are fake, these
    are the bytes that real ones would take.

    Args:
        compute: returns the chunk's result for its inputs; of the last chunk, the loss.
        inputs: the chunk's inputs.
        gradients: the gradients of the floating-point members of the result; of the last chunk, of the loss. None if
            the chunk has no backward.
        existing: what is in memory beside the inputs: parameters, their gradients, buffers and labels.
        result_bytes: what the next chunk gets; 0 for the last chunk.
        way: how the backward runs.
    """
    existing = [*existing, *(gradients or ()), *tensors_in(inputs)]
    is_fake = any(isinstance(tensor, FakeTensor) for tensor in existing)
    with PeakMemory(existing, is_fake) as memory, on_this_thread():
        before = memory.live()
        if gradients is None:
            with torch.no_grad():
                compute(inputs)
            return ChunkBytes(result_bytes, memory.peak - before, 0)
        parts = SecondParts()
        first_part: FirstPart = partial(parts.first, 0, 0) if way.split else _whole
        run = _Run(partial(_split, compute) if way.split else compute, inputs, gradients, result_bytes, is_first)
        taken = (_bytes_recomputed if way.recompute else _bytes_kept)(run, memory, first_part)
        if not way.split:
            return taken
        waiting, base, memory.peak = parts.nbytes(), memory.live(), 0
        parts.run(0, 0)
        return replace(taken, waiting=waiting, second_part=max(0, memory.peak - base))


FirstPart = Callable[[list[Any]], AbstractContextManager[None]]
"""Returns a context for a backward from some ends, which may leave something out."""


class _Run(NamedTuple):
    """A forward and a backward of a chunk."""

    compute: Callable[[Any], Any]
    inputs: Any
    gradients: Sequence[torch.Tensor]
    result_bytes: int
    is_first: bool

    @property
    def is_last(self) -> bool:
        return self.result_bytes == 0

    def ends(self, result: Any) -> list[Any]:
        """Returns where the backward begins."""
        return [own_loss(result)] if self.is_last else end_graph(result)


def _whole(_ends: list[Any]) -> AbstractContextManager[None]:
    return nullcontext()


def _split(compute: Callable[[Any], Any], inputs: Any) -> Any:
    with splitting():
        return compute(inputs)


def _bytes_recomputed(run: _Run, memory: PeakMemory, first_part: FirstPart) -> ChunkBytes:
    """Measures a chunk whose backward, or the first part of it, computes the chunk again."""
    before, saved = memory.live(), SavedTensors()
    with saved.dropped(), torch.jit.optimized_execution(False):
        result = run.compute(run.inputs if run.is_first else as_leaves(run.inputs))
    forward = memory.peak - before
    ends = run.ends(result)
    del result
    memory.peak = 0
    with torch.jit.optimized_execution(False):
        saved.restore(partial(run.compute, run.inputs if run.is_first else as_leaves(run.inputs)), completely=False)
    with first_part(ends):
        backpropagate(ends, run.gradients)
    return ChunkBytes(run.result_bytes, forward, memory.peak - before)


def _bytes_kept(run: _Run, memory: PeakMemory, first_part: FirstPart) -> ChunkBytes:
    """Measures a chunk that keeps what autograd saves."""
    before, copy = memory.live(), cloned(run.inputs)
    # The leaves receive gradients, and so they live until the end.
    leaves, followers = (None, copy) if run.is_first else begin_graph(copy)
    del copy
    result = run.compute(followers)
    forward = memory.peak - before - sum(tensor.nbytes for tensor in tensors_in(run.inputs))
    ends = run.ends(result)
    del followers
    with_result = memory.live()
    del result
    held, memory.peak = memory.live() - before, 0
    keeps_result = not run.is_last and before + held == with_result
    with first_part(ends):
        backpropagate(ends, run.gradients)
    by_autograd = held - run.result_bytes if keeps_result else held
    return ChunkBytes(run.result_bytes, forward, memory.peak - before - held, by_autograd, keeps_result)
