"""Computes what ``ds_lgamp run --explain`` says of a user's script, without training.

The script runs, unedited and in one process, up to ``deepspeed.initialize``; the other ranks are imagined. The engine's
own functions compute what would have followed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from deepspeed.runtime.config import DeepSpeedConfig, DtypeEnum
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig, read_block
from ds_lgamp.cost.activations import ActivationBytes
from ds_lgamp.cost.budget import Decision, Pair, kept_within, space_left
from ds_lgamp.cost.memory import Memory, memory_over_time, rank_memory
from ds_lgamp.cost.offload import DiskUse, disk_use, host_beside_disk, live_use
from ds_lgamp.cost.traffic import (
    Traffic,
    all_to_alls,
    bus_bytes,
    bytes_between_nodes,
    collective_bytes,
    hop_bytes,
    predict_traffic,
)
from ds_lgamp.cost.units import ElementBytes, Sharding, Travel, UnitSize
from ds_lgamp.integrations.deepspeed.config.check_keys import for_deepspeed
from ds_lgamp.integrations.deepspeed.config.client_optimizer import on_shards
from ds_lgamp.integrations.deepspeed.config.precision import parameter_dtype
from ds_lgamp.integrations.deepspeed.config.zero import Home, on_disk_of
from ds_lgamp.integrations.deepspeed.engine.budget import why_not_alone
from ds_lgamp.integrations.deepspeed.engine.memory import (
    Update,
    comes_later,
    element_bytes,
    sharding_of,
    update_of,
)
from ds_lgamp.integrations.deepspeed.engine.plan import plan_training
from ds_lgamp.integrations.deepspeed.explain.activations import (
    UnknownActivations,
    first_micro_batch,
    measure_activations,
)
from ds_lgamp.integrations.deepspeed.explain.facts import Explanation, RankFacts, SharedFacts, TokenFacts
from ds_lgamp.integrations.deepspeed.explain.imagined import ImaginedModel, ImaginedRank
from ds_lgamp.integrations.deepspeed.model.auto_ep import is_replaced
from ds_lgamp.integrations.deepspeed.model.construction import is_deferred
from ds_lgamp.integrations.deepspeed.model.experts import (
    exchange_of,
    make_groups,
    refuse_around_experts,
    sizes_of,
    with_groups,
)
from ds_lgamp.integrations.deepspeed.model.module import Layout, layer_types
from ds_lgamp.integrations.deepspeed.model.recomputation import offers_selective, refuse_unless_offered
from ds_lgamp.integrations.deepspeed.model.shared_tensors import check_tensors
from ds_lgamp.integrations.deepspeed.plain.build import (
    check_layout,
    divide_experts,
    refuse_other_parallelism,
    sequence_ranks,
)
from ds_lgamp.integrations.deepspeed.plain.layers import in_pipelines
from ds_lgamp.integrations.deepspeed.plain.wrapper import split_of
from ds_lgamp.integrations.program_spec import budget_of, over_budget
from ds_lgamp.partition.zero_partition import ZeroPartition, unit_sizes
from ds_lgamp.schedule.actions import Action, Kind, Program
from ds_lgamp.schedule.costs import UNIT_DURATIONS, Costs, sized_costs, uniform_costs
from ds_lgamp.schedule.placement import split_automatic
from ds_lgamp.schedule.program import build_program, build_rank_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.validate import validate


def explain(arguments: dict[str, Any], partition_method: str, calls_engine: bool = False) -> Explanation:
    """Returns what the engine of these arguments would do, on the data-parallel ranks with the most micro-batches.

    Raises ConfigError if there is no block, and if the engine would.

    Args:
        arguments: those of :func:`plan_training`, with ``training_data`` and ``collate_fn`` if the script gives some.
        calls_engine: whether the script calls ``engine(batch)``. It then decides on the factor of the loss after the
            backward passes, and gives micro-batches to the engine itself.
    """
    module, config = arguments["model"], arguments["config_class"]
    settings = enabled_block(arguments["config"])
    budget = budget_of(settings, get_accelerator().device_name())
    _make_expert_groups(module, module, config)
    if not (calls_engine or arguments.get("optimizer") or config.optimizer_name):
        arguments = {**arguments, "optimizer": comes_later}
    arguments = {**arguments, "optimizer": on_shards(module, arguments.get("optimizer"))}
    plan = plan_training(settings, arguments, partition_method, config.gradient_accumulation_steps, calls_engine)
    spec = max(plan.specs, key=lambda replica: replica.micro_batches)
    program = _validated(spec)
    update, model = update_of(arguments.get("optimizer"), config), ImaginedModel(module, plan.layout)
    # Layers of other pipeline ranks may be divided otherwise.
    _make_expert_groups(module, model.modules, config)
    refuse_around_experts(model.modules, settings, spec, plan.travel, update.needs_whole_tensors, is_deferred(module))
    _refuse_recomputation(settings.recompute, module, model)
    activations, unknown = None, None
    try:
        if calls_engine:
            raise UnknownActivations("the script gives micro-batches to the engine only after deepspeed.initialize")
        samples = config.train_micro_batch_size_per_gpu
        micro_batch = first_micro_batch(arguments.get("training_data"), arguments.get("collate_fn"), samples)
        with with_groups(model.modules):
            activations = measure_activations(
                module, model.layers, plan.layout.bounds, micro_batch, spec, settings, config
            )
    except UnknownActivations as reason:
        unknown = str(reason)
    data_ranks, tensor_ranks = (module.topology().get_dim(axis) or 1 for axis in ("data", "model"))
    step = Step(spec, settings, config, data_ranks, tensor_ranks, activations, update, plan.home_of_frozen, plan.travel)
    held = model.ranks(settings, config, spec, update)
    if settings.recompute == "auto" and activations is not None:
        spec = step.within(space_left(get_accelerator().total_memory()) if budget is None else budget, held)
        program = _validated(spec)
    return Explanation(
        spec=spec,
        settings=settings,
        home_of_frozen=plan.home_of_frozen,
        travel=plan.travel,
        data_ranks=data_ranks,
        tensor_ranks=tensor_ranks,
        micro_batch_shares=[replica.micro_batches for replica in plan.specs],
        precision=DtypeEnum(parameter_dtype(config)).name,
        optimizer=update.name,
        layers=module._num_layers,
        parameters=model.parameters,
        bubble=simulate(spec, program, _costs(spec, plan.layout, settings, module)).bubble,
        activations_unknown=unknown,
        ranks=[step.facts(rank, *each) for rank, each in enumerate(zip(held, program))],
    )


def _refuse_recomputation(asked: str, module: PipelineModule, model: ImaginedModel) -> None:
    if asked == "selective":
        refuse_unless_offered(map(offers_selective, model.built))
    if asked == "auto" and (complaint := why_not_alone(module, model.modules)) is not None:
        raise ConfigError(complaint)


def _validated(spec: ProgramSpec) -> Program:
    program = build_program(spec)
    validate(spec, program)
    return program


def _make_expert_groups(module: PipelineModule, layers: nn.Module, config: Any) -> None:
    """Makes the groups of ranks that divide the experts of ``layers``, as the engine of ``module`` does."""
    ranks = dist.get_process_group_ranks(module._grid.get_data_parallel_group())
    make_groups(sizes_of(layers), ranks, bool(config.use_data_before_expert_parallel_))


def enabled_block(config: dict[str, Any]) -> LgampConfig:
    """Returns the block. Raises ConfigError if there is none, or if it is not enabled."""
    settings = read_block(config)
    if settings is None:
        raise ConfigError(f'there is no enabled {BLOCK} block, stock DeepSpeed would run; add "{BLOCK}": {{}}')
    return settings


def _costs(spec: ProgramSpec, layout: Layout, settings: LgampConfig, module: PipelineModule) -> Costs:
    """Returns the costs of chunks. They are equal, unless layers are shared by speed."""
    if settings.pipeline_rank_speeds is None:
        return uniform_costs(spec, UNIT_DURATIONS)
    blocks = split_automatic(layer_types(module))
    starts = [blocks.index(bound) for bound in layout.bounds]
    layers = [end - start for start, end in zip(starts, starts[1:])]
    return sized_costs(spec, UNIT_DURATIONS, layers, settings.pipeline_rank_speeds)


def explain_plain(settings: LgampConfig, arguments: dict[str, Any]) -> Explanation:
    """Returns what the engine would do that ``deepspeed.initialize`` builds of these ``arguments``: that of a
    PipelineModule with the layers of the model. Raises ConfigError if the engine would.

    Unlike the engine it frees no parameter, because it asks for the sizes of all layers.
    """
    model = arguments["model"]
    refuse_other_parallelism(model)
    check_tensors(model)
    split, settings = split_of(model, settings)
    if not is_replaced(model):
        # With the speeds of a cluster, this is a second explanation of the same model.
        divide_experts(model, settings, arguments)
    layers, module = in_pipelines(split, model, settings)
    check_layout(arguments.get("mpu"), module.mpu(), settings)
    config = _configuration_of_pipelines(arguments, module.num_stages)
    config[BLOCK] = {**config[BLOCK], "outputs": settings.outputs}
    config_class = DeepSpeedConfig(for_deepspeed(config), module.mpu())
    of_engine = {**arguments, "model": module, "config": config, "config_class": config_class}
    return replace(explain(of_engine, "uniform", calls_engine=True), balance_bytes=layers.sums)


def _configuration_of_pipelines(arguments: dict[str, Any], pipeline_ranks: int) -> dict[str, Any]:
    """Returns the configuration in which a pipeline computes the micro-batches of all of its ranks. Ranks that share a
    sequence count as if each had one of its own."""
    given = arguments["config_class"]
    return {
        **arguments["config"],
        "train_batch_size": int(given.train_batch_size * sequence_ranks(arguments.get("mpu"))),
        "train_micro_batch_size_per_gpu": given.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": given.gradient_accumulation_steps * pipeline_ranks,
    }


class Step(NamedTuple):
    """A training step of an imagined engine, on the data-parallel ranks with the most micro-batches."""

    spec: ProgramSpec
    settings: LgampConfig
    config: Any
    """The DeepSpeedConfig."""
    data_ranks: int
    tensor_ranks: int
    activations: ActivationBytes | None
    """None if they are unknown."""
    update: Update
    home_of_frozen: Home
    travel: Travel

    @property
    def _sharding(self) -> Sharding:
        return sharding_of(self.spec, self.settings, self.data_ranks)

    @property
    def _element_bytes(self) -> ElementBytes:
        return element_bytes(self.config, self.update, self.travel, self.settings.stochastic_rounding)

    def facts(self, rank: int, held: ImaginedRank, actions: Sequence[Action]) -> RankFacts:
        """Returns what a pipeline rank does in a step, its ``actions``, with what it holds."""
        spec, activations, size = self.spec, self.activations, self._element_bytes
        stage, hierarchy, offload, sharding = spec.zero_stage, spec.hierarchy, spec.offload, self._sharding
        chunks, units = held.chunks, unit_sizes(held.partition, self.home_of_frozen)
        if activations is not None:
            chunks = [replace(facts, forward_flops=activations.flops[facts.chunk]) for facts in chunks]
        sharing = hierarchy.node_ranks if hierarchy is not None and hierarchy.replicated else self.data_ranks
        step = self.update.memory(held.partition, stage, sharing) if self.tensor_ranks == 1 else None
        memory, disk = self._memory_and_disk(actions, units, size, step)
        memory = replace(memory, weights=memory.weights + held.constants, peak=memory.peak + held.constants)
        update = self.update.traffic(held.partition, stage, sharing, self.settings.reproducible)
        loads = offload is not None or self.home_of_frozen == "host" or spec.stores_weights
        bus = bus_bytes(actions, units, offload, sharding, size) if loads else None
        leaves_live_states = self.settings.live_checkpoint is not None
        return RankFacts(
            pipeline_rank=rank,
            chunks=chunks,
            tied=held.tied,
            parameters=sum(facts.parameters for facts in chunks) + sum(facts.parameters for facts in held.tied),
            recomputed=sum(action.kind is Kind.BACKWARD and action.recomputed for action in actions),
            recomputed_in_part=sum(action.kind is Kind.BACKWARD and action.selective for action in actions),
            traffic=self._traffic(actions, units),
            tied_sums=sum(unit.copies > 1 for unit in units),
            collective_bytes_sent=sum(collective_bytes(actions, unit, sharding, size) for unit in units),
            bytes_between_nodes=None
            if hierarchy is None
            else sum(bytes_between_nodes(actions, unit, sharding, size) for unit in units),
            update_collectives=update.collectives,
            update_bytes_sent=update.sent,
            memory=memory,
            constants=held.constants,
            bus_bytes_loaded=None if bus is None else bus.loaded,
            bus_bytes_stored=None if bus is None else bus.stored,
            disk=disk,
            live=live_use(units, sharding, size, spec.updates) if leaves_live_states else None,
            hop_bytes=None if activations is None else hop_bytes(rank, spec.placement, spec.micro_batches, activations),
            shared=self._shared(actions, held.partition, units, size),
            tokens=self._tokens(actions, held.expert_layers),
        )

    def within(self, limit: int, held: Sequence[ImaginedRank]) -> ProgramSpec:
        """Returns the program of ranks that recompute only what they must to stay within a limit of bytes. Raises
        ConfigError if one would need more although it recomputed everything."""
        decisions = [self._decision(rank, each, limit) for rank, each in enumerate(held)]
        kept, selective = (frozenset[Pair]().union(*each) for each in zip(*decisions))
        return replace(self.spec, kept=kept, selective=selective)

    def _decision(self, rank: int, held: ImaginedRank, limit: int) -> Decision:
        assert self.activations is not None, "the first batch would decide"
        size, units = (
            self._element_bytes,
            unit_sizes(held.partition, self.home_of_frozen),
        )

        def build(decision: Decision) -> list[Action]:
            return build_rank_program(replace(self.spec, **decision._asdict()), rank)

        def follow(actions: Sequence[Action]) -> list[int]:
            taken = actions, units, self._sharding, size, self.activations
            return [held.constants + most for most in memory_over_time(*taken, offload=self.spec.offload)[1]]

        complaint = over_budget(limit, rank, max(follow(build(Decision()))))
        if complaint is not None:
            raise ConfigError(complaint)
        return kept_within(limit, build, follow, self.activations)

    def _traffic(self, actions: Sequence[Action], units: Sequence[UnitSize]) -> Traffic:
        moving = [unit for unit in units if unit.shared(self._sharding).data_ranks > 1]
        training = [unit for unit in moving if not unit.frozen]
        dense = [unit for unit in training if unit.expert_ranks == 1]
        return predict_traffic(
            actions,
            self.spec.zero_stage,
            [chunk for unit in dense if not unit.tied for chunk in unit.chunks],
            [unit.chunks for unit in dense if unit.tied],
            [unit.chunks for unit in moving if unit.frozen and unit.whole_on is None],
            [unit.chunks for unit in training if unit.expert_ranks > 1],
        )

    def _shared(
        self, actions: Sequence[Action], partition: ZeroPartition, units: Sequence[UnitSize], size: ElementBytes
    ) -> list[SharedFacts]:
        """Returns the units of a rank by how many ranks share them; nothing without experts that ranks divide."""
        if all(unit.expert_ranks == 1 for unit in units):
            return []
        facts = []
        for expert_ranks in sorted({unit.expert_ranks for unit in units}):
            own = [unit for unit in units if unit.expert_ranks == expert_ranks]
            moved = self._traffic(actions, own)
            of_units = (unit for unit, other in zip(partition.units, units) if other.expert_ranks == expert_ranks)
            facts.append(
                SharedFacts(
                    expert_ranks,
                    self.data_ranks // expert_ranks,
                    sum(math.prod(shape) for unit in of_units for _, shape, _ in unit.storage.contents()),
                    moved.gathers + moved.tied_gathers + moved.expert_gathers + moved.frozen_gathers,
                    moved.reduces + moved.tied_reduces + moved.expert_reduces,
                    sum(collective_bytes(actions, unit, self._sharding, size) for unit in own),
                    rank_memory(actions, own, self._sharding, size, offload=self.spec.offload),
                )
            )
        return facts

    def _tokens(
        self, actions: Sequence[Action], chunks: Mapping[int, Sequence[MoE | AutoEPMoELayer]]
    ) -> TokenFacts | None:
        """Returns what takes tokens to experts; None if no layer in the ``chunks`` of a rank has divided ones."""
        element, micro_batches = parameter_dtype(self.config).itemsize, self.spec.micro_batches
        layers = {chunk: [exchange_of(layer, element) for layer in own] for chunk, own in chunks.items() if own}
        if not layers:
            return None
        moved = all_to_alls(actions, layers)
        known = None if self.activations is None else sum(self.activations.all_to_all[chunk] for chunk in layers)
        return TokenFacts(
            layers=sum(map(len, layers.values())),
            all_to_alls=moved.calls // micro_batches,
            each_token=moved.token_bytes / micro_batches,
            numbers_of_tokens=moved.number_bytes // micro_batches,
            each_micro_batch=known,
            each_step=None if known is None else micro_batches * known,
        )

    def _memory_and_disk(
        self, actions: Sequence[Action], units: Sequence[UnitSize], size: ElementBytes, step: int | None
    ) -> tuple[Memory, DiskUse | None]:
        offload, on_disk = self.spec.offload, on_disk_of(self.config, self.settings)
        memory = rank_memory(actions, units, self._sharding, size, self.activations, step, offload)
        if not any(on_disk):
            return memory, None
        disk = disk_use(actions, units, offload, on_disk, self._sharding, size, self.activations)
        if memory.host is not None:
            memory = replace(memory, host=host_beside_disk(memory.host, on_disk, size, disk.buffers))
        return memory, disk
