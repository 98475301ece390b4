"""Tells how the tensor-parallel ranks of a DeepSpeed grid share the parameters of their layers."""

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
