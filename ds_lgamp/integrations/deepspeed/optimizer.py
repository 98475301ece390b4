"""The ZeRO partition policy as DeepSpeed's optimizer object, and the user's parameter groups on shards."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.fp16.loss_scaler import LossScaler, LossScalerBase
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.module import global_names, over_pipeline, raise_everywhere
from ds_lgamp.partition.zero_partition import ZeroPartition, clip_factor, global_norm

ELEMENTWISE = {
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
}
"""Optimizers whose update of an element depends on that element alone, so that a shard gives the same result. Not their
subclasses, which may scale by layer; not Adagrad, whose state is made with the whole parameters."""
DEEPSPEED_ELEMENTWISE = {"FusedAdam", "DeepSpeedCPUAdam", "FusedLion", "DeepSpeedCPULion"}
"""The same among DeepSpeed's own, by name: importing them may compile them."""


_JSON_NAMES = {"adam", "adamw", "lion"} | {kind.__name__ for kind in ELEMENTWISE}
"""What ``optimizer.type`` may say; DeepSpeed knows the first three in any case and looks up the others in torch."""


class PartitionedOptimizer(DeepSpeedOptimizer):
    """Steps a torch optimizer on this rank's shards.

    Args:
        optimizer: whose groups hold the shards; hyper-parameters and schedulers act on it as the user made it.
        partition: where gradients are final when :meth:`step` is called.
        gradient_clipping: the largest norm, 0 for none.
        norm_group: all pipeline and data-parallel ranks.
        skips_overflow: whether a step is skipped, on all ranks, where a gradient is infinite or no number.
        loss_scaler: what says by how much gradients are too large when :meth:`step` is called, and learns from it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        partition: ZeroPartition,
        gradient_clipping: float,
        norm_group: dist.ProcessGroup | None,
        data_group: dist.ProcessGroup,
        skips_overflow: bool,
        loss_scaler: LossScalerBase,
    ) -> None:
        self.optimizer = optimizer
        self.partition = partition
        self.dp_process_group = data_group
        self.overflow = False
        self.loss_scaler = loss_scaler
        self.custom_loss_scaler = False
        self._clipping, self._norm_group, self._skips_overflow = gradient_clipping, norm_group, skips_overflow
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

    @property
    def loss_scale(self) -> float:
        """Of the gradients that are accumulating; setting it changes that of the next."""
        return self.loss_scaler.cur_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.loss_scaler.cur_scale = scale

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        return self.loss_scaler.dynamic

    def override_loss_scale(self, loss_scale: float) -> None:
        """From now on the user decides about the scale, as in DeepSpeed's optimizers."""
        self.loss_scaler, self.custom_loss_scaler = LossScaler(loss_scale), True

    def step(self) -> None:
        """Unscales gradients, clips by the norm of the whole model's and updates the shards."""
        scale = self.loss_scale
        self._global_grad_norm = global_norm(self.partition, self._norm_group) / scale
        # The one place where a step waits for the device; the norm is finite if and only if every gradient is.
        self.overflow = self._skips_overflow and not bool(self._global_grad_norm.isfinite())
        self.loss_scaler.update_scale(self.overflow)
        if self.overflow:
            return
        if self._clipping > 0 or scale != 1:
            limit = self._clipping or float("inf")
            self.partition.scale_gradients(clip_factor(self._global_grad_norm, limit) / scale)
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the partition drops gradients when the step is over."""


def check_optimizer_type(name: str, allow_untested: bool) -> None:
    """As :func:`check_elementwise`, for an optimizer the JSON names: before it is made, which may compile it."""
    if name not in _JSON_NAMES and not (allow_untested and hasattr(torch.optim, name)):
        raise ConfigError(
            f"optimizer.type is '{name}', which is unknown or may need whole tensors; shards take one of "
            f"{', '.join(sorted(_JSON_NAMES))}"
        )


def check_elementwise(optimizer: torch.optim.Optimizer, allow_untested: bool) -> None:
    """Raises ConfigError if ``optimizer`` is not known to work on shards and the user did not vouch for it."""
    known = type(optimizer) in ELEMENTWISE or type(optimizer).__name__ in DEEPSPEED_ELEMENTWISE
    if not known and not allow_untested:
        names = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
        raise ConfigError(
            f"optimizer is {type(optimizer).__name__}, which may need whole tensors; shards take one of {names}, or "
            "any other that updates each element by itself if zero_allow_untested_optimizer is true"
        )


class ParameterGroups:
    """The optimizer's groups by global parameter name, known on every rank before layers move.

    Raises ConfigError on all ranks if the groups of one do not fit.

    Args:
        groups: the optimizer's ``param_groups`` or the user's ``model_parameters``.
    """

    def __init__(self, module: PipelineModule, groups: list[dict[str, Any]]) -> None:
        names = {id(tensor): name for name, tensor in global_names(module)}
        own: dict[str, Any] = {}
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        complaint = None
        for index, group in enumerate(groups):
            for parameter in group["params"]:
                if id(parameter) in names:
                    own[names[id(parameter)]] = index
                else:
                    complaint = (
                        f"parameter group {index} holds a tensor of shape {list(parameter.shape)} that belongs to no "
                        "layer of the PipelineModule; make its owner a layer, or leave it out"
                    )
        raise_everywhere(complaint)
        everyone = over_pipeline(module, (own, repr(options)))
        if len({described for _, described in everyone}) > 1:
            raise ConfigError(
                "the optimizer's parameter groups differ between pipeline ranks; give every rank the same groups in "
                "the same order, empty ones included"
            )
        self.by_name: dict[str, int] = {name: index for names, _ in everyone for name, index in names.items()}

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
    return [{"params": [entry[1] if isinstance(entry, tuple) else entry for entry in listed]}], False


def trainable_parameters(module: PipelineModule) -> list[nn.Parameter]:
    """What DeepSpeed trains if the user names nothing."""
    return [tensor for _, tensor in global_names(module) if isinstance(tensor, nn.Parameter) and tensor.requires_grad]
