"""A rank's place in one of Megatron-core's pipelines: its links and its executor, for all batches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_lgamp.integrations.megatron.loop.batch import Batch
from ds_lgamp.integrations.megatron.loop.data_parallel import DistributedData
from ds_lgamp.integrations.megatron.loop.model_chunk import DataEndError, ModelChunk
from ds_lgamp.integrations.megatron.loop.sharded.data_parallel import ShardedData
from ds_lgamp.integrations.megatron.loop.sharded.model import partition_of
from ds_lgamp.integrations.megatron.loop.timing import MegatronTiming
from ds_lgamp.partition.agreement import everyone, host_group
from ds_lgamp.runtime.batch import ActionError, BatchState, Calls, Position, Storage
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.runtime.ring import ring_links
from ds_lgamp.runtime.trace import Trace
from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.watch.this_rank import this_rank

Data = DistributedData | ShardedData
_ADVICE = "pass seq_length and micro_batch_size as they are in the batch, or set variable_seq_lengths"
"""The advice in errors about shapes that change unexpectedly."""


class Pipeline:
    """Runs the batches of one pipeline rank. It keeps no model alive between batches.

    All ranks build it together at the first batch, unless there is one pipeline rank.

    Args:
        first: the first batch.
        shapes: the values that determine the shapes of tensors.
        patience: how many seconds ranks may wait for one that stands still.
        trace: records training steps; None if nobody has asked for it.
    """

    def __init__(self, first: Batch, shapes: Any, patience: float, trace: Trace | None) -> None:
        this_rank.start()
        alone = first.pipeline_ranks == 1
        pipelines = [[dist.get_rank()]] if alone else _all_pipelines(first.groups.pp)
        hosts = None if alone else host_group()
        self._links = ring_links(pipelines, first.device, hosts, first.config.variable_seq_lengths, _ADVICE)
        self._shapes, self._patience, self._trace = shapes, patience, trace
        self._whole, self._sharded = DistributedData(), ShardedData()
        self._timing = MegatronTiming()
        self._batch: Batch | None = None
        self._executors: dict[tuple[int, Data], Executor] = {}
        """By the number of chunks per rank, and by who holds their parameters."""

    def run(
        self, batch: Batch, spec: ProgramSpec, program: Sequence[Action], shapes: Any, iteration: Callable[[], int]
    ) -> None:
        """Runs ``batch``.

        Args:
            spec: that of the program of all ranks.
            program: the actions of this rank.
            shapes: the values that determine the shapes of tensors. If they changed, the links forget all shapes.
            iteration: returns the number of the training step. It is not called in evaluations, which may have none.

        Raises ActionError, which names rank and action, if an action fails. On one pipeline rank, StopIteration of an
        iterator comes through, as from Megatron-core's schedules.
        """
        if shapes != self._shapes:
            self._links.reset(batch.config.variable_seq_lengths)
        executor, data = self._executor_of(batch), self._data_of(batch)
        try:
            self._shapes, self._batch, self._timing.timers = shapes, batch, batch.config.timers
            training = not batch.forward_only
            state = BatchState(batch.micro_batches, _no_data, training, program=program)
            here = this_rank.whereabouts
            watched = here.in_batch(executor, f"batch {here.batch + 1}", training, self._patience)
            with watched, executor.run_batch(state):
                if training and self._trace is not None:
                    self._trace.begin(iteration(), executor, lambda: spec)
                data.begin(batch)
                executor.run(program)
                data.end()
        except ActionError as error:
            if batch.pipeline_ranks > 1 or not isinstance(error.__cause__, DataEndError):
                raise
            if all(action.kind is not Kind.BACKWARD for action in program[: executor.row]):
                data.undo()
                self._links.broken = False
            raise StopIteration from error
        finally:
            self._batch = self._timing.timers = None
            data.forget()

    def _data_of(self, batch: Batch) -> Data:
        """Who holds the parameters of ``batch``. A script may evaluate whole models, such as a teacher, beside sharded
        ones."""
        return self._whole if partition_of(batch.models) is None else self._sharded

    def _executor_of(self, batch: Batch) -> Executor:
        data = self._data_of(batch)
        kind = len(batch.models), data
        if kind not in self._executors:
            executor = self._executors[kind] = Executor(
                Position(batch.placement, batch.rank, tuple(dist.get_process_group_ranks(batch.groups.dp_cp))),
                {chunk: ModelChunk(own, self._running) for own, chunk in enumerate(batch.chunks)},
                Storage(data, data.owns if isinstance(data, ShardedData) else None),
                self._links,
                Calls(None, self._finish_gradients, loss_gradient=self._loss_gradient),
                random_sources=[],
                timing=self._timing,
            )
            executor.trace = self._trace
        return self._executors[kind]

    def _running(self) -> Batch:
        assert self._batch is not None, "chunks compute while a batch runs"
        return self._batch

    def _finish_gradients(self) -> None:
        """Finishes the gradients, but leaves the optimizer's step to Megatron-core's loop."""
        batch = self._running()
        self._data_of(batch).end()
        # At stages 0 and 1 this is where Megatron-core waits for its reductions.
        with self._executor_of(batch).timing.time("reduce"):
            batch.finalize()

    def _loss_gradient(self, loss: torch.Tensor, micro_batches: int) -> torch.Tensor:
        return self._running().loss_gradient(loss, micro_batches)


def _no_data(micro_batch: int) -> tuple[None, None]:
    """Returns no data: ``forward_step`` reads its micro-batch itself."""
    return None, None


def _all_pipelines(pipeline: dist.ProcessGroup) -> list[list[int]]:
    """Returns the global ranks of every pipeline. Collective over all ranks."""
    pipelines = {tuple(ranks) for ranks in everyone(dist.get_process_group_ranks(pipeline))}
    return [list(ranks) for ranks in sorted(pipelines)]
