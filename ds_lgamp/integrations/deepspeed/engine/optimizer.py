"""The optimizer object that DeepSpeed sees: it steps a torch optimizer on this rank's shards."""

from collections import defaultdict
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.fp16.loss_scaler import LossScaler, LossScalerBase

from ds_lgamp.checkpoint.errors import CheckpointError
from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.config.optimizer_choice import skips_by_itself
from ds_lgamp.integrations.deepspeed.engine.overflow import LateFlag
from ds_lgamp.partition.agreement import raise_everywhere
from ds_lgamp.partition.norms import clip_factor, exact_norm, global_norm
from ds_lgamp.partition.zero_partition import ZeroPartition


class PartitionedOptimizer(DeepSpeedOptimizer):
    """Steps a torch optimizer on this rank's shards.

    Args:
        optimizer: its groups hold the shards from now on. The user's hyper-parameters and schedulers act on it
            unchanged.
        partition: holds the gradients, which are final when :meth:`step` is called.
        gradient_clipping: the largest norm; 0 switches clipping off.
        norm_group: the group of all ranks.
        data_group: the data-parallel group.
        skips_overflow: whether all ranks skip a step if any gradient is inf or NaN. If the scale is static and the
            optimizer's kernel can skip a step by itself, the host learns of an overflow one step late.
        reproducible: whether the norm must not depend on how gradients are spread over ranks.
        loss_scaler: holds the scale of the gradients, and adapts it after each step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        partition: ZeroPartition,
        gradient_clipping: float,
        norm_group: dist.ProcessGroup | None,
        data_group: dist.ProcessGroup,
        skips_overflow: bool,
        reproducible: bool,
        loss_scaler: LossScalerBase,
    ) -> None:
        self.optimizer = optimizer
        self.partition = partition
        self.dp_process_group = data_group
        self.overflow = False
        """Whether the last step was skipped; if the host learns of it late, the step before the last."""
        self._late_overflow = LateFlag(partition.device) if skips_by_itself(optimizer) else None
        self.loss_scaler = loss_scaler
        self.custom_loss_scaler = False
        self.loss_factor = 1.0
        """The factor of the loss, beside its scale. Gradients accumulate without it; the step multiplies them by it."""
        self._clipping, self._norm_group, self._skips_overflow = gradient_clipping, norm_group, skips_overflow
        self._norm = exact_norm if reproducible else global_norm
        self._global_grad_norm: torch.Tensor | None = None
        for group in optimizer.param_groups:
            group["params"] = []
        for segment in partition.segments():
            optimizer.param_groups[segment.group]["params"].append(segment.shard)
        optimizer.state = _initial_state(optimizer)
        self._followed = False
        """Whether the weights already equal the master weights that this step updated."""
        # This hook runs before all others, because those may read parameters.
        hook = optimizer.register_step_post_hook(self._follow_update)
        optimizer._optimizer_step_post_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]
        optimizer.add_param_group = self.add_param_group  # type: ignore[method-assign]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> dict:
        return self.optimizer.state

    @property
    def loss_scale(self) -> float:
        """The scale of the gradients that accumulate now. Setting it changes the scale of the next ones."""
        return self.loss_scaler.cur_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.loss_scaler.cur_scale = scale

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        return self.loss_scaler.dynamic

    def override_loss_scale(self, loss_scale: float) -> None:
        """Sets a scale that stays fixed unless the user changes it, as in DeepSpeed's optimizers."""
        self.loss_scaler, self.custom_loss_scaler = LossScaler(loss_scale), True

    def step(self) -> None:
        """Unscales the gradients, clips them by their norm over the whole model and updates the shards. Skips the
        update if ``skips_overflow`` is set and any gradient is inf or NaN."""
        factor = self.loss_factor / self.loss_scale
        gradients = self.partition.counted_gradients()
        self._global_grad_norm = self._norm(gradients, self._norm_group, self.partition.device) * abs(factor)
        skips_now = self._skips_overflow and self._find_overflow(self._global_grad_norm)
        self.loss_scaler.update_scale(self.overflow)
        if skips_now:
            return
        if self._clipping > 0 or factor != 1:
            limit = self._clipping or float("inf")
            self.partition.scale_gradients(clip_factor(self._global_grad_norm, limit) * factor)
        self._followed = False
        self.optimizer.step()
        if not self._followed:
            # Somebody replaced the optimizer's step and thereby its hooks.
            self._follow_update()

    def _find_overflow(self, norm: torch.Tensor) -> bool:
        """Sets ``overflow``. Returns True if the host has to skip this step, because the optimizer would not. The
        ``norm`` is inf or NaN if any gradient is."""
        if self._late_overflow is None or self.dynamic_loss_scale:
            # Nothing else makes the host wait for the device. A dynamic scale is needed before the next backward pass.
            self.overflow = not bool(norm.isfinite())
            return self.overflow
        found = 1 - norm.isfinite().float()
        self.optimizer.found_inf = found  # type: ignore[attr-defined]
        self.overflow = self._late_overflow.exchange(found)
        return False

    def _follow_update(self, *_: Any) -> None:
        self.partition.follow_update()
        self._followed = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the partition drops gradients after the step."""

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of this rank's master weights and optimizer state. :meth:`load_state_dict` takes it on the
        same rank of a run with the same layout. To save everything that a run needs to go on, use save_checkpoint."""
        return {
            "data_rank": self._data_rank,
            "class": self.class_name,
            "partition": _partition_state(self.partition),
            "optimizer": deepcopy(self.optimizer.state_dict()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned. All ranks call it together. Raises CheckpointError on all ranks, and
        changes nothing, if the state of one rank does not fit."""
        raise_everywhere(self._complaint_about_state(state_dict), CheckpointError)
        _load_partition_state(self.partition, state_dict["partition"])
        # Copied, because torch would update the given tensors in place.
        self.optimizer.load_state_dict(deepcopy(state_dict["optimizer"]))

    def refresh_fp32_params(self) -> None:
        """Copies the weights to the master weights after user code changed the weights. The changes must be the same on
        all data-parallel ranks. As in DeepSpeed, master weights are rounded even where weights did not change."""
        self.partition.adopt_parameters()

    def _complaint_about_state(self, state: Any) -> str | None:
        """Returns why this rank cannot load ``state``; None if it can."""
        if not isinstance(state, dict) or set(state) != {"data_rank", "class", "partition", "optimizer"}:
            return "the state is not from engine.optimizer.state_dict(); pass what it returned on this rank"
        rank, ranks = self._data_rank
        if tuple(state["data_rank"]) != (rank, ranks):
            written_rank, written_ranks = state["data_rank"]
            return (
                f"the state of engine.optimizer is from data-parallel rank {written_rank} of {written_ranks}, but "
                f"this is rank {rank} of {ranks}; load it on its own rank, or use save_checkpoint and load_checkpoint"
            )
        complaint = self.complaint_about_class(state["class"])
        if complaint is not None:
            return complaint
        sizes, written_sizes = (
            [len(group["params"]) for group in groups]
            for groups in (self.param_groups, state["optimizer"]["param_groups"])
        )
        if sizes != written_sizes:
            return (
                f"the state of engine.optimizer has parameter groups of {written_sizes} shards, but this optimizer "
                f"of {sizes}; build model, groups and ds_config.json as they were"
            )
        complaint = _complaint_about_units(self.partition, state["partition"])
        if complaint is not None:
            return complaint
        for unit in self.partition.units:
            saved = state["partition"][unit.name]
            if (saved["master"].shape, "weights" in saved) != (unit.master.values.shape, unit.master.is_copy):
                return (
                    f"the state of engine.optimizer holds {unit.name} for another zero_optimization.stage or data "
                    "type; load it with the ds_config.json of the run that it comes from"
                )
        return None

    @property
    def class_name(self) -> str:
        """The class name of the torch optimizer."""
        return type(self.optimizer).__name__

    def complaint_about_class(self, written: str | None) -> str | None:
        """Returns why optimizer state of the class ``written`` does not fit. Returns None if it does, or if ``written``
        is None because the class is unknown."""
        if written in (self.class_name, None):
            return None
        return f"the optimizer state is from {written}, but this run has {self.class_name}; use {written}"

    @property
    def _data_rank(self) -> tuple[int, int]:
        return self.dp_process_group.rank(), self.dp_process_group.size()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ConfigError: a new group would hold whole parameters, but the optimizer updates only shards."""
        raise ConfigError(
            "a parameter group was added after deepspeed.initialize, when the optimizer holds shards; pass all "
            "groups to deepspeed.initialize, with learning rate 0 for parameters that train later"
        )


def _partition_state(partition: ZeroPartition) -> dict[str, dict[str, Any]]:
    """Returns the state of every unit by name: the contents of its storage in their order, this rank's master weights,
    and the weights if they are other tensors."""
    state = {}
    for unit in partition.units:
        # Cloned, because torch.save writes a view with its whole storage.
        state[unit.name] = {"contents": unit.storage.contents(), "master": unit.master.values.detach().clone()}
        if unit.master.is_copy:
            state[unit.name]["weights"] = unit.storage.shard.detach().clone()
    return state


def _complaint_about_units(partition: ZeroPartition, state: dict[str, dict[str, Any]]) -> str | None:
    """Returns the first difference between the parameters of the units, or their order, and ``state``; None if there
    is none."""
    own = {unit.name: unit.storage.contents() for unit in partition.units}
    for name in sorted(own.keys() | state.keys()):
        here, there = own.get(name, []), state.get(name, {}).get("contents", [])
        if here != there:
            different = sorted({str(entry) for entry in here} ^ {str(entry) for entry in there})
            return (
                f"{name} has other parameters, shapes or optimizer groups than the state of engine.optimizer "
                f"({', '.join(different) or 'in another order'}); build model and groups as they were, or use "
                "save_checkpoint and load_checkpoint"
            )
    return None


def _load_partition_state(partition: ZeroPartition, state: dict[str, dict[str, Any]]) -> None:
    for unit in partition.units:
        saved = state[unit.name]
        unit.replace_shard(saved["master"], saved.get("weights"))
    partition.gather_stale()


def _initial_state(optimizer: torch.optim.Optimizer) -> defaultdict[torch.Tensor, Any]:
    """Returns the state before the first step, for the current parameters of the groups. Adagrad makes its state in its
    constructor. All other optimizers make it in their first step."""
    if type(optimizer) is not torch.optim.Adagrad:
        return defaultdict(dict)
    value = optimizer.defaults["initial_accumulator_value"]
    groups = [dict(group) for group in optimizer.param_groups]
    return torch.optim.Adagrad(groups, initial_accumulator_value=value).state
