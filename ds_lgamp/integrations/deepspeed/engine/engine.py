"""The engine behind ``deepspeed.initialize`` when ds_config.json has a ``ds_lgamp`` block."""

from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import ZERO_OPTIMIZATION
from deepspeed.runtime.keep_in_fp32 import keep_in_fp32_pattern
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule

from ds_lgamp.checkpoint.saver import Saver
from ds_lgamp.config import LgampConfig, program_spec
from ds_lgamp.integrations.deepspeed.checkpoint import methods
from ds_lgamp.integrations.deepspeed.config.optimizer_choice import check_elementwise, choose_optimizer, kernels_of
from ds_lgamp.integrations.deepspeed.config.precision import checks_overflow, input_dtype, loss_scaler
from ds_lgamp.integrations.deepspeed.engine.data import BatchLoader, OwnData
from ds_lgamp.integrations.deepspeed.engine.ending import finish_at_the_end
from ds_lgamp.integrations.deepspeed.engine.executor import build_executor
from ds_lgamp.integrations.deepspeed.engine.first_messages import no_first_messages
from ds_lgamp.integrations.deepspeed.engine.instructions import INSTRUCTIONS, ProgramSchedule
from ds_lgamp.integrations.deepspeed.engine.losses import Losses, add_losses, receive_loss, scaled_mean_gradient
from ds_lgamp.integrations.deepspeed.engine.monitor import monitor_if_asked, monitored
from ds_lgamp.integrations.deepspeed.engine.optimizer import PartitionedOptimizer
from ds_lgamp.integrations.deepspeed.engine.partition import partition_parameters
from ds_lgamp.integrations.deepspeed.engine.plan import plan_training
from ds_lgamp.integrations.deepspeed.engine.seeding import SeedLayer, layer_seeding
from ds_lgamp.integrations.deepspeed.engine.tensor_access import TensorAccess
from ds_lgamp.integrations.deepspeed.model.client_optimizer import place_with_groups
from ds_lgamp.integrations.deepspeed.model.deferred_init import children_with_memory, is_deferred, showing
from ds_lgamp.integrations.deepspeed.model.delayed_scaling import refuse_delayed_scaling
from ds_lgamp.integrations.deepspeed.model.materialise import DeferredLayers
from ds_lgamp.integrations.deepspeed.model.module import PlacedModule, over_pipeline
from ds_lgamp.integrations.deepspeed.model.random_sources import layer_sources
from ds_lgamp.integrations.deepspeed.model.selective import offers_selective, refuse_unless_offered, switch_on
from ds_lgamp.runtime.batch import BatchState
from ds_lgamp.runtime.random_state import undisturbed
from ds_lgamp.runtime.reproducible import laid_out
from ds_lgamp.runtime.stopwatch import Stopwatch
from ds_lgamp.schedule.spec import ProgramSpec


class LgampEngine(PipelineEngine):
    """A :class:`PipelineEngine` that runs programs: layered or other orders, modular placement, ZeRO stage 0 to 3.

    Args:
        settings: the block.
        partition_method: how the module cuts its layers; ``chunks_per_rank`` balances by it.
    """

    def __init__(self, settings: LgampConfig, partition_method: str, **arguments: Any) -> None:
        module, config = arguments["model"], arguments["config_class"]
        self._lgamp_initialising = True
        self.own_data: OwnData | None = None
        """Micro-batches of ``training_data``, on the ranks that need some."""
        self.zero_stage = int(config.zero_optimization_stage)
        """The stage the user asked for. DeepSpeed is told 1, whatever it is, so that its ZeRO hooks run."""
        self.lgamp_settings, self.partition_method = settings, partition_method
        layout, spec = plan_training(settings, config, module, partition_method, arguments.get("optimizer"))
        self.program_spec: ProgramSpec = spec
        if settings.recompute == "selective":
            refuse_unless_offered(over_pipeline(module, offers_selective(module)))
        self._schedule = lru_cache(maxsize=8)(ProgramSchedule)
        self._schedule(self.program_spec, module.stage_id)
        place_with_groups(module, layout, arguments)
        self._deferred = DeferredLayers(module, self._prepare_layers) if is_deferred(module) else None
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

    def _prepare_training(self) -> None:
        """Builds what runs batches, once DeepSpeed has built its part. Collective over all ranks."""
        self.random_sources = layer_sources(self.device)
        self.saver = Saver(self.lgamp_settings.asynchronous_save, self.lgamp_settings.keep_last)
        self._stopwatch = Stopwatch(self.device)
        self.executor = build_executor(
            self.placed,
            self._partition,
            self.lgamp_settings,
            self._before_layer(),
            self.random_sources,
            self._loss,
            partial(scaled_mean_gradient, self.optimizer),
            self._step,
            self._stopwatch,
            self.device,
        )
        self._partition.release_all()
        self._loader = BatchLoader(self.is_first_stage(), self.is_last_stage(), self.device, input_dtype(self._config))
        if self.training_data and self.is_last_stage() and self.own_data is None:
            # Other ranks have drawn already what this one draws now: their generators stay alike.
            with undisturbed(self.random_sources):
                self._build_data_iter(self.training_data)
        self._step_monitor = monitor_if_asked(self, self._loader, self._stopwatch)

    def _before_layer(self) -> SeedLayer | None:
        """Returns what the executor calls with (layer, micro-batch) ahead of every layer; None if nothing."""
        data_rank, reproducible = self.grid.data_parallel_id, self.lgamp_settings.reproducible
        return layer_seeding(self.placed, reproducible, self.random_sources, data_rank, lambda: self.global_steps)

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
        name, options = self._config.optimizer_name, self._config.optimizer_params or {}
        choice = choose_optimizer(name, options, self.device, kernels_of(self.device))
        return choice.kind(model_parameters, **choice.options)

    def _configure_distributed_model(self, model: PipelineModule) -> None:
        """Leaves out layers without memory. :meth:`_prepare_layers` does the same with each when it has some."""
        with showing(model, children_with_memory(model)):
            super()._configure_distributed_model(model)

    def _prepare_layers(self) -> None:
        """Casts, moves and broadcasts the layers that the module shows, as DeepSpeed does with a module."""
        self._cast_and_move()
        self._broadcast_model()

    def _cast_and_move(self) -> None:
        """Gives the module's tensors the data types of the configuration, and moves them to the device."""
        data_type, buffer_type = self._mixed_precision_dtypes()
        if data_type is not None:
            kept = keep_in_fp32_pattern(self.module, self._config.keep_in_fp32_modules, data_type)
            self._cast_module_mixed_precision(data_type, buffer_type, False, kept)
        self.module.to(self.device)

    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
        check_elementwise(basic_optimizer, self.zero_allow_untested_optimizer(), self.device)
        return ZERO_OPTIMIZATION

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer | None) -> PartitionedOptimizer:
        assert optimizer is not None, "refused before anything was built"
        module, group = self.module, self.data_parallel_group
        self._partition = partition_parameters(
            module, optimizer, self.lgamp_settings, self._config, self.zero_stage, group, self.device, self._deferred
        )
        module.full_parameters = self._partition.full_parameters
        module.adopt_parameters = self._partition.adopt_parameters
        self._tensor_access = TensorAccess(self._partition, optimizer)
        return PartitionedOptimizer(
            optimizer,
            self._partition,
            self.gradient_clipping(),
            module.world_group,
            group,
            reproducible=self.lgamp_settings.reproducible,
            skips_overflow=checks_overflow(self._config),
            loss_scaler=loss_scaler(self._config),
        )

    def _scheduler_from_config(self, optimizer: PartitionedOptimizer) -> Any:
        return super()._scheduler_from_config(optimizer.optimizer)

    def _build_data_iter(self, dataset: Any) -> None:
        super()._build_data_iter(dataset)
        if self.data_iterator is not None:
            self.own_data = OwnData(self.data_iterator)
            self.set_dataloader(self.own_data)

    # What DeepSpeed asks while it trains

    def _train_schedule(self) -> ProgramSchedule:
        planned = self.program_spec
        spec = program_spec(
            self.lgamp_settings, planned.placement, self.micro_batches, self.zero_stage, planned.receives_on_arrival
        )
        return self._schedule(spec, self.stage_id)

    def _inference_schedule(self, micro_batches: int) -> ProgramSchedule:
        return self._schedule(self.program_spec.evaluation(micro_batches), self.stage_id)

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """As PipelineEngine's. Where the data end, raises StopIteration on all ranks at the same step; the engine goes
        on with other data."""
        self.refuse_inside_block("train_batch")
        with monitored(self, self._step_monitor, self._loader):
            try:
                return super().train_batch(data_iter)
            except Exception:
                self.timers(TRAIN_BATCH_TIMER).stop()
                raise

    def eval_batch(self, data_iter: Any, *arguments: Any, **options: Any) -> Any:
        """As PipelineEngine's; StopIteration as in :meth:`train_batch`."""
        train_iterator = self.data_iterator
        try:
            return super().eval_batch(data_iter, *arguments, **options)
        except Exception:
            self.set_dataiterator(train_iterator)
            self.eval_return_logits = False
            raise

    def _exec_schedule(self, pipe_schedule: ProgramSchedule) -> None:
        spec = pipe_schedule.spec
        with self._stopwatch.time("data"):
            self._loader.pull(spec.micro_batches, self._next_batch)
        # Seeds of layers must not show in what the script draws, such as the order of its data.
        seeded = undisturbed(self.random_sources) if self.lgamp_settings.reproducible else nullcontext()
        batch = BatchState(spec.micro_batches, self._loader.take, not spec.forward_only, spec.turns_at_once)
        with seeded, self.executor.run_batch(batch):
            super()._exec_schedule(pipe_schedule)
        self.placed.micro_offset += spec.micro_batches
        self.fwd_outputs = self.executor.losses

    def _execute(self, action: Any) -> None:
        self.executor.execute(action)

    _INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, **dict.fromkeys(INSTRUCTIONS.values(), _execute)}

    def reset_activation_shape(self) -> None:
        """Lets the next batch have other shapes. Called between batches, on every rank."""
        super().reset_activation_shape()
        if not self._lgamp_initialising:
            self.executor.links.reset()

    # What the executor asks: the loss and the step

    def _loss(self, outputs: Any, labels: Any) -> Any:
        if self.eval_return_logits:
            self.outputs = outputs
        labels = laid_out(labels) if self.lgamp_settings.reproducible else labels
        computes = self._compute_loss and self.placed.loss_fn is not None
        loss = self.placed.loss_fn(outputs, labels) if computes else outputs
        if not self.executor.recomputing:
            reported = self.placed.get_additional_losses()
            self.total_additional_losses: Losses | None = add_losses(self.total_additional_losses, reported)
        return loss

    def _step(self) -> None:
        """Averages the loss over ranks, then steps the optimizer. After the step the data-parallel group is busy with
        gathers, and the loss would wait for them. An error in the average fails the batch."""
        if self.executor.losses:
            self.total_loss = torch.stack(self.executor.losses).sum(0)
        with torch.no_grad():
            self._batch_loss = super()._aggregate_total_loss() if self.is_last_stage() else receive_loss(self)
        with self._stopwatch.time("reduce"):
            self._partition.finish_gradients()
        with self._stopwatch.time("step"):
            self._exec_optimizer_step()
            self._partition.after_update()

    def _aggregate_total_loss(self) -> torch.Tensor:
        """The loss of the batch, which the step has averaged."""
        return self._batch_loss

    # Checkpoints

    save_checkpoint, load_checkpoint = methods.save_checkpoint, methods.load_checkpoint
    wait_for_checkpoint = methods.wait_for_checkpoint

    def refuse_inside_block(self, call: str) -> None:
        """Raises ConfigError inside a block of ``deepspeed.zero.GatheredParameters``, where ``call`` makes no sense."""
        self._tensor_access.refuse_inside_block(call)

    # The end

    def finish_gathers(self) -> None:
        """Waits until no parameters are on their way to this rank."""
        self._partition.finish_gathers()
        get_accelerator().synchronize()

    def destroy(self) -> None:
        try:
            # An engine that was refused half-built has nothing under way.
            if hasattr(self, "saver"):
                self.finish_gathers()
                self.saver.wait()
        finally:
            super().destroy()
