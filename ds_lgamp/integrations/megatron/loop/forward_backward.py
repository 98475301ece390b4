"""A ``forward_backward_func`` for Megatron-core that runs the programs of ds_lgamp, with the links and executors of its
pipelines, and how a program uses Megatron-core's DistributedDataParallel and distributed optimizer.

GATHER calls the chunk's ``param_sync_func``. If there is none, hooks gather. REDUCE of a chunk happens within its last
backward pass, the only one outside ``no_sync_func``. DistributedDataParallel counts the gradients of that pass, and
hooks reduce a bucket as soon as it is complete. In the first batch it learns how many gradients to expect, and reduces
at the end.

``grad_sync_func`` reduces chunks that have no ``no_sync_func``. It is not called beside a ``no_sync_func``:
DistributedDataParallel would learn nothing, and with several instances of the distributed optimizer it would reduce
twice.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, proxy

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection

from ds_lgamp.config import ConfigError, LgampConfig
from ds_lgamp.integrations.megatron.loop.batch import (
    Batch,
    DataEndError,
    MegatronTiming,
    ModelChunk,
    iterators_of,
    placement_of,
    refuse_another_file,
    refuse_common_parameters,
    refuse_shards,
    refuse_unsupported,
)
from ds_lgamp.integrations.megatron.loop.budget import Budget
from ds_lgamp.integrations.megatron.loop.sharded_model import partition_of
from ds_lgamp.integrations.program_spec import program_of, program_spec
from ds_lgamp.partition.agreement import host_group
from ds_lgamp.partition.zero_partition import ZeroPartition
from ds_lgamp.runtime.batch import ActionError, BatchState, Calls, ParameterHolder, Position, Storage
from ds_lgamp.runtime.compiled import notice_compilations
from ds_lgamp.runtime.edges import all_pipelines, pipeline_links, posts_on_arrival
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.runtime.trace import Trace, trace_if_asked
from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.watch.this_rank import this_rank

_OF_SHAPES = ("hidden_size", "sequence_parallel", "pipeline_dtype", "variable_seq_lengths")
"""The fields of the model's configuration that determine the shapes of tensors."""
_GROUPS = ["tp", "cp", "embd", "pos_embd", "pp", "dp_cp", "tp_dp_cp"]
"""The groups of ``parallel_state`` that Megatron-core's schedules collect."""


class ForwardBackward:
    """Runs batches as the block says, with the interface of Megatron-core's schedules.

    Args:
        settings: the block.
        zero_stage: 0, 1 with Megatron-core's distributed optimizer, or 2 or 3 with sharded chunks.
        iteration: returns the number of the training step that runs, from 1. By default batches for training are
            counted.
    """

    def __init__(self, settings: LgampConfig, zero_stage: int, iteration: Callable[[], int] | None = None) -> None:
        self._settings, self._zero_stage = settings, zero_stage
        self._trained = 0
        """Batches for training."""
        self._iteration = iteration if iteration is not None else lambda: self._trained
        self._trace: Trace | None = None
        self._program = lru_cache(maxsize=16)(self._build_program)
        self._pipelines: dict[dist.ProcessGroup, Pipeline] = {}
        self._budgets: WeakKeyDictionary[torch.nn.Module, Budget] = WeakKeyDictionary()
        """By the first chunk of each model, if there is one to keep to."""
        self._trained_models: WeakSet[torch.nn.Module] = WeakSet()
        """The first chunk of each model that was trained."""

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Iterator[Any] | list[Iterator[Any]] | None,
        model: torch.nn.Module | list[torch.nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: P2PCommunicator | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Runs the forward and backward passes of a batch. Returns the reports of the loss function by micro-batch on
        the last pipeline rank, and an empty list on the others.

        The arguments are those of ``megatron.core.pipeline_parallel.schedules.get_forward_backward_func``. Shapes
        travel with the first tensor of a link, so that ``adjust_tensor_shapes_fn`` has nothing to adjust.

        Raises ConfigError if the configuration of the model asks for something that another order of work cannot
        honour, and ActionError, which names rank and action, if an action fails. With one pipeline rank, StopIteration
        of an iterator comes through instead, and other batches may follow.
        """
        models = model if isinstance(model, list) else [model]
        batch = Batch(
            forward_step_func,
            iterators_of(data_iterator, len(models)),
            models,
            num_microbatches,
            pg_collection or ProcessGroupCollection.use_mpu_process_groups(_GROUPS),
            forward_only,
            collect_non_loss_data,
            first_val_step,
            force_all_reduce,
            self._settings.loss_chunk,
        )
        refuse_unsupported(batch)
        refuse_another_file(batch, self._settings, self._zero_stage)
        batch.budget = self._budget_of(batch)
        if self._zero_stage > 1:
            refuse_shards(batch, self._zero_stage)
        elif not forward_only and models[0] not in self._trained_models:
            refuse_common_parameters(models)
            self._trained_models.add(models[0])
        timers = batch.config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=batch.config.barrier_with_L1_time)
        self._run(batch, (seq_length, micro_batch_size, decoder_seq_length, adjust_tensor_shapes_fn is None))
        if timers is not None:
            timers("forward-backward").stop()
        return batch.reports

    def close(self) -> None:
        """Writes what is left of a trace."""
        if self._trace is not None:
            self._trace.close()

    def _run(self, batch: Batch, sizes: tuple[Any, ...]) -> None:
        # The script's own loop may let models take turns in a pipeline.
        shapes = *sizes, *(getattr(batch.config, field) for field in _OF_SHAPES)
        spec, program = self._program(
            batch.pipeline_ranks, len(batch.models), batch.rank, batch.micro_batches, batch.forward_only
        )
        if not self._pipelines:
            place = batch.rank, batch.groups.dp_cp.rank(), batch.device
            self._trace = trace_if_asked(self._settings, *place, ConfigError)
        if batch.groups.pp not in self._pipelines:
            self._pipelines[batch.groups.pp] = Pipeline(batch, shapes, self._settings.patience, self._trace)
        self._trained += not batch.forward_only
        self._pipelines[batch.groups.pp].run(batch, spec, program, shapes, self._iteration)

    def _budget_of(self, batch: Batch) -> Budget | None:
        if batch.forward_only or self._settings.recompute != "auto":
            return None
        model = batch.models[0]
        if model not in self._budgets:
            place = batch.device, batch.groups, len(batch.placement)
            self._budgets[model] = Budget(self._settings, *place, partition_of(batch.models))
        return self._budgets[model]

    def _build_program(
        self, pipeline_ranks: int, chunks_per_rank: int, rank: int, micro_batches: int, forward_only: bool
    ) -> tuple[ProgramSpec, list[Action]]:
        placement = placement_of(chunks_per_rank, pipeline_ranks)
        # Evaluation takes any number of micro-batches. Some schedules train with a multiple of the ranks only.
        trained = pipeline_ranks if forward_only else micro_batches
        spec = program_spec(
            self._settings, placement, trained, self._zero_stage, receives_on_arrival=posts_on_arrival()
        )
        # Megatron-core's loop steps the optimizer after the program, so nothing can be gathered after the step. Its
        # layers recompute by themselves.
        spec = replace(spec, defers_gathers=True, recomputes=False)
        spec = spec.evaluation(micro_batches) if forward_only else spec
        return spec, program_of(spec, rank)


_ADVICE = "pass seq_length and micro_batch_size as they are in the batch, or set variable_seq_lengths"
"""The advice in errors about shapes that change unexpectedly."""


class Pipeline:
    """Runs the batches of one pipeline rank. It keeps no model alive between batches.

    All ranks build it together at the first batch, unless there is one pipeline rank.

    Args:
        first: the first batch.
        shapes: what determines the shapes of tensors.
        patience: how many seconds ranks may wait for one that stands still.
        trace: records training steps; None if nobody has asked for it.
    """

    def __init__(self, first: Batch, shapes: Any, patience: float, trace: Trace | None) -> None:
        this_rank.start()
        alone = first.pipeline_ranks == 1
        pipelines = [[dist.get_rank()]] if alone else all_pipelines(first.groups.pp)
        hosts = None if alone else host_group()
        # Later batches may have more chunks per rank, and two come all the way around.
        around = placement_of(2, first.pipeline_ranks)
        shapes_vary = first.config.variable_seq_lengths
        self._links = pipeline_links(pipelines, around, first.device, hosts, shapes_vary, _ADVICE)
        self._shapes, self._patience, self._trace = shapes, patience, trace
        self._whole = DistributedData()
        self._timing = MegatronTiming()
        self._batch: Batch | None = None
        self._executors: dict[int, Executor] = {}
        """Those of whole models, by the number of chunks per rank."""
        self._sharded: WeakKeyDictionary[ZeroPartition, Executor] = WeakKeyDictionary()
        """Those of sharded models. A script may evaluate whole models, such as a teacher, beside them."""

    def run(
        self, batch: Batch, spec: ProgramSpec, program: Sequence[Action], shapes: Any, iteration: Callable[[], int]
    ) -> None:
        """Runs ``batch``.

        Args:
            spec: that of the program of all ranks.
            program: the actions of this rank.
            shapes: what determines the shapes of tensors. If it has changed, the links forget all shapes.
            iteration: returns the number of the training step. It is not called in evaluations, which may have none.
        """
        if shapes != self._shapes:
            self._links.reset(batch.config.variable_seq_lengths)
        executor, partition, budget = self._executor_of(batch), partition_of(batch.models), batch.budget
        executor.meter = None if budget is None else budget.meter
        if budget is not None:
            budget.begin_batch(program)
        try:
            self._shapes, self._batch, self._timing.timers = shapes, batch, batch.config.timers
            training = not batch.forward_only
            # forward_step reads its micro-batches itself.
            state = BatchState(batch.micro_batches, lambda _: (None, None), training, program=program)
            here = this_rank.whereabouts
            # Megatron-core lets torch compile some functions.
            notice_compilations()
            watched = here.in_batch(executor, f"batch {here.batch + 1}", training, self._patience)
            with watched, executor.run_batch(state):
                if training and self._trace is not None:
                    self._trace.begin(iteration(), executor, lambda: spec)
                if partition is None:
                    self._whole.begin(batch)
                elif training:
                    partition.refuse_thawed()
                executor.run(program)
                self._whole.end()
            if budget is not None:
                budget.end_batch(program)
        except ActionError as error:
            if budget is not None:
                budget.advise(error, executor.row)
            if batch.pipeline_ranks > 1 or not isinstance(error.__cause__, DataEndError):
                raise
            if all(action.kind is not Kind.BACKWARD for action in program[: executor.row]):
                # Another batch may launch all gathers again.
                self._whole.undo()
                if partition is not None:
                    for chunk in partition.chunk_units:
                        partition.release(chunk)
                self._links.broken = False
            raise StopIteration from error
        finally:
            self._batch = self._timing.timers = None
            self._whole.forget()

    def _executor_of(self, batch: Batch) -> Executor:
        partition = partition_of(batch.models)
        if partition is None:
            if len(batch.models) not in self._executors:
                self._executors[len(batch.models)] = self._new_executor(batch, Storage(self._whole))
            return self._executors[len(batch.models)]
        if partition not in self._sharded:
            # The executor keeps no partition alive, as a bound method of it would.
            held: ZeroPartition = proxy(partition)
            owns = (lambda chunk, tensor: held.owns(chunk, tensor)) if partition.frees_weights else None
            self._sharded[partition] = self._new_executor(batch, Storage(held, owns))
        return self._sharded[partition]

    def _new_executor(self, batch: Batch, storage: Storage) -> Executor:
        executor = Executor(
            Position(batch.placement, batch.rank, tuple(dist.get_process_group_ranks(batch.groups.dp_cp))),
            {chunk: ModelChunk(own, self._running) for own, chunk in enumerate(batch.chunks)},
            storage,
            self._links,
            Calls(None, self._finish_gradients, loss_gradient=self._loss_gradient),
            random_sources=[],
            timing=self._timing,
        )
        executor.trace = self._trace
        return executor

    def _running(self) -> Batch:
        assert self._batch is not None, "chunks compute while a batch runs"
        return self._batch

    def _finish_gradients(self) -> None:
        """Finishes the gradients, but leaves the optimizer's step to Megatron-core's loop."""
        batch = self._running()
        self._whole.end()
        # At stages 0 and 1 this is where Megatron-core waits for its reductions.
        with self._executor_of(batch).timing.time("reduce"):
            batch.finalize()

    def _loss_gradient(self, loss: torch.Tensor, micro_batches: int) -> torch.Tensor:
        return self._running().loss_gradient(loss, micro_batches)


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
