"""The engine behind ``deepspeed.initialize`` when ds_config.json has a ``ds_lgamp`` block."""

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime import utils as deepspeed_utils
from deepspeed.runtime.engine import ZERO_OPTIMIZATION
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec

from ds_lgamp.config import BLOCK, LgampConfig, chunk_bounds, place, program_spec
from ds_lgamp.integrations.deepspeed.instructions import INSTRUCTIONS, ProgramSchedule
from ds_lgamp.integrations.deepspeed.module import Layout, global_names, layer_types, layer_weights, place_layers
from ds_lgamp.integrations.deepspeed.optimizer import (
    ParameterGroups,
    PartitionedOptimizer,
    as_groups,
    check_elementwise,
    trainable_parameters,
)
from ds_lgamp.integrations.deepspeed.random_sources import layer_sources
from ds_lgamp.integrations.deepspeed.refusals import refuse_unsupported
from ds_lgamp.partition.unit import UnitParameter
from ds_lgamp.partition.zero_partition import TiedParameters, ZeroPartition, build_partition
from ds_lgamp.runtime.chunk import Chunk
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.runtime.links import ring_links
from ds_lgamp.schedule.program import ProgramSpec


class LgampEngine(PipelineEngine):
    """A :class:`PipelineEngine` that runs programs: layered or other orders, modular placement, ZeRO stage 0 to 3.

    Args:
        settings: the block.
        partition_method: how the module cuts its layers, for ``chunks_per_rank``.
    """

    def __init__(self, settings: LgampConfig, partition_method: str, **arguments: Any) -> None:
        module, config = arguments["model"], arguments["config_class"]
        self._lgamp_initialising = True
        self.zero_stage = int(config.zero_optimization_stage)
        """The stage the user asked for; DeepSpeed is told 1, whatever it is, so that its ZeRO hooks run."""
        self.lgamp_settings = settings
        refuse_unsupported(config, module, arguments.get("optimizer"))
        layout = _layout(settings, module, partition_method)
        self.program_spec: ProgramSpec = program_spec(
            settings, layout.placement, config.gradient_accumulation_steps, self.zero_stage
        )
        self._schedule = lru_cache(maxsize=8)(ProgramSchedule)
        self._schedule(self.program_spec, module.stage_id)
        self._place(module, layout, arguments)
        super().__init__(**arguments)
        self._lgamp_initialising = False
        self.executor = self._build_executor()
        self._partition.release_all()
        if self.training_data and self.data_iterator is None:
            self._build_data_iter(self.training_data)

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

    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
        check_elementwise(basic_optimizer, self.zero_allow_untested_optimizer())
        return ZERO_OPTIMIZATION

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer | None) -> PartitionedOptimizer:
        assert optimizer is not None, "refused before anything was built"
        # By identity: a callable may have made groups of its own from the parameters it was given.
        groups = {
            id(parameter): index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }
        self._partition = self._build_partition(groups)
        self.module.full_parameters = self._partition.full_parameters
        return PartitionedOptimizer(
            optimizer, self._partition, self.gradient_clipping(), self.module.world_group, self.data_parallel_group
        )

    def _scheduler_from_config(self, optimizer: PartitionedOptimizer) -> Any:
        return super()._scheduler_from_config(optimizer.optimizer)

    def _build_partition(self, groups: dict[int, int]) -> ZeroPartition:
        module = self.module
        layout = module.layout
        own = layout.chunks_of(module.stage_id)
        chunks: dict[int, list[UnitParameter]] = {chunk: [] for chunk in own}
        tied: dict[str, list[UnitParameter]] = {key: [] for key in module.tied_modules}
        for name, tensor in global_names(module):
            if isinstance(tensor, torch.nn.Parameter):
                group = groups.get(id(tensor)) if tensor.requires_grad else None
                entry = UnitParameter(name, tensor, group)
                first = name.split(".")
                if first[0] == "tied_modules":
                    tied[first[1]].append(entry)
                else:
                    chunks[layout.chunk_of(int(first[0]))].append(entry)
        return build_partition(
            chunks,
            [TiedParameters(key, entries, self._users(key), self._tie_group(key)) for key, entries in tied.items()],
            self.data_parallel_group,
            self.zero_stage,
            self.lgamp_settings.resident_chunks,
            self.device,
        )

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
        module = self.module
        chunks = {
            chunk: Chunk(functions, module.layout.bounds[chunk], self._seed_layer if module.seed_layers else None)
            for chunk, functions in module.chunk_functions.items()
        }
        return Executor(
            module.layout.placement,
            self.stage_id,
            chunks,
            self._partition,
            ring_links(self.grid.pipe_groups, self.device),
            self._loss,
            self._exec_optimizer_step,
            layer_sources(self.device),
        )

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

    def _exec_schedule(self, pipe_schedule: ProgramSchedule) -> None:
        spec = pipe_schedule.spec
        with self.executor.batch(spec.micro_batches, self._load_micro_batch, training=not spec.forward_only):
            super()._exec_schedule(pipe_schedule)
        self.module.micro_offset += spec.micro_batches
        self.fwd_outputs = [_detached(loss) for loss in self.executor.losses]
        if self.fwd_outputs and not spec.forward_only:
            self.total_loss = torch.stack(self.fwd_outputs).sum(0)

    def _load_micro_batch(self) -> tuple[Any, Any]:
        batch = self._next_batch()
        inputs = _to_device(batch[0], self.device) if self.is_first_stage() else None
        labels = _to_device(batch[1], self.device) if self.is_last_stage() else None
        return inputs, labels

    def _loss(self, outputs: Any, labels: Any) -> torch.Tensor:
        if self.eval_return_logits:
            self.outputs = outputs
        if self._compute_loss and self.module.loss_fn is not None:
            return self.module.loss_fn(outputs, labels)
        return outputs

    def _execute(self, action: Any) -> None:
        self.executor.execute(action)

    _INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, **dict.fromkeys(INSTRUCTIONS.values(), _execute)}

    def reset_activation_shape(self) -> None:
        """Between batches, on every rank: the next batch may have other shapes."""
        super().reset_activation_shape()
        if not self._lgamp_initialising:
            self.executor.links.reset()

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        raise NotImplementedError(f"engine.save_checkpoint does not work with a {BLOCK} block yet")

    def load_checkpoint(self, *arguments: Any, **options: Any) -> None:
        raise NotImplementedError(f"engine.load_checkpoint does not work with a {BLOCK} block yet")


def _layout(settings: LgampConfig, module: PipelineModule, partition_method: str) -> Layout:
    if settings.one_chunk_per_rank:
        bounds = [int(bound) for bound in module.parts]
    else:
        weights = [] if settings.chunks_per_rank is None else layer_weights(module, partition_method)
        bounds = chunk_bounds(settings, module.num_stages, layer_types(module), weights)
    return Layout(bounds, place(settings, len(bounds) - 1, module.num_stages))


def _detached(value: Any) -> Any:
    return value.detach() if torch.is_tensor(value) else tuple(map(_detached, value))


def _to_device(value: Any, device: torch.device) -> Any:
    """Tensors inside ``value`` on ``device``; lists become tuples, as everywhere in a pipeline."""
    if torch.is_tensor(value):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return tuple(_to_device(member, device) for member in value)
    return value
