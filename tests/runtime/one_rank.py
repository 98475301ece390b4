"""Runs chunks on one rank, without a process group."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest.mock import patch

import torch

from ds_lgamp.runtime.batch import BatchState, Calls, Position, Storage
from ds_lgamp.runtime.chunk import Chunk
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.runtime.links import Links, Route
from ds_lgamp.runtime.recompute import default_sources
from ds_lgamp.schedule.actions import COMPUTE, Action

ALONE = Route((0,), {}, {})


class WholeParameters:
    """A partition of one rank, which never gathers."""

    def begin_backward(self, chunk: int) -> None:
        pass


def one_rank(chunks: Sequence[Sequence[Callable[[Any], Any]]]) -> Executor:
    """Returns an executor of chunks, each given as its layers. The loss is the sum of the last result."""
    firsts = [sum(map(len, chunks[:number])) for number in range(len(chunks))]
    device = torch.device("cpu")
    return Executor(
        Position((0,) * len(chunks), 0),
        {number: Chunk(layers, firsts[number]) for number, layers in enumerate(chunks)},
        Storage(WholeParameters()),
        Links(device, ALONE),
        Calls(lambda output, label: output.sum(), lambda: None),
        random_sources=default_sources(device),
    )


def all_recomputed(actions: Iterable[Action]) -> list[Action]:
    """Returns ``actions`` with every chunk recomputed."""
    return [action._replace(recomputed=action.kind in COMPUTE) for action in actions]


def run(executor: Executor, micro_batches: Sequence[torch.Tensor], order: str, recompute: bool) -> list[float]:
    """Executes the actions of ``order``, such as "F0.0 B0.0", as one batch. Returns the losses by micro-batch."""
    actions = [Action.parse(text) for text in order.split()]
    program = all_recomputed(actions) if recompute else actions
    batch = BatchState(len(micro_batches), lambda index: (micro_batches[index], None), program=program)
    # Errors name the rank.
    with patch("torch.distributed.get_rank", return_value=0), executor.run_batch(batch):
        executor.run(program)
    return [loss.item() for loss in executor.losses]
