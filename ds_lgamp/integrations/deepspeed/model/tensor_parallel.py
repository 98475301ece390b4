"""Tells how the tensor-parallel ranks of a DeepSpeed grid share the parameters of their layers."""

import sys
from typing import NamedTuple

import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch.nn import Parameter

from ds_lgamp.config import ConfigError


class Sharing(NamedTuple):
    """How the tensor-parallel ranks share a parameter."""

    sliced_dimension: int | None = None
    """Each tensor-parallel rank has a slice along this dimension; None if each has the whole parameter."""
    partial_gradient: bool = False
    """Whether each tensor-parallel rank computes only a part of the gradient."""


def tensor_group(module: PipelineModule) -> dist.ProcessGroup | None:
    """Returns the group of this rank's tensor-parallel ranks; None if this rank is the only one."""
    grid = module._grid
    return grid.get_slice_parallel_group() if grid.get_slice_parallel_world_size() > 1 else None


def complaint_about_tensor_ranks(module: PipelineModule) -> str | None:
    """The sentence that refuses layers of Megatron-core that are sliced over other ranks than the axis ``model`` of
    the topology has; None if they are the same. Data-parallel ranks would otherwise mix up their slices."""
    megatron = sys.modules.get("megatron.core.parallel_state")
    if megatron is None or not megatron.model_parallel_is_initialized():
        return None
    if not any(map(is_model_parallel_parameter, module.parameters())):
        return None
    of_layers = dist.get_process_group_ranks(megatron.get_tensor_model_parallel_group())
    of_topology = list(module._grid.slice_group)
    if of_layers == of_topology:
        return None
    return (
        f"Megatron-core slices layers over the ranks {of_layers}, but the axis model of the topology has "
        f"{of_topology}; give PipelineModule PipeModelDataParallelTopology with num_mp={len(of_layers)}, or "
        f"initialize_model_parallel the tensor-parallel size {len(of_topology)}"
    )


def sharing_of(name: str, parameter: Parameter) -> Sharing:
    """Returns the sharing of ``parameter`` from Megatron-core's attributes ``tensor_model_parallel``,
    ``partition_dim``, ``partition_stride`` and ``sequence_parallel``.

    Raises ConfigError unless a sliced parameter has equal slices along one dimension, in the order of the ranks.
    """
    if not is_model_parallel_parameter(parameter):
        return Sharing(partial_gradient=bool(getattr(parameter, "sequence_parallel", False)))
    dimension, stride = (getattr(parameter, f"partition_{key}", None) for key in ("dim", "stride"))
    if dimension not in range(parameter.dim()) or stride not in (None, 1):
        raise ConfigError(
            f"parameter {name} is tensor-parallel with partition_dim {dimension} and partition_stride {stride}; give "
            "it a partition_dim, along which the ranks have equal slices in their order, and stride 1"
        )
    return Sharing(dimension)
