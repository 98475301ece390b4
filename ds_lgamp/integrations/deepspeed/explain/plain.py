"""Computes what ``ds_lgamp run --explain`` says of a model that is no PipelineModule."""

from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig

from ds_lgamp.config import LgampConfig
from ds_lgamp.integrations.deepspeed.explain.explain import explain
from ds_lgamp.integrations.deepspeed.explain.facts import Explanation
from ds_lgamp.integrations.deepspeed.model.recomputation import layer_sources
from ds_lgamp.integrations.deepspeed.model.shared_tensors import check_tensors
from ds_lgamp.integrations.deepspeed.plain.build import configuration_of_pipelines
from ds_lgamp.integrations.deepspeed.plain.layers import layers_of
from ds_lgamp.integrations.deepspeed.plain.module import pipeline_module, topology_of
from ds_lgamp.integrations.deepspeed.plain.sequence_parallel import check_layout
from ds_lgamp.integrations.shard_keys import for_deepspeed

_NO_DATA = "the script gives micro-batches to the engine only after deepspeed.initialize"


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
        module, config, config_class, arguments.get("optimizer"), "uniform", no_data=_NO_DATA, scales_in_step=True
    )
