"""Computes what ``ds_lgamp run --explain`` says of a user's script, without training.

The script runs, unedited and in one process, up to ``deepspeed.initialize``; the other ranks are imagined. The engine's
own functions compute what would have followed.
"""

from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig, DtypeEnum
from deepspeed.runtime.pipe.module import PipelineModule

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig, read_block
from ds_lgamp.integrations.deepspeed.config.check_keys import for_deepspeed
from ds_lgamp.integrations.deepspeed.config.precision import parameter_dtype
from ds_lgamp.integrations.deepspeed.engine.plan import plan_training
from ds_lgamp.integrations.deepspeed.explain.activations import (
    UnknownActivations,
    first_micro_batch,
    measure_activations,
)
from ds_lgamp.integrations.deepspeed.explain.facts import Explanation
from ds_lgamp.integrations.deepspeed.explain.imagined import ImaginedModel
from ds_lgamp.integrations.deepspeed.explain.rank_facts import Step
from ds_lgamp.integrations.deepspeed.explain.updates import update_of
from ds_lgamp.integrations.deepspeed.model.module import Layout, layer_types
from ds_lgamp.integrations.deepspeed.model.recomputation import layer_sources, offers_selective, refuse_unless_offered
from ds_lgamp.integrations.deepspeed.model.shared_tensors import check_tensors
from ds_lgamp.integrations.deepspeed.plain.build import check_layout, configuration_of_pipelines
from ds_lgamp.integrations.deepspeed.plain.layers import layers_of
from ds_lgamp.integrations.deepspeed.plain.module import pipeline_module, topology_of
from ds_lgamp.schedule.costs import UNIT_DURATIONS, Costs, sized_costs, uniform_costs
from ds_lgamp.schedule.placement import split_automatic
from ds_lgamp.schedule.program import build_program
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
    plan = plan_training(settings, arguments, partition_method, config.gradient_accumulation_steps, calls_engine)
    spec = max(plan.specs, key=lambda replica: replica.micro_batches)
    program = build_program(spec)
    validate(spec, program)
    update, model = update_of(arguments.get("optimizer"), config), ImaginedModel(module, plan.layout)
    if settings.recompute == "selective":
        refuse_unless_offered(map(offers_selective, model.built))
    activations, unknown = None, None
    try:
        if calls_engine:
            raise UnknownActivations("the script gives micro-batches to the engine only after deepspeed.initialize")
        samples = config.train_micro_batch_size_per_gpu
        micro_batch = first_micro_batch(arguments.get("training_data"), arguments.get("collate_fn"), samples)
        activations = measure_activations(module, model.layers, plan.layout.bounds, micro_batch, spec, settings, config)
    except UnknownActivations as reason:
        unknown = str(reason)
    data_ranks, tensor_ranks = (module.topology().get_dim(axis) or 1 for axis in ("data", "model"))
    step = Step(spec, settings, config, data_ranks, tensor_ranks, activations, update)
    held = model.ranks(settings, config, spec, update.group_of)
    return Explanation(
        spec=spec,
        settings=settings,
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
    check_tensors(model)
    layers = layers_of(model, layer_sources(next(model.parameters()).device), settings)
    module = pipeline_module(layers, topology_of(layers, settings))
    check_layout(arguments.get("mpu"), module.mpu(), settings)
    config = configuration_of_pipelines(arguments, module.num_stages)
    config_class = DeepSpeedConfig(for_deepspeed(config), module.mpu())
    of_engine = {**arguments, "model": module, "config": config, "config_class": config_class}
    return explain(of_engine, "uniform", calls_engine=True)
