"""Computes what ``ds_lgamp run --explain`` says of a user's script, without training.

The script runs, unedited and in one process, up to ``deepspeed.initialize``; the other ranks are imagined. The engine's
own functions compute what would have followed.
"""

from collections.abc import Sequence
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.module import PipelineModule

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig, read_block
from ds_lgamp.cost.activations import ActivationBytes
from ds_lgamp.cost.memory import ElementBytes, rank_memory
from ds_lgamp.cost.traffic import Traffic, collective_bytes, predict_traffic
from ds_lgamp.integrations.deepspeed.engine.plan import plan_training
from ds_lgamp.integrations.deepspeed.explain.activations import (
    NO_DATA,
    UnknownActivations,
    first_micro_batch,
    measure_activations,
)
from ds_lgamp.integrations.deepspeed.explain.element_bytes import element_bytes, optimizer_facts
from ds_lgamp.integrations.deepspeed.explain.facts import Explanation, RankFacts
from ds_lgamp.integrations.deepspeed.explain.model_sizes import ModelSizes
from ds_lgamp.integrations.deepspeed.model.selective import refuse_unless_offered
from ds_lgamp.schedule.actions import Action
from ds_lgamp.schedule.orders import default_placement
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.validate import validate


def explain(
    module: PipelineModule,
    config: dict[str, Any],
    config_class: Any,
    optimizer: Any,
    partition_method: str,
    training_data: Any = None,
    collate_fn: Any = None,
    no_data: str = NO_DATA,
) -> Explanation:
    """Returns what the engine of these arguments would do. Raises ConfigError if there is no block, and if the engine
    would. Without ``training_data`` it says ``no_data``, a clause, of activations."""
    settings = enabled_block(config)
    layout, spec = plan_training(settings, config_class, module, partition_method, optimizer)
    program = build_program(spec)
    validate(spec, program)
    updates = optimizer_facts(optimizer, config_class)
    precision, size = element_bytes(config_class, updates)
    model = ModelSizes(module, layout)
    if settings.recompute == "selective":
        refuse_unless_offered(model.offers_selective)
    data_ranks = module.topology().get_dim("data")
    activations, unknown = None, None
    try:
        samples = config_class.train_micro_batch_size_per_gpu
        micro_batch = first_micro_batch(training_data, collate_fn, samples, no_data)
        activations = measure_activations(
            module, model.layers, layout.bounds, micro_batch, spec, settings, config_class
        )
    except UnknownActivations as reason:
        unknown = str(reason)
    ranks = [
        _rank_facts(model, rank, actions, spec, data_ranks, size, activations, settings.reproducible)
        for rank, actions in enumerate(program)
    ]
    chunks_per_rank = max(sum(chunk.parameters > 0 for chunk in facts.chunks) for facts in ranks)
    repeats = spec.zero_stage == 3 and data_ranks > 1
    return Explanation(
        pipeline_ranks=spec.pipeline_ranks,
        data_ranks=data_ranks,
        schedule=spec.schedule,
        placement=_placement_name(settings),
        zero_stage=spec.zero_stage,
        chunks=spec.chunks,
        micro_batches=spec.micro_batches,
        micro_batch_group=spec.micro_batch_group,
        resident_chunks=spec.resident_chunks,
        recompute=settings.recompute,
        precision=precision,
        optimizer=updates.name,
        layers=module._num_layers,
        parameters=sum(size.parameters for size in model.sizes.values()),
        bubble=simulate(spec, program).bubble,
        bubble_formula=_bubble_formula(spec),
        micro_batch_outer_gathers=2 * chunks_per_rank * spec.micro_batches if repeats else None,
        activations_unknown=unknown,
        ranks=ranks,
    )


def enabled_block(config: dict[str, Any]) -> LgampConfig:
    """Returns the block. Raises ConfigError if there is none, or if it is not enabled."""
    settings = read_block(config)
    if settings is None:
        raise ConfigError(f'there is no enabled {BLOCK} block, stock DeepSpeed would run; add "{BLOCK}": {{}}')
    return settings


def _rank_facts(
    model: ModelSizes,
    rank: int,
    actions: Sequence[Action],
    spec: ProgramSpec,
    data_ranks: int,
    size: ElementBytes,
    activations: ActivationBytes | None,
    in_rank_order: bool,
) -> RankFacts:
    """Returns what a pipeline rank holds and does in a step, its ``actions``."""
    chunks, tied, units = model.chunks(rank), model.tied(rank), model.units(rank)
    training = [unit for unit in units if not unit.frozen]
    traffic = predict_traffic(
        actions,
        spec.zero_stage,
        [chunk for unit in training if not unit.tied for chunk in unit.chunks],
        [unit.chunks for unit in training if unit.tied],
        [unit.chunks for unit in units if unit.frozen],
    )
    if data_ranks == 1:
        traffic = Traffic(sends=traffic.sends, receives=traffic.receives)
    return RankFacts(
        pipeline_rank=rank,
        chunks=chunks,
        tied=tied,
        parameters=sum(facts.parameters for facts in chunks) + sum(facts.parameters for facts in tied),
        traffic=traffic,
        tied_sums=sum(unit.copies > 1 for unit in units),
        collective_bytes_sent=sum(collective_bytes(actions, unit, spec.zero_stage, data_ranks, size) for unit in units),
        memory=rank_memory(
            actions,
            units,
            spec.zero_stage,
            data_ranks,
            size,
            all_to_all=in_rank_order or get_accelerator().communication_backend_name() == "gloo",
            activation_bytes=activations,
            in_rank_order=in_rank_order,
        ),
    )


def _placement_name(settings: LgampConfig) -> str:
    return settings.placement or default_placement(settings.schedule)


def _bubble_formula(spec: ProgramSpec) -> float | None:
    ranks, micro_batches = spec.pipeline_ranks, spec.micro_batches
    applies = (
        spec.chunks % ranks == 0
        and spec.placement == place_chunks("modular", spec.chunks, ranks)
        and spec.micro_batch_group >= micro_batches >= ranks
    )
    return (ranks - 1) / (spec.chunks // ranks * micro_batches) if applies else None
