"""Runs chunks on one rank, without a process group."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch

from ds_lgamp.runtime.batch import BatchState
from ds_lgamp.runtime.chunk import Chunk
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.runtime.links import Endpoint, Links
from ds_lgamp.runtime.recompute import default_sources
from ds_lgamp.schedule.actions import Action

NOWHERE = Endpoint(0, None, 0)


class WholeParameters:
    """A partition of one rank, which never gathers."""

    def begin_backward(self, chunk: int) -> None:
        pass


def one_rank(chunks: Sequence[Sequence[Callable[[Any], Any]]], recompute: bool) -> Executor:
    """Returns an executor of chunks, each given as its layers. The loss is the sum of the last result."""
    firsts = [sum(map(len, chunks[:number])) for number in range(len(chunks))]
    device = torch.device("cpu")
    return Executor(
        (0,) * len(chunks),
        0,
        {number: Chunk(layers, firsts[number]) for number, layers in enumerate(chunks)},
        WholeParameters(),
        Links(device, *[NOWHERE] * 6),
        loss_function=lambda output, label: output.sum(),
        step=lambda: None,
        random_sources=default_sources(device),
        recompute=recompute,
    )


def run(executor: Executor, micro_batches: Sequence[torch.Tensor], order: str) -> list[float]:
    """Executes the actions of ``order``, such as "F0.0 B0.0", as one batch. Returns the losses by micro-batch."""
    batch = BatchState(len(micro_batches), lambda index: (micro_batches[index], None))
    # Errors name the rank.
    with patch("torch.distributed.get_rank", return_value=0), executor.run_batch(batch):
        executor.run([Action.parse(text) for text in order.split()])
    return [loss.item() for loss in executor.losses]
