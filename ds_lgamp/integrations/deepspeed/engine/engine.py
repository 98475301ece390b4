"""The engine behind ``deepspeed.initialize`` when ds_config.json has a ``ds_lgamp`` block."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import utils as deepspeed_utils
from deepspeed.runtime.engine import ZERO_OPTIMIZATION
from deepspeed.runtime.keep_in_fp32 import keep_in_fp32_pattern
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec
from deepspeed.utils.logging import logger

from ds_lgamp.checkpoint.folder import LATEST
from ds_lgamp.checkpoint.saver import Saver, wait_for_all
from ds_lgamp.config import BLOCK, ConfigError, LgampConfig, chunk_bounds, place, program_spec
from ds_lgamp.integrations.deepspeed.checkpoint import training_run
from ds_lgamp.integrations.deepspeed.config.optimizer_choice import check_elementwise, choose_optimizer, kernels_of
from ds_lgamp.integrations.deepspeed.config.precision import (
    accumulation_dtype,
    checks_overflow,
    input_dtype,
    loss_scaler,
)
from ds_lgamp.integrations.deepspeed.config.refusals import refuse_irreproducible, refuse_unsupported
from ds_lgamp.integrations.deepspeed.engine.data import BatchLoader, OwnData
from ds_lgamp.integrations.deepspeed.engine.instructions import INSTRUCTIONS, ProgramSchedule
from ds_lgamp.integrations.deepspeed.engine.monitor import StepMonitor, publish
from ds_lgamp.integrations.deepspeed.engine.optimizer import (
    ParameterGroups,
    PartitionedOptimizer,
    as_groups,
    trainable_parameters,
)
from ds_lgamp.integrations.deepspeed.engine.random_sources import layer_sources
from ds_lgamp.integrations.deepspeed.engine.tensor_access import TensorAccess
from ds_lgamp.integrations.deepspeed.model.deferred_init import children_with_memory, is_deferred, showing
from ds_lgamp.integrations.deepspeed.model.materialise import DeferredLayers
from ds_lgamp.integrations.deepspeed.model.module import (
    Layout,
    global_names,
    layer_types,
    layer_weights,
    over_pipeline,
    place_layers,
)
from ds_lgamp.integrations.deepspeed.model.selective import offers_selective, refuse_unless_offered, switch_on
from ds_lgamp.integrations.deepspeed.model.tensor_parallel import Sharing, sharing_of, tensor_group
from ds_lgamp.partition.flat_storage import UnitParameter
from ds_lgamp.partition.policy import ZeroPolicy
from ds_lgamp.partition.zero_partition import TiedParameters, ZeroPartition, build_partition
from ds_lgamp.runtime.chunk import Chunk
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.runtime.links import ring_links
from ds_lgamp.runtime.random_state import undisturbed
from ds_lgamp.runtime.reproducible import hashed_seed, laid_out
from ds_lgamp.runtime.stopwatch import Stopwatch
from ds_lgamp.schedule.program import ProgramSpec

_SHAPES_ADVICE = (
    "where shapes change between batches, call engine.reset_activation_shape() on every rank first; where they change "
    "within one, build the PipelineModule with dynamic_shape=True"
)


_engines: "WeakSet[LgampEngine]" = WeakSet()


def finish_engines() -> None:
    """Until nothing is under way that an engine began: saves and gathers. Collective over all ranks; raises
    CheckpointError on every rank if a save failed."""
    for engine in _engines:
        engine.finish_gathers()
    wait_for_all()


class LgampEngine(PipelineEngine):
    """A :class:`PipelineEngine` that runs programs: layered or other orders, modular placement, ZeRO stage 0 to 3.

    Args:
        settings: the block.
        partition_method: how the module cuts its layers, for ``chunks_per_rank``.
    """

    def __init__(self, settings: LgampConfig, partition_method: str, **arguments: Any) -> None:
        module, config = arguments["model"], arguments["config_class"]
        self._lgamp_initialising = True
        self.own_data: OwnData | None = None
        """Of ``training_data``, on the ranks that need some."""
        self.zero_stage = int(config.zero_optimization_stage)
        """The stage the user asked for; DeepSpeed is told 1, whatever it is, so that its ZeRO hooks run."""
        self.lgamp_settings = settings
        self.partition_method = partition_method
        refuse_unsupported(config, module, arguments.get("optimizer"))
        refuse_irreproducible(settings, config, module)
        if settings.recompute == "selective":
            refuse_unless_offered(over_pipeline(module, offers_selective(module)))
        layout = layout_of(settings, module, partition_method)
        self.program_spec: ProgramSpec = program_spec(
            settings, layout.placement, config.gradient_accumulation_steps, self.zero_stage
        )
        self._schedule = lru_cache(maxsize=8)(ProgramSchedule)
        self._schedule(self.program_spec, module.stage_id)
        self._place(module, layout, arguments)
        self._deferred = DeferredLayers(module, self._prepare_layers) if is_deferred(module) else None
        super().__init__(**arguments)
        if self._deferred is not None:
            # Not before: DeepSpeed counts parameters, and those of shards count nothing.
            self._deferred.register()
            self._deferred = None
        if settings.recompute == "selective":
            switch_on(module)
        self._lgamp_initialising = False
        self.random_sources = layer_sources(self.device)
        self.saver = Saver(settings.asynchronous_save, settings.keep_last)
        self._stopwatch = Stopwatch(self.device)
        self.executor = self._build_executor()
        self._partition.release_all()
        self._loader = BatchLoader(self.is_first_stage(), self.is_last_stage(), self.device, input_dtype(self._config))
        if self.training_data and self.is_last_stage() and self.own_data is None:
            # What it draws, other ranks have drawn: their generators stay alike.
            with undisturbed(self.random_sources):
                self._build_data_iter(self.training_data)
        # Often only rank 0 has a monitor, but all ranks measure.
        reports = self._loader.largest(int(self.monitor.enabled or self.wall_clock_breakdown()))
        self._step_monitor = StepMonitor(self._stopwatch) if reports else None
        _engines.add(self)

    def _place(self, module: PipelineModule, layout: Layout, arguments: dict[str, Any]) -> None:
        """Moves layers, and the user's parameter groups with them."""
        client, parameters = arguments.get("optimizer"), arguments.get("model_parameters")
        if isinstance(client, torch.optim.Optimizer):
            groups, grouped = client.param_groups, True
        else:
            groups, grouped = as_groups(trainable_parameters(module) if parameters is None else parameters)
            arguments["model_parameters"] = None
        parameter_groups = ParameterGroups(module, groups)
        place_layers(module, layout)
        parameter_groups.rewrite(module, groups)
        if not isinstance(client, torch.optim.Optimizer):
            arguments["model_parameters"] = groups if grouped else groups[0]["params"]

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
        """Refused before anything was built."""
        return True

    def _configure_basic_optimizer(self, model_parameters: list[Any]) -> torch.optim.Optimizer:
        name, options = self._config.optimizer_name, self._config.optimizer_params or {}
        choice = choose_optimizer(name, options, self.device, kernels_of(self.device))
        return choice.kind(model_parameters, **choice.options)

    def _configure_distributed_model(self, model: PipelineModule) -> None:
        """Layers without memory are left out; :meth:`_prepare_layers` does the same with each when it has some."""
        with showing(model, children_with_memory(model)):
            super()._configure_distributed_model(model)

    def _prepare_layers(self) -> None:
        """Casts, moves and broadcasts what the module shows, as DeepSpeed does with a module."""
        data_type, buffer_type = self._mixed_precision_dtypes()
        if data_type is not None:
            kept = keep_in_fp32_pattern(self.module, self._config.keep_in_fp32_modules, data_type)
            self._cast_module_mixed_precision(data_type, buffer_type, False, kept)
        self.module.to(self.device)
        self._broadcast_model()

    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
        check_elementwise(basic_optimizer, self.zero_allow_untested_optimizer(), self.device)
        return ZERO_OPTIMIZATION

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer | None) -> PartitionedOptimizer:
        assert optimizer is not None, "refused before anything was built"
        # By identity: a callable may have made groups of its own from the parameters it was given.
        groups = {
            id(parameter): index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }
        self._partition = self._build_partition(groups)
        self.module.full_parameters = self._partition.full_parameters
        self.module.adopt_parameters = self._partition.adopt_parameters
        self._tensor_access = TensorAccess(self._partition, optimizer)
        return PartitionedOptimizer(
            optimizer,
            self._partition,
            self.gradient_clipping(),
            self.module.world_group,
            self.data_parallel_group,
            reproducible=self.lgamp_settings.reproducible,
            skips_overflow=checks_overflow(self._config),
            loss_scaler=loss_scaler(self._config),
        )

    def _scheduler_from_config(self, optimizer: PartitionedOptimizer) -> Any:
        return super()._scheduler_from_config(optimizer.optimizer)

    def _build_partition(self, groups: dict[int, int]) -> ZeroPartition:
        module = self.module
        layout = module.layout
        own = layout.chunks_of(module.stage_id)
        tensor_ranks = tensor_group(module)
        chunks: dict[int, list[UnitParameter]] = {chunk: [] for chunk in own}
        tied: dict[str, list[UnitParameter]] = {key: [] for key in module.tied_modules}
        for name, tensor in global_names(module):
            if isinstance(tensor, torch.nn.Parameter):
                group = groups.get(id(tensor)) if tensor.requires_grad else None
                sharing = Sharing() if tensor_ranks is None else sharing_of(name, tensor)
                entry = UnitParameter(name, tensor, group, *sharing)
                first = name.split(".")
                if first[0] == "tied_modules":
                    tied[first[1]].append(entry)
                else:
                    chunks[layout.chunk_of(int(first[0]))].append(entry)
        policy = ZeroPolicy(
            self.data_parallel_group,
            self.zero_stage,
            accumulation_dtype(self._config),
            self._config.communication_data_type,
            self.lgamp_settings.reproducible,
            tensor_ranks,
        )
        build = partial(
            build_partition,
            chunks,
            # In the order of all ranks: deferred tied modules are broadcast as they are built.
            [TiedParameters(key, tied[key], self._users(key), self._tie_group(key)) for key in sorted(tied)],
            policy,
            self.lgamp_settings.resident_chunks,
            self.device,
        )
        if self._deferred is None:
            return build()
        with undisturbed(layer_sources(self.device)):
            partition = build(materialise=self._deferred.with_values)
            self._deferred.build_rest()
        return partition

    def _users(self, key: str) -> list[int]:
        """The chunks of this rank that use the tied module ``key``."""
        layout, specs = self.module.layout, self.module._layer_specs
        return [
            chunk
            for chunk in layout.chunks_of(self.module.stage_id)
            if any(isinstance(specs[i], TiedLayerSpec) and specs[i].key == key for i in layout.layers(chunk))
        ]

    def _tie_group(self, key: str) -> dist.ProcessGroup | None:
        tied = self.module.tied_comms.get(key)
        return tied["group"] if tied is not None and len(tied["ranks"]) > 1 else None

    def _build_executor(self) -> Executor:
        module, reproducible = self.module, self.lgamp_settings.reproducible
        between_layers = laid_out if reproducible else None
        chunks = {
            chunk: Chunk(functions, module.layout.bounds[chunk], self._before_layer(), between_layers)
            for chunk, functions in module.chunk_functions.items()
        }
        return Executor(
            module.layout.placement,
            self.stage_id,
            chunks,
            self._partition,
            ring_links(self.grid.pipe_groups, self.device, module.dynamic_shape, _SHAPES_ADVICE),
            self._loss,
            self._step,
            [] if reproducible else self.random_sources,
            recompute=self.lgamp_settings.recompute == "full",
            loss_gradient=self._loss_gradient,
            timing=self._stopwatch,
        )

    def _loss_gradient(self, loss: torch.Tensor, micro_batches: int) -> torch.Tensor:
        """Of the scaled mean over micro-batches. A product: it is infinite where a half-precision loss cannot hold the
        scale, which the step then finds. Filling a tensor with such a number may be an error."""
        return torch.ones_like(loss) * (self.optimizer.loss_scale / micro_batches)

    def _before_layer(self) -> Callable[[int, int], None] | None:
        """What seeds generators ahead of a layer, if anything does. What the module asks for has the last word."""
        seed_layer = self._seed_layer if self.module.seed_layers else None
        if not self.lgamp_settings.reproducible:
            return seed_layer

        def seed_everything(layer: int, micro_batch: int) -> None:
            kind = "training" if self.module.training else "evaluation"
            where = int(self.module.base_seed), kind, self.global_steps, layer, micro_batch, self.grid.data_parallel_id
            seed = hashed_seed(*where)
            for source in self.random_sources:
                source.seed(seed)
            if seed_layer is not None:
                seed_layer(layer, micro_batch)

        return seed_everything

    def _seed_layer(self, layer: int, micro_batch: int) -> None:
        """The seed stock DeepSpeed's ``PipelineModule.forward`` gives this layer for this micro-batch."""
        seed = self.module.base_seed * (self.module.micro_offset + micro_batch + 2) + layer
        (self.module.seed_fn or deepspeed_utils.set_random_seed)(seed)

    # What DeepSpeed asks while it trains

    def _train_schedule(self) -> ProgramSchedule:
        spec = program_spec(self.lgamp_settings, self.program_spec.placement, self.micro_batches, self.zero_stage)
        return self._schedule(spec, self.stage_id)

    def _inference_schedule(self, micro_batches: int) -> ProgramSchedule:
        return self._schedule(self.program_spec.evaluation(micro_batches), self.stage_id)

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """As PipelineEngine's. Where the data end, raises StopIteration on all ranks at the same step; the engine goes
        on with other data."""
        self._tensor_access.refuse_inside_block("train_batch")
        if self._step_monitor is not None:
            self._loader.tokens = 0
            self._step_monitor.begin()
        try:
            loss = super().train_batch(data_iter)
        except Exception:
            self.timers(TRAIN_BATCH_TIMER).stop()
            raise
        if self._step_monitor is not None:
            publish(self, self._step_monitor.finish(self._loader.tokens, self.device))
        return loss

    def eval_batch(self, data_iter: Any, *arguments: Any, **options: Any) -> Any:
        """As PipelineEngine's; StopIteration as in :meth:`train_batch`."""
        train_iterator = self.data_iterator
        try:
            return super().eval_batch(data_iter, *arguments, **options)
        except Exception:
            self.set_dataiterator(train_iterator)
            self.eval_return_logits = False
            raise

    def _step(self) -> None:
        """Averages the loss over ranks, then steps the optimizer. Behind the step the data-parallel group is busy with
        gathers, for which the loss would wait."""
        if self.executor.losses:
            self.total_loss = torch.stack(self.executor.losses).sum(0)
        with torch.no_grad():
            self._batch_loss = self._average_loss()
        self._exec_optimizer_step()

    def _aggregate_total_loss(self) -> torch.Tensor:
        """That of the batch: the step has averaged it."""
        return self._batch_loss

    def _average_loss(self) -> torch.Tensor:
        """As PipelineEngine's, which has ranks without the loss wait for their device."""
        if self.is_last_stage():
            return super()._aggregate_total_loss()
        additional = self.module.get_additional_losses()
        losses = torch.zeros(2 + len(additional or ()), device=self.device)
        dist.broadcast(losses, src=self._loss_stage_global_rank(), group=self.grid.get_pipe_parallel_group())
        self.dp_group_loss, loss, *others = (member.clone() for member in losses)
        if additional is not None:
            self.agg_additional_losses = OrderedDict(zip(additional, others))
        return loss

    def _exec_schedule(self, pipe_schedule: ProgramSchedule) -> None:
        spec = pipe_schedule.spec
        with self._stopwatch.time("data"):
            self._loader.pull(spec.micro_batches, self._next_batch)
        # Seeds of layers must not show in what the script draws, such as the order of its data.
        seeded = undisturbed(self.random_sources) if self.lgamp_settings.reproducible else nullcontext()
        batch = self.executor.batch(
            spec.micro_batches, self._loader.take, training=not spec.forward_only, turns_at_once=spec.turns_at_once
        )
        with seeded, batch:
            super()._exec_schedule(pipe_schedule)
        self.module.micro_offset += spec.micro_batches
        self.fwd_outputs = self.executor.losses

    def _build_data_iter(self, dataset: Any) -> None:
        super()._build_data_iter(dataset)
        if self.data_iterator is not None:
            self.own_data = OwnData(self.data_iterator)
            self.set_dataloader(self.own_data)

    def _loss(self, outputs: Any, labels: Any) -> Any:
        if self.eval_return_logits:
            self.outputs = outputs
        labels = laid_out(labels) if self.lgamp_settings.reproducible else labels
        computes = self._compute_loss and self.module.loss_fn is not None
        loss = self.module.loss_fn(outputs, labels) if computes else outputs
        if not self.executor.recomputing:
            self._add_additional_losses()
        return loss

    def _add_additional_losses(self) -> None:
        """Sums what the module reports of a micro-batch, as stock does."""
        reported = self.module.get_additional_losses()
        if reported is not None:
            totals = self.total_additional_losses or {}
            self.total_additional_losses: dict[str, torch.Tensor] | None = OrderedDict(
                (name, totals.get(name, 0) + value.detach()) for name, value in reported.items()
            )

    def _execute(self, action: Any) -> None:
        self.executor.execute(action)

    _INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, **dict.fromkeys(INSTRUCTIONS.values(), _execute)}

    def reset_activation_shape(self) -> None:
        """Between batches, on every rank: the next batch may have other shapes."""
        super().reset_activation_shape()
        if not self._lgamp_initialising:
            self.executor.links.reset()

    # Checkpoints

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As PipelineEngine's, with random states and the position in ``training_data``; loads at any layout. Raises
        CheckpointError on every rank if it cannot be written; while it is written in the background, the next call
        does."""
        if exclude_frozen_parameters:
            raise ConfigError(f"exclude_frozen_parameters is True, but a {BLOCK} block does not support it; remove it")
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        training_run.save(self, Path(save_dir), tag, {} if client_state is None else client_state, save_latest)
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """As PipelineEngine's, for what :meth:`save_checkpoint` wrote, at any layout. Raises CheckpointError on every
        rank, and changes nothing, if the checkpoint does not fit."""
        if custom_load_fn is not None:
            raise ConfigError(f"custom_load_fn is given, but a {BLOCK} block does not support it; remove it")
        self._tensor_access.refuse_inside_block("load_checkpoint")
        wait_for_all()
        tag = training_run.latest(Path(load_dir)) if tag is None else str(tag)
        if tag is None:
            logger.warning(f"{load_dir} has no file '{LATEST}'; pass a tag, or save a checkpoint first")
            return None, None
        folder = Path(load_dir) / tag
        parts = training_run.Parts(
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            progress=not load_module_only,
        )
        return str(folder), training_run.load(self, folder, parts)

    def wait_for_checkpoint(self) -> None:
        """Until the last save is on the disk. Collective; raises CheckpointError on every rank if it failed."""
        self.saver.wait()

    def finish_gathers(self) -> None:
        """Until no parameters are on their way to this rank."""
        self._partition.finish_gathers()
        get_accelerator().synchronize()

    def destroy(self) -> None:
        try:
            # Not of an engine that was refused half-built.
            if hasattr(self, "saver"):
                self.finish_gathers()
                self.saver.wait()
        finally:
            super().destroy()


def layout_of(settings: LgampConfig, module: PipelineModule, partition_method: str) -> Layout:
    if settings.one_chunk_per_rank:
        bounds = [int(bound) for bound in module.parts]
    else:
        weights = [] if settings.chunks_per_rank is None else layer_weights(module, partition_method)
        bounds = chunk_bounds(settings, module.num_stages, layer_types(module), weights)
    return Layout(bounds, place(settings, len(bounds) - 1, module.num_stages))
