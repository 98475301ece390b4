"""Measures the memory that one micro-batch takes on a chunk, in one process, without ranks or a schedule."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ds_lgamp.cost.activations import ChunkBytes
from ds_lgamp.runtime.chunk import as_leaves, cloned
from ds_lgamp.runtime.graph import backpropagate, begin_graph, end_graph, own_loss
from ds_lgamp.runtime.measure import PeakMemory
from ds_lgamp.runtime.recompute import SavedTensors


def chunk_bytes(
    compute: Callable[[Any], Any],
    inputs: Any,
    gradients: Sequence[torch.Tensor],
    existing: Iterable[torch.Tensor],
    result_bytes: int,
    is_first: bool,
    is_last: bool,
    recompute: bool,
    fake: bool = False,
    trains: bool = True,
) -> ChunkBytes:
    """Runs a forward and a backward as the executor does, and returns the bytes they take.

    Args:
        compute: returns the chunk's result for its inputs; of the last chunk, the loss.
        inputs: the chunk's inputs.
        gradients: the gradients of the floating-point members of the result; of the last chunk, of the loss.
        existing: what is in memory beside the inputs: parameters, their gradients, buffers and labels.
        result_bytes: what the next chunk gets; 0 for the last chunk.
        recompute: whether the backward computes the chunk again.
        fake: whether all tensors are fake.
        trains: whether the chunk has a backward.
    """
    given = _tensors(inputs)
    with PeakMemory([*existing, *gradients, *given], fake) as memory:
        before = memory.live()
        if not trains:
            with torch.no_grad():
                compute(inputs)
            return ChunkBytes(result_bytes, memory.peak - before, 0)
        if recompute:
            saved = SavedTensors()
            with saved.dropped(), torch.jit.optimized_execution(False):
                result = compute(inputs if is_first else as_leaves(inputs))
            forward = memory.peak - before
            ends = [own_loss(result)] if is_last else end_graph(result)
            del result
            memory.peak = 0
            with torch.jit.optimized_execution(False):
                saved.restore(partial(compute, inputs if is_first else as_leaves(inputs)), completely=False)
            backpropagate(ends, gradients)
            return ChunkBytes(result_bytes, forward, memory.peak - before)
        copy = cloned(inputs)
        # The leaves receive gradients, and so they live until the end.
        leaves, followers = (None, copy) if is_first else begin_graph(copy)
        del copy
        result = compute(followers)
        forward = memory.peak - before - sum(tensor.nbytes for tensor in given)
        ends = [own_loss(result)] if is_last else end_graph(result)
        del followers
        with_result = memory.live()
        del result
        kept, memory.peak = memory.live() - before, 0
        keeps_result = not is_last and before + kept == with_result
        backpropagate(ends, gradients)
        by_autograd = kept - result_bytes if keeps_result else kept
        return ChunkBytes(result_bytes, forward, memory.peak - before - kept, by_autograd, keeps_result)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
