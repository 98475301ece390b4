"""Who holds the parameters of chunks that ds_lgamp has sharded."""

import torch

from ds_lgamp.integrations.megatron.loop.batch import Batch
from ds_lgamp.integrations.megatron.loop.sharded.model import partition_of
from ds_lgamp.partition.zero_partition import ZeroPartition
from ds_lgamp.runtime.chunk import ParameterHolder


class ShardedData(ParameterHolder):
    """Runs the actions on the partition of the batch's models. It keeps none alive between batches."""

    def __init__(self) -> None:
        self._partition: ZeroPartition | None = None

    def begin(self, batch: Batch) -> None:
        self._partition = partition_of(batch.models)
        if not batch.forward_only:
            self._running.refuse_thawed()

    def end(self) -> None:
        """Does nothing: the program has awaited every reduction."""

    def undo(self) -> None:
        """Ends a batch before its first backward pass. Another batch may launch all gathers again."""
        for chunk in self._running.chunk_units:
            self._running.release(chunk)

    def forget(self) -> None:
        self._partition = None

    def gather(self, chunk: int) -> None:
        self._running.gather(chunk)

    def wait_gather(self, chunk: int) -> None:
        self._running.wait_gather(chunk)

    def release(self, chunk: int) -> None:
        self._running.release(chunk)

    def begin_backward(self, chunk: int) -> None:
        self._running.begin_backward(chunk)

    def reduce(self, chunk: int) -> None:
        self._running.reduce(chunk)

    def wait_reduce(self, chunk: int) -> None:
        self._running.wait_reduce(chunk)

    def owns(self, chunk: int, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of parameters of ``chunk`` that a release frees."""
        return self._running.frees_weights and self._running.owns(chunk, tensor)

    @property
    def _running(self) -> ZeroPartition:
        assert self._partition is not None, "actions run within a batch"
        return self._partition
