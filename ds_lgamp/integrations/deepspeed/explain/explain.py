"""Computes what ``ds_lgamp run --explain`` says of a user's script, without training.

The script runs, unedited and in one process, up to ``deepspeed.initialize``; the other ranks are imagined. The engine's
own functions compute what would have followed.
"""

from collections.abc import Sequence
from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig, DtypeEnum
from deepspeed.runtime.pipe.module import PipelineModule

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig, read_block
from ds_lgamp.integrations.deepspeed.config.precision import parameter_dtype
from ds_lgamp.integrations.deepspeed.config.zero import on_disk_of
from ds_lgamp.integrations.deepspeed.engine.plan import plan_training
from ds_lgamp.integrations.deepspeed.explain.activations import (
    NO_DATA,
    UnknownActivations,
    first_micro_batch,
    measure_activations,
)
from ds_lgamp.integrations.deepspeed.explain.facts import Explanation, RankFacts
from ds_lgamp.integrations.deepspeed.explain.imagined import ImaginedModel
from ds_lgamp.integrations.deepspeed.explain.rank_facts import Step, element_bytes
from ds_lgamp.integrations.deepspeed.explain.updates import update_of
from ds_lgamp.integrations.deepspeed.model.module import Layout, layer_types
from ds_lgamp.integrations.deepspeed.model.recomputation import layer_sources, offers_selective, refuse_unless_offered
from ds_lgamp.integrations.deepspeed.model.shared_tensors import check_tensors
from ds_lgamp.integrations.deepspeed.plain.build import check_layout, configuration_of_pipelines
from ds_lgamp.integrations.deepspeed.plain.layers import layers_of
from ds_lgamp.integrations.deepspeed.plain.module import pipeline_module, topology_of
from ds_lgamp.integrations.shard_keys import for_deepspeed
from ds_lgamp.schedule.costs import UNIT_DURATIONS, Costs, sized_costs, uniform_costs
from ds_lgamp.schedule.orders import default_placement
from ds_lgamp.schedule.placement import place_chunks, split_automatic
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.validate import validate

_NO_DATA_YET = "the script gives micro-batches to the engine only after deepspeed.initialize"


def explain(
    module: PipelineModule,
    config: dict[str, Any],
    config_class: Any,
    optimizer: Any,
    partition_method: str,
    training_data: Any = None,
    collate_fn: Any = None,
    no_data: str = NO_DATA,
    scales_in_step: bool = False,
) -> Explanation:
    """Returns what the engine of these arguments would do, on the data-parallel ranks with the most micro-batches.

    Raises ConfigError if there is no block, and if the engine would.

    Args:
        no_data: what it says of activations without ``training_data``; a clause.
        scales_in_step: whether the script decides on the factor of the loss after the backward passes.
    """
    settings = enabled_block(config)
    arguments = {"model": module, "config": config, "config_class": config_class, "optimizer": optimizer}
    micro_batches = config_class.gradient_accumulation_steps
    plan = plan_training(settings, arguments, partition_method, micro_batches, scales_in_step)
    spec = max(plan.specs, key=lambda replica: replica.micro_batches)
    program = build_program(spec)
    validate(spec, program)
    update, model = update_of(optimizer, config_class), ImaginedModel(module, plan.layout)
    if settings.recompute == "selective":
        refuse_unless_offered(map(offers_selective, model.built))
    samples = config_class.train_micro_batch_size_per_gpu
    activations, unknown = None, None
    try:
        micro_batch = first_micro_batch(training_data, collate_fn, samples, no_data)
        bounds = plan.layout.bounds
        activations = measure_activations(module, model.layers, bounds, micro_batch, spec, settings, config_class)
    except UnknownActivations as reason:
        unknown = str(reason)
    step = Step(
        spec=spec,
        data_ranks=module.topology().get_dim("data"),
        tensor_ranks=module.topology().get_dim("model") or 1,
        size=element_bytes(config_class, update),
        activations=activations,
        in_rank_order=settings.reproducible,
        update=update,
        on_disk=on_disk_of(config_class, settings),
        leaves_live_states=settings.live_checkpoint is not None,
    )
    held = model.ranks(settings, config_class, spec, update.group_of)
    ranks = [step.facts(rank, *each) for rank, each in enumerate(zip(held, program))]
    return Explanation(
        pipeline_ranks=spec.pipeline_ranks,
        data_ranks=step.data_ranks,
        tensor_ranks=step.tensor_ranks,
        schedule=spec.schedule,
        placement=settings.placement or default_placement(settings.schedule),
        zero_stage=spec.zero_stage,
        hierarchy=None if spec.hierarchy is None else spec.hierarchy._asdict(),
        offload=None if spec.offload is None else spec.offload._asdict(),
        chunks=spec.chunks,
        first_trained=spec.first_trained,
        micro_batches=spec.micro_batches,
        micro_batch_group=spec.micro_batch_group,
        returns_outputs=spec.returns_outputs,
        resident_chunks=spec.resident_chunks,
        defers_gathers=spec.defers_gathers,
        pipeline_rank_speeds=settings.pipeline_rank_speeds,
        data_rank_speeds=settings.data_rank_speeds,
        micro_batch_shares=[replica.micro_batches for replica in plan.specs],
        recompute=settings.recompute,
        precision=DtypeEnum(parameter_dtype(config_class)).name,
        optimizer=update.name,
        updates=spec.updates,
        layers=module._num_layers,
        parameters=model.parameters,
        bubble=simulate(spec, program, _costs(spec, plan.layout, settings, module)).bubble,
        bubble_formula=_bubble_formula(spec),
        micro_batch_outer_gathers=_micro_batch_outer_gathers(spec, step.data_ranks, ranks),
        activations_unknown=unknown,
        ranks=ranks,
    )


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


def _bubble_formula(spec: ProgramSpec) -> float | None:
    ranks, micro_batches = spec.pipeline_ranks, spec.micro_batches
    applies = (
        spec.first_trained == 0
        and not spec.returns_outputs
        and spec.chunks % ranks == 0
        and spec.placement == place_chunks("modular", spec.chunks, ranks)
        and spec.micro_batch_group >= micro_batches >= ranks
    )
    return (ranks - 1) / (spec.chunks // ranks * micro_batches) if applies else None


def _micro_batch_outer_gathers(spec: ProgramSpec, data_ranks: int, ranks: Sequence[RankFacts]) -> int | None:
    if spec.zero_stage < 3 or data_ranks == 1 or spec.first_trained:
        return None
    return 2 * max(sum(chunk.parameters > 0 for chunk in facts.chunks) for facts in ranks) * spec.micro_batches


def explain_plain(settings: LgampConfig, arguments: dict[str, Any]) -> Explanation:
    """Returns what the engine would do that ``deepspeed.initialize`` builds of these ``arguments``: that of a
    PipelineModule with the layers of the model. Raises ConfigError if the engine would.

    Unlike the engine it frees no parameter, because it asks for the sizes of all layers.
    """
    model = arguments["model"]
    check_tensors(model)
    layers = layers_of(model, layer_sources(next(model.parameters()).device), settings)
    module = pipeline_module(layers, topology_of(layers, settings))
    check_layout(arguments.get("mpu"), module.mpu(), settings)
    config = configuration_of_pipelines(arguments, module.num_stages)
    config_class = DeepSpeedConfig(for_deepspeed(config), module.mpu())
    return explain(
        module, config, config_class, arguments.get("optimizer"), "uniform", no_data=_NO_DATA_YET, scales_in_step=True
    )
