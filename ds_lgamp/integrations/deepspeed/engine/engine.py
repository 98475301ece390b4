"""The engine behind ``deepspeed.initialize`` when ds_config.json has a ``ds_lgamp`` block."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import ZERO_OPTIMIZATION
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule

from ds_lgamp.checkpoint.errors import CheckpointError
from ds_lgamp.checkpoint.saver import Saver
from ds_lgamp.config import LgampConfig
from ds_lgamp.integrations.deepspeed.checkpoint import save_and_load
from ds_lgamp.integrations.deepspeed.checkpoint.live_checkpoint import LiveCheckpoint, open_folder
from ds_lgamp.integrations.deepspeed.config.offload import check_offloaded, device_of_updates, live_folder, on_disk_of
from ds_lgamp.integrations.deepspeed.config.optimizer_choice import (
    check_elementwise,
    check_updates_alone,
    optimizer_from_json,
)
from ds_lgamp.integrations.deepspeed.config.optimizer_groups import prepare_optimizer
from ds_lgamp.integrations.deepspeed.config.precision import input_dtype
from ds_lgamp.integrations.deepspeed.engine import stock_methods
from ds_lgamp.integrations.deepspeed.engine.batch_terms import batch_terms
from ds_lgamp.integrations.deepspeed.engine.casting import prepare_layers
from ds_lgamp.integrations.deepspeed.engine.data import BatchLoader
from ds_lgamp.integrations.deepspeed.engine.ending import finish_at_the_end
from ds_lgamp.integrations.deepspeed.engine.executor import build_executor
from ds_lgamp.integrations.deepspeed.engine.first_messages import no_first_messages
from ds_lgamp.integrations.deepspeed.engine.host_updates import HostUpdateError
from ds_lgamp.integrations.deepspeed.engine.instructions import ProgramSchedule, RunAction
from ds_lgamp.integrations.deepspeed.engine.losses import average_loss, loss_of, scaled_mean_gradient
from ds_lgamp.integrations.deepspeed.engine.monitor import monitor_if_asked, monitored
from ds_lgamp.integrations.deepspeed.engine.nonfinite import nonfinite_check
from ds_lgamp.integrations.deepspeed.engine.optimizer import PartitionedOptimizer, build_optimizer
from ds_lgamp.integrations.deepspeed.engine.own_data import OwnData, complete_own_data, take_own_data
from ds_lgamp.integrations.deepspeed.engine.partition import open_disk, partition_parameters
from ds_lgamp.integrations.deepspeed.engine.plan import plan_training
from ds_lgamp.integrations.deepspeed.engine.seeding import kept_from_script
from ds_lgamp.integrations.deepspeed.engine.tensor_access import TensorAccess
from ds_lgamp.integrations.deepspeed.model.client_optimizer import place_with_groups
from ds_lgamp.integrations.deepspeed.model.deferred_init import children_with_memory, is_deferred, showing
from ds_lgamp.integrations.deepspeed.model.delayed_scaling import refuse_delayed_scaling
from ds_lgamp.integrations.deepspeed.model.first_values import share_values, values_of
from ds_lgamp.integrations.deepspeed.model.materialise import DeferredLayers
from ds_lgamp.integrations.deepspeed.model.module import PlacedModule, built_layers, over_pipeline
from ds_lgamp.integrations.deepspeed.model.random_sources import layer_sources
from ds_lgamp.integrations.deepspeed.model.selective import offers_selective, refuse_unless_offered, switch_on
from ds_lgamp.integrations.deepspeed.model.shared_buffers import SharedBuffers
from ds_lgamp.integrations.tracing import trace_if_asked
from ds_lgamp.runtime.batch import BatchState, LoadMicroBatch
from ds_lgamp.runtime.stopwatch import Stopwatch
from ds_lgamp.runtime.whereabouts import here
from ds_lgamp.schedule.spec import ProgramSpec


class LgampEngine(PipelineEngine):
    """A :class:`PipelineEngine` that runs programs: layered or other orders, modular placement, ZeRO stage 0 to 3.

    Args:
        settings: the block.
        partition_method: how the module cuts its layers; ``chunks_per_rank`` balances by it.
    """

    scales_in_step = False
    """Whether the script decides on the factor of the loss after the backward passes."""
    live: LiveCheckpoint | None = None

    def __init__(self, settings: LgampConfig, partition_method: str, **arguments: Any) -> None:
        module, config, optimizer = arguments["model"], arguments["config_class"], arguments.get("optimizer")
        self._lgamp_initialising = True
        self._lr_kwargs: Any = None
        """What the script passes to the scheduler's next step."""
        self.own_data: OwnData | None = None
        """Micro-batches of ``training_data``, on the ranks that need some."""
        self.zero_stage = int(config.zero_optimization_stage)
        """The stage that the user asked for. DeepSpeed is always told 1, so that its ZeRO hooks run."""
        self.lgamp_settings, self.partition_method = settings, partition_method
        plan = plan_training(
            settings, arguments["config"], config, module, partition_method, optimizer, self.scales_in_step
        )
        self.program_spec = plan.specs[module._grid.data_parallel_id]
        self._replicas = plan.replicas
        self._disk = open_disk(settings, config)
        self._live_folder = live_folder(config, settings)
        if self._live_folder is not None:
            open_folder(self._live_folder)
        if settings.recompute == "selective":
            refuse_unless_offered(over_pipeline(module, offers_selective(module)))
        self._schedule = lru_cache(maxsize=8)(ProgramSchedule)
        self._schedule(self.program_spec, module.stage_id)
        prepare_optimizer(module, config, arguments)
        self._shared_buffers = SharedBuffers(self._all_layers(module))
        place_with_groups(module, plan.layout, arguments)
        self._deferred = DeferredLayers(module, partial(prepare_layers, self)) if is_deferred(module) else None
        with no_first_messages():
            super().__init__(**arguments)
        if self._deferred is not None:
            # Not before: DeepSpeed counts parameters, and those of shards count nothing.
            self._deferred.register()
            self._deferred = None
        if settings.recompute == "selective":
            switch_on(module)
        refuse_delayed_scaling(module)
        self._lgamp_initialising = False
        self._prepare_training()
        finish_at_the_end(self)

    def _all_layers(self, module: PipelineModule) -> Iterable[torch.nn.Module]:
        """Returns the layers that are on this rank ahead of their placement."""
        return built_layers(module).values()

    def _prepare_training(self) -> None:
        """Builds what runs batches, once DeepSpeed has built its part. Collective over all ranks."""
        self.random_sources = layer_sources(self.device)
        # A copy would take the memory that a disk has spared.
        copies = self.lgamp_settings.asynchronous_save and not on_disk_of(self._config, self.lgamp_settings).state
        self.saver = Saver(copies, self.lgamp_settings.keep_last)
        self._stopwatch = Stopwatch(self.device)
        self._check = self.optimizer.check = nonfinite_check(
            self.lgamp_settings,
            self._config,
            self.placed,
            self._partition,
            lambda: self.executor.losses,
            lambda: self.global_steps,
            self._micro_batch_name,
            self.device,
        )
        self.executor = build_executor(
            self.placed,
            self._partition,
            self.lgamp_settings,
            self._disk,
            lambda: self.global_steps,
            self.random_sources,
            self._loss,
            partial(scaled_mean_gradient, self.optimizer),
            self._step,
            self.optimizer.update,
            self._stopwatch,
            self.device,
            None if self._check is None else self._check.seen.after_layer,
        )
        self.executor.trace = trace_if_asked(
            self.lgamp_settings, self.stage_id, self.grid.data_parallel_id, self.device
        )
        self._partition.release_all()
        self._loader = BatchLoader(self.is_first_stage(), self.is_last_stage(), self.device, input_dtype(self._config))
        complete_own_data(self)
        self._step_monitor = monitor_if_asked(self, self._loader, self._stopwatch)
        if self._live_folder is not None:
            self.live = LiveCheckpoint(self, self._live_folder)
        self.live_client_state: dict[Any, Any] = {}
        """The client_state of the states in ``live_checkpoint``: what load_checkpoint returns with one."""

    @property
    def placed(self) -> PlacedModule:
        """The module whose layers the engine trains."""
        return self.module

    # What DeepSpeed asks while it builds the engine

    def zero_optimization_stage(self) -> int:
        return 1

    def zero_optimization(self) -> bool:
        return True

    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss. During initialisation, DeepSpeed means the last pipeline rank."""
        if self._lgamp_initialising:
            return super().is_last_stage()
        return self.stage_id == self.program_spec.loss_rank

    def _loss_stage_global_rank(self) -> int:
        return self.grid.stage_to_global(self.program_spec.loss_rank)

    def _is_supported_optimizer(self, optimizer_name: str) -> bool:
        """True: an optimizer that is not supported was refused before anything was built."""
        return True

    def _configure_basic_optimizer(self, model_parameters: list[Any]) -> torch.optim.Optimizer:
        return optimizer_from_json(self._config, model_parameters, device_of_updates(self._config))

    def zero_use_cpu_optimizer(self) -> bool:
        """False: DeepSpeed would refuse other optimizers than its own on the host."""
        return False

    def _configure_distributed_model(self, model: PipelineModule) -> None:
        """Leaves out layers without memory. ``prepare_layers`` does the same with each when it has some."""
        with showing(model, children_with_memory(model)):
            super()._configure_distributed_model(model)

    def _broadcast_model(self) -> None:
        """Gives the layers that :attr:`module` shows the values of data-parallel rank 0, buffers too."""
        share_values(values_of(self.module), self.seq_data_parallel_group, self.device)

    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
        updating = device_of_updates(self._config)
        check_elementwise(basic_optimizer, self.zero_allow_untested_optimizer(), updating)
        if self.program_spec.offload is not None:
            check_offloaded(self._config, type(basic_optimizer))
        if self.lgamp_settings.overlap_update:
            check_updates_alone(type(basic_optimizer))
        return ZERO_OPTIMIZATION

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer | None) -> PartitionedOptimizer:
        assert optimizer is not None, "refused before anything was built"
        module, group = self.module, self.data_parallel_group
        self._partition = partition_parameters(
            module,
            optimizer,
            self.lgamp_settings,
            self._config,
            self.program_spec,
            group,
            self.device,
            self._deferred,
            self._disk,
        )
        self.tensor_access = TensorAccess(self._partition, optimizer)
        return build_optimizer(
            optimizer, self._partition, self.lgamp_settings, self._config, self.program_spec, module.world_group, group
        )

    def _scheduler_from_config(self, optimizer: PartitionedOptimizer) -> Any:
        return super()._scheduler_from_config(optimizer.optimizer)

    def _build_data_iter(self, dataset: Any) -> None:
        super()._build_data_iter(dataset)
        if self.data_iterator is not None:
            take_own_data(self)

    # What DeepSpeed asks while it trains

    def _train_schedule(self) -> ProgramSchedule:
        return self._schedule(self.own_spec, self.stage_id)

    @property
    def replica_specs(self) -> list[ProgramSpec]:
        """The program of a training step on every data-parallel rank, for the current batch size."""
        return self._replicas(self.micro_batches)

    @property
    def own_spec(self) -> ProgramSpec:
        return self.replica_specs[self.grid.data_parallel_id]

    def _inference_schedule(self, micro_batches: int) -> ProgramSchedule:
        return self._schedule(self.program_spec.evaluation(micro_batches), self.stage_id)

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """As PipelineEngine's. Where the data end, raises StopIteration on all ranks at the same step; the engine goes
        on with other data."""
        self.tensor_access.refuse_inside_block("train_batch")
        with monitored(self, self._step_monitor, self._loader):
            try:
                with self.in_batch(training=True):
                    loss = super().train_batch(data_iter)
            except Exception:
                if self.timers(TRAIN_BATCH_TIMER).started_:
                    self.timers(TRAIN_BATCH_TIMER).stop()
                raise
        self._end_step()
        return loss

    def _end_step(self) -> None:
        """Called when nothing of a step changes any more, but by updates that it has postponed."""
        if self.live is not None:
            self.live.end_step(self, self.live_client_state)

    def eval_batch(self, data_iter: Any, *arguments: Any, **options: Any) -> Any:
        """As PipelineEngine's; StopIteration as in :meth:`train_batch`."""
        train_iterator = self.data_iterator
        with self.in_batch(training=False):
            # Stock DeepSpeed begins with a barrier, where this rank would wait for ranks that train.
            self._loader.agree(batch_terms(self, "eval_batch"))
            try:
                return super().eval_batch(data_iter, *arguments, **options)
            except Exception:
                self.set_dataiterator(train_iterator)
                self.eval_return_logits = False
                raise

    def _exec_schedule(self, pipe_schedule: ProgramSchedule) -> None:
        spec = pipe_schedule.spec
        with self.executor.timing.time("data"):
            call = "eval_batch" if spec.forward_only else "train_batch"
            terms = batch_terms(self, call, spec.micro_batches if spec.forward_only else self.micro_batches)
            self._loader.pull(spec.micro_batches, self._next_batch, terms)
        if spec.forward_only:
            self._partition.catch_up()
        load = self._loader.take if spec.forward_only else self._noting(self._loader.take, spec)
        actions = pipe_schedule.actions
        batch = BatchState(
            self.micro_batches, load, not spec.forward_only, spec.turns_at_once, actions, spec.first_trained
        )
        kept = kept_from_script(self.random_sources, self.lgamp_settings.reproducible)
        with kept, self.executor.run_batch(batch):
            super()._exec_schedule(pipe_schedule)
        # The same on every rank, so that seeds as stock derives them differ between batches.
        replicas = [spec] if spec.forward_only else self.replica_specs
        self.placed.micro_offset += max(replica.micro_batches for replica in replicas)
        self.fwd_outputs = self.executor.losses
        self._act_on_nonfinite()

    def _noting(self, load: LoadMicroBatch, spec: ProgramSpec) -> LoadMicroBatch:
        """Begins a training batch for the check, if there is one. Returns what loads its micro-batches."""
        return load if self._check is None else self._check.seen.begin(spec.micro_batches, load)

    def _micro_batch_name(self, data_rank: int, micro_batch: int) -> str:
        return f"micro-batch {micro_batch} of data-parallel rank {data_rank}"

    def _act_on_nonfinite(self) -> None:
        if self._check is not None:
            self._check.act()

    def settle_nonfinite(self) -> None:
        """Acts on the last batch too, if it is not finite. Collective; may raise NonfiniteError on every rank."""
        if self._check is not None:
            self._check.settle()

    def forget_nonfinite(self) -> None:
        """Forgets the last batch, after other weights were loaded."""
        if self._check is not None:
            self._check.forget()

    @contextmanager
    def in_batch(self, training: bool, begins: bool = True, ends: bool = True) -> Iterator[None]:
        """Says where this rank is, in case it or another one stands still. Where the batch ``begins``, parameters have
        the values that the script gave them since the last one, and a trace of the step begins.

        Args:
            begins, ends: whether the batch does, and not only a part of it, behind which the script has its turn.
        """
        label = f"step {self.global_steps + 1}" if training else f"an evaluation after step {self.global_steps}"
        trace = self.executor.trace if training else None
        with here.in_batch(self.executor, label, training, self.lgamp_settings.patience, ends):
            if begins:
                self._partition.attach_parameters()
            if begins and training:
                self._partition.refuse_thawed()
            if begins and trace is not None:
                trace.begin(self.global_steps + 1, self.executor, lambda: self.own_spec)
            if begins and training:
                self._shared_buffers.look()
            try:
                yield
            except BaseException:
                if trace is not None:
                    trace.stop()
                raise
            if ends and training:
                self._shared_buffers.check()

    def _execute(self, action: Any) -> None:
        self.executor.execute(action)

    _INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, RunAction: _execute}

    def reset_activation_shape(self) -> None:
        """Lets the next batch have other shapes. Called between batches, on every rank."""
        super().reset_activation_shape()
        if not self._lgamp_initialising:
            self.executor.links.reset()

    # What the executor asks: the loss and the step

    _loss = loss_of

    def _step(self) -> None:
        """Averages the loss over ranks, then steps the optimizer. After the step the data-parallel group is busy with
        gathers, and the loss would wait for them. An error in the average fails the batch."""
        self._batch_loss = average_loss(self)
        self._step_optimizer()

    def _step_optimizer(self) -> None:
        if self.live is not None:
            with self.executor.timing.time("store"):
                self.live.before_step()
        with self.executor.timing.time("reduce"):
            self._partition.finish_gradients()
        with self.executor.timing.time("step"):
            self.optimizer.settle_gradients()
            self._exec_optimizer_step(self._lr_kwargs)
            self._partition.after_update()

    def _aggregate_total_loss(self) -> torch.Tensor:
        """The loss of the batch, which the step has averaged."""
        return self._batch_loss

    # Checkpoints

    save_checkpoint, load_checkpoint = save_and_load.save_checkpoint, save_and_load.load_checkpoint
    wait_for_checkpoint = save_and_load.wait_for_checkpoint
    save_16bit_model = stock_methods.save_16bit_model

    # What scripts may change, and what stays where it is

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """As PipelineEngine's. Raises ConfigError if whole micro-batches of all ranks do not make the batch."""
        micro_batch = self.train_micro_batch_size_per_gpu()
        stock_methods.check_batch_size(train_batch_size, micro_batch, self._drawing_ranks)
        super().set_train_batch_size(train_batch_size)

    @property
    def _drawing_ranks(self) -> int:
        """How many ranks draw micro-batches of their own."""
        return self.dp_world_size

    offload_states, reload_states = stock_methods.offload_states, stock_methods.reload_states

    # The end

    def finish_gathers(self) -> None:
        """Waits until no parameters are on their way to this rank. Acts on a last batch that is not finite.

        Raises HostUpdateError or OSError if an update on the host or its disk has failed, and CheckpointError if a live
        state cannot be written, unless a batch has said so.
        """
        self.settle_nonfinite()
        try:
            self._partition.finish_gathers()
            if self.live is not None:
                self.live.wait()
        except (HostUpdateError, OSError, CheckpointError):
            if not self.executor.links.broken:
                raise
        get_accelerator().synchronize()
        if self.executor.trace is not None:
            self.executor.trace.close()
            self.executor.trace = None

    def destroy(self) -> None:
        try:
            # An engine that was refused while it was built has nothing under way.
            if hasattr(self, "saver"):
                self.finish_gathers()
                self.saver.wait()
                if self.live is not None:
                    self.live.end()
        finally:
            super().destroy()
