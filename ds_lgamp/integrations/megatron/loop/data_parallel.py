"""How the program of ds_lgamp uses Megatron-core's DistributedDataParallel and distributed optimizer.

GATHER calls the chunk's ``param_sync_func``. If there is none, hooks gather. REDUCE of a chunk happens within its last
backward pass, the only one outside ``no_sync_func``. DistributedDataParallel counts the gradients of that pass, and
hooks reduce a bucket as soon as it is complete. In the first batch it learns how many gradients to expect, and reduces
at the end.

``grad_sync_func`` reduces chunks that have no ``no_sync_func``. It is not called beside a ``no_sync_func``:
DistributedDataParallel would learn nothing, and with several instances of the distributed optimizer it would reduce
twice.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from ds_lgamp.integrations.megatron.loop.batch import Batch
from ds_lgamp.runtime.chunk import ParameterHolder

SyncFunction = Callable[..., Any]


class DistributedData(ParameterHolder):
    """Holds the parameters of whole chunks. It lives as long as the executor and serves every batch."""

    def __init__(self) -> None:
        self._models: dict[int, torch.nn.Module] = {}
        self._gathers: dict[int, SyncFunction] = {}
        self._no_sync: dict[int, SyncFunction] = {}
        self._reductions: dict[int, SyncFunction] = {}
        self._closed: dict[int, AbstractContextManager[Any]] = {}
        """The entered contexts, in which backward passes reduce nothing. The key is the chunk, or 0 if one context is
        for all chunks."""

    def begin(self, batch: Batch) -> None:
        """Reads the configuration of ``batch``, which may differ from that of the last batch."""
        self._models = dict(zip(batch.chunks, batch.models))
        self._left = dict.fromkeys(batch.chunks, batch.backward_passes)
        """Number of backward passes that have not begun, by chunk."""
        config = batch.config
        # Evaluation needs no gather, because the parameters are there.
        self._gathers = _by_chunk(config.param_sync_func if batch.backward_passes else None, batch.chunks)
        self._no_sync = _by_chunk(config.no_sync_func, batch.chunks)
        self._reductions = _by_chunk(None if self._no_sync else config.grad_sync_func, batch.chunks)
        self._one_for_all = callable(config.no_sync_func)
        for chunk in batch.chunks:
            self._close(chunk)

    def forget(self) -> None:
        """Drops the models and functions of the batch."""
        self._models, self._gathers, self._no_sync, self._reductions = {}, {}, {}, {}

    def gather(self, chunk: int) -> None:
        if chunk in self._gathers:
            self._gathers[chunk](self._models[chunk].parameters())

    def wait_gather(self, chunk: int) -> None:
        """Does nothing: a hook of the model waits."""

    def release(self, chunk: int) -> None:
        """Does nothing: weights stay at ZeRO stages 0 and 1."""

    def begin_backward(self, chunk: int) -> None:
        self._left[chunk] -= 1
        if self._left[chunk] == 0:
            self._open(chunk)

    def reduce(self, chunk: int) -> None:
        if chunk in self._reductions:
            self._reductions[chunk](self._models[chunk].parameters())
        self._close(chunk)

    def wait_reduce(self, chunk: int) -> None:
        """Does nothing: Megatron-core has a buffer for every gradient, and ``finalize_model_grads_func`` waits."""

    def end(self) -> None:
        """Leaves every context."""
        for chunk in list(self._closed):
            self._open(chunk)

    def undo(self) -> None:
        """Ends a batch before its first backward pass. Another batch may launch all gathers again."""
        self.end()
        for chunk in self._gathers:
            model = self._models[chunk]
            if isinstance(model, DistributedDataParallel):
                # Waits for a gather that no forward has awaited.
                model.start_param_sync(force_sync=True)

    def _open(self, chunk: int) -> None:
        context = self._closed.pop(0 if self._one_for_all else chunk, None)
        if context is not None:
            context.__exit__(None, None, None)

    def _close(self, chunk: int) -> None:
        key = 0 if self._one_for_all else chunk
        if chunk in self._no_sync and key not in self._closed:
            self._closed[key] = self._no_sync[chunk]()
            self._closed[key].__enter__()


def _by_chunk(functions: SyncFunction | Sequence[SyncFunction] | None, chunks: Sequence[int]) -> dict[int, Any]:
    """Returns the function of every chunk. ``functions`` is a list of them, one function for all chunks, or None."""
    if functions is None:
        return {}
    return dict.fromkeys(chunks, functions) if callable(functions) else dict(zip(chunks, functions, strict=True))
