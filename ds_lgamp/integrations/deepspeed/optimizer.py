"""The ZeRO partition policy as DeepSpeed's optimizer object, and the user's parameter groups on shards."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.module import global_names, merged_over_pipeline
from ds_lgamp.partition.zero_partition import ZeroPartition, clip_factor, global_norm

TORCH_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD")
DEEPSPEED_ELEMENTWISE = ("FusedAdam", "DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "FusedLion", "DeepSpeedCPULion")
"""Class names of optimizers whose update of an element depends on that element alone: a shard gives the same result."""


class PartitionedOptimizer(DeepSpeedOptimizer):
    """Steps a torch optimizer on this rank's shards.

    Args:
        optimizer: whose groups hold the shards; hyper-parameters and schedulers act on it as the user made it.
        partition: where gradients are final when :meth:`step` is called.
        gradient_clipping: the largest norm, 0 for none.
        norm_group: all pipeline and data-parallel ranks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        partition: ZeroPartition,
        gradient_clipping: float,
        norm_group: dist.ProcessGroup | None,
        data_group: dist.ProcessGroup,
    ) -> None:
        self.optimizer = optimizer
        self.partition = partition
        self.dp_process_group = data_group
        self.overflow = False
        self._clipping, self._norm_group = gradient_clipping, norm_group
        self._global_grad_norm: torch.Tensor | None = None
        for group in optimizer.param_groups:
            group["params"] = []
        for segment in partition.segments():
            optimizer.param_groups[segment.group]["params"].append(segment.shard)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> dict:
        return self.optimizer.state

    def step(self) -> None:
        """Clips by the norm of the whole model's gradient and updates the shards."""
        self._global_grad_norm = global_norm(self.partition, self._norm_group)
        if self._clipping > 0:
            self.partition.scale_gradients(clip_factor(self._global_grad_norm, self._clipping))
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the partition drops gradients when the step is over."""


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError if ``optimizer`` cannot work on shards."""
    name = type(optimizer).__name__
    allowed = TORCH_ELEMENTWISE + DEEPSPEED_ELEMENTWISE
    if not any(base.__name__ in allowed for base in type(optimizer).__mro__):
        raise ConfigError(
            f"optimizer is {name}, which needs whole tensors; shards take one of {', '.join(TORCH_ELEMENTWISE)}"
        )


class ParameterGroups:
    """The user's optimizer groups by global parameter name, gathered before layers move.

    Args:
        groups: the optimizer's ``param_groups`` or the user's ``model_parameters``; None if all trainable parameters
            form one group.
    """

    def __init__(self, module: PipelineModule, groups: list[dict[str, Any]] | None) -> None:
        names = {id(tensor): name for name, tensor in global_names(module)}
        own = {}
        if groups is None:
            own = {name: 0 for name, tensor in global_names(module) if _is_trainable(tensor)}
        else:
            for index, group in enumerate(groups):
                for parameter in group["params"]:
                    if id(parameter) not in names:
                        raise ConfigError(
                            f"parameter group {index} holds a tensor of shape {list(parameter.shape)} that is no "
                            "parameter of the module; pass the module's own parameters"
                        )
                    own[names[id(parameter)]] = index
        self.by_name: dict[str, int] = merged_over_pipeline(module, own)

    def rewrite(self, module: PipelineModule, groups: list[dict[str, Any]]) -> None:
        """Puts the parameters this rank has now into ``groups``, in place. A group that has none here gets an empty
        placeholder: DeepSpeed drops empty groups, and schedulers count them."""
        for group in groups:
            group["params"] = []
        for name, tensor in global_names(module):
            if name in self.by_name:
                groups[self.by_name[name]]["params"].append(tensor)
        for group in groups:
            group["params"] = group["params"] or [nn.Parameter(torch.empty(0))]


def as_groups(parameters: Iterable[Any]) -> tuple[list[dict[str, Any]], bool]:
    """``model_parameters`` as groups, and whether the user wrote groups rather than plain parameters."""
    listed = list(parameters)
    if listed and isinstance(listed[0], dict):
        return [{**group, "params": list(group["params"])} for group in listed], True
    return [{"params": listed}], False


def _is_trainable(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad
