"""Builds the engine of a plain script."""

from typing import Any

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.module import PipelineModule

from ds_lgamp.config import LgampConfig
from ds_lgamp.integrations.deepspeed.model.client_optimizer import as_groups
from ds_lgamp.integrations.deepspeed.model.random_sources import layer_sources
from ds_lgamp.integrations.deepspeed.plain.engine import ModelEngine
from ds_lgamp.integrations.deepspeed.plain.layers import layers_of
from ds_lgamp.integrations.deepspeed.plain.module import pipeline_module


def build_engine(settings: LgampConfig, arguments: dict[str, Any]) -> ModelEngine:
    """Returns the engine for the arguments that ``deepspeed.initialize`` passes to DeepSpeedEngine. Collective."""
    model = arguments["model"]
    device = next(model.parameters()).device
    layers = layers_of(model, layer_sources(device))
    module = pipeline_module(layers, settings)
    _keep_own_parameters(module, arguments)
    mpu = module.mpu()
    given = arguments["config_class"]
    config = {
        **arguments["config"],
        "train_batch_size": given.train_batch_size,
        "train_micro_batch_size_per_gpu": given.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": given.gradient_accumulation_steps * module.num_stages,
    }
    rest = {name: value for name, value in arguments.items() if name not in ("model", "config", "config_class", "mpu")}
    engine = ModelEngine(
        user_model=model,
        layers=layers,
        settings=settings,
        partition_method="uniform",
        **{**rest, "model": module, "mpu": mpu, "config": config, "config_class": DeepSpeedConfig(config, mpu)},
    )
    _release_rest(model, engine)
    return engine


def _keep_own_parameters(module: PipelineModule, arguments: dict[str, Any]) -> None:
    """Drops parameters that this rank has not built from the optimizer's groups."""
    own = {id(parameter) for parameter in module.parameters()}
    client, parameters = arguments.get("optimizer"), arguments.get("model_parameters")
    if isinstance(client, torch.optim.Optimizer):
        groups = client.param_groups
    elif parameters is not None:
        groups, grouped = as_groups(parameters)
        arguments["model_parameters"] = groups if grouped else groups[0]["params"]
    else:
        return
    for group in groups:
        group["params"][:] = [parameter for parameter in group["params"] if id(parameter) in own]


def _release_rest(model: torch.nn.Module, engine: ModelEngine) -> None:
    """Frees the parameters of layers on other ranks, and moves the buffers outside of layers to the device."""
    own = {id(tensor) for tensor in engine.placed.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in own:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=engine.device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(engine.device)
