"""Plans a training run ahead of the engine: chunks, placement and program."""

from typing import Any

from deepspeed.runtime.pipe.module import PipelineModule

from ds_lgamp.config import LgampConfig, program_spec
from ds_lgamp.integrations.deepspeed.config.refusals import refuse_irreproducible, refuse_unsupported
from ds_lgamp.integrations.deepspeed.model.layout import Layout, layout_of
from ds_lgamp.runtime.ring import posts_on_arrival
from ds_lgamp.schedule.spec import ProgramSpec


def plan_training(
    settings: LgampConfig, config: Any, module: PipelineModule, partition_method: str, optimizer: Any
) -> tuple[Layout, ProgramSpec]:
    """Returns the layout and the program that ``settings`` ask for. Collective over all ranks; raises ConfigError on
    every rank if the engine cannot train as asked. Changes nothing.

    Args:
        config: the DeepSpeedConfig.
        partition_method: how the module cuts its layers; ``chunks_per_rank`` balances by it.
        optimizer: what the user passed as such; None if ds_config.json names it.
    """
    refuse_unsupported(config, module, optimizer)
    refuse_irreproducible(settings, config, module)
    layout = layout_of(settings, module, partition_method)
    micro_batches, zero_stage = config.gradient_accumulation_steps, int(config.zero_optimization_stage)
    return layout, program_spec(settings, layout.placement, micro_batches, zero_stage, posts_on_arrival())
