"""What would train something else than the user asked for, refused before anything changes, alike on every rank."""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.constants import GRADIENT_ALLREDUCE_OP_MEAN
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.deepspeed.module import PlacedModule, announced_tensors, global_names, raise_everywhere
from ds_lgamp.integrations.deepspeed.optimizer import check_elementwise

UNSUPPORTED_SETTINGS: dict[str, Callable[[Any], bool]] = {
    "fp16.enabled": lambda config: config.float16_config.enabled,
    "bf16.enabled": lambda config: config.bfloat16_config.enabled,
    "torch_autocast.enabled": lambda config: config.torch_autocast_enabled,
    "gradient_allreduce_op": lambda config: config.gradient_allreduce_op != GRADIENT_ALLREDUCE_OP_MEAN,
    "zero_optimization.offload_optimizer": lambda config: _offloads(config.zero_config.offload_optimizer),
    "zero_optimization.offload_param": lambda config: _offloads(config.zero_config.offload_param),
    "zero_optimization.zenflow": lambda config: config.zero_config.zenflow is not None,
    "tensor_parallel.autotp_size": lambda config: config.tensor_parallel_config.autotp_size > 1,
}
"""Settings that would change results, and how to tell that one is in force."""


def refuse_unsupported(config: Any, module: PipelineModule, optimizer: Any) -> None:
    """Raises ConfigError for settings, modules and optimizers the engine cannot honour. Collective over all ranks."""
    for key, in_force in UNSUPPORTED_SETTINGS.items():
        if in_force(config):
            raise ConfigError(f"{key} is set, but a {BLOCK} block does not support it so far; remove it")
    if isinstance(optimizer, torch.optim.Optimizer):
        check_elementwise(optimizer, config.zero_allow_untested_optimizer)
    elif optimizer is None and config.optimizer_name is None:
        raise ConfigError("there is no optimizer; pass one to deepspeed.initialize or name one in the JSON")
    _refuse_module(module)
    raise_everywhere(_complaint_about_tensors(module))
    for name, info in announced_tensors(module).items():
        if info.dtype.is_floating_point and info.dtype != torch.float32 and info.is_parameter:
            raise ConfigError(f"parameter {name} is {info.dtype}, but {BLOCK} trains in fp32 so far; remove the cast")


def _refuse_module(module: PipelineModule) -> None:
    if isinstance(module, PlacedModule):
        raise ConfigError("the PipelineModule has an engine already; build a new one for another engine")
    if isinstance(module, DualPipeVModule):
        raise ConfigError(f"DualPipeVModule brings its own schedule; use PipelineModule with a {BLOCK} block")
    if module.dynamic_shape:
        raise ConfigError(
            f"dynamic_shape is True, but a {BLOCK} block does not support it so far; remove it and call "
            "engine.reset_activation_shape() where shapes change between batches"
        )
    topology = module.topology()
    for axis in topology.get_axis_names():
        if axis not in ("pipe", "data") and topology.get_dim(axis) > 1:
            raise ConfigError(
                f"the topology has {topology.get_dim(axis)} ranks on axis '{axis}'; {BLOCK} takes 1 so far"
            )


def _complaint_about_tensors(module: PipelineModule) -> str | None:
    """What is wrong with this rank's parameters."""
    names: dict[int, str] = {}
    for name, tensor in global_names(module):
        if names.setdefault(id(tensor), name) != name:
            return f"{name} and {names[id(tensor)]} are the same tensor; layers that share one need TiedLayerSpec"
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in names:
            return f"parameter {name} belongs to no layer of the PipelineModule; make its owner a layer, or freeze it"
    return None


def _offloads(section: Any) -> bool:
    return section is not None and section.device != OffloadDeviceEnum.none
