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
from ds_lgamp.partition.agreement import raise_everywhere
from ds_lgamp.partition.norms import clip_factor, exact_norm, global_norm
from ds_lgamp.partition.zero_partition import ZeroPartition


class PartitionedOptimizer(DeepSpeedOptimizer):
    """Steps a torch optimizer on this rank's shards.

    Args:
        optimizer: its groups hold the shards from now on. Hyper-parameters and schedulers act on it as the user made
            it.
        partition: holds the gradients, which are final when :meth:`step` is called.
        gradient_clipping: the largest norm, 0 for none.
        norm_group: all ranks.
        skips_overflow: whether all ranks skip a step if any gradient is inf or NaN.
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
        self.loss_scaler = loss_scaler
        self.custom_loss_scaler = False
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
        # Ahead of hooks that read parameters.
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
        """From now on the user decides about the scale, as in DeepSpeed's optimizers."""
        self.loss_scaler, self.custom_loss_scaler = LossScaler(loss_scale), True

    def step(self) -> None:
        """Unscales gradients, clips by the norm of the whole model's and updates the shards."""
        scale = self.loss_scale
        gradients = self.partition.counted_gradients()
        self._global_grad_norm = self._norm(gradients, self._norm_group, self.partition.device) / scale
        # Only here a step waits for the device. If a gradient is inf or NaN, so is the norm.
        self.overflow = self._skips_overflow and not bool(self._global_grad_norm.isfinite())
        self.loss_scaler.update_scale(self.overflow)
        if self.overflow:
            return
        if self._clipping > 0 or scale != 1:
            limit = self._clipping or float("inf")
            self.partition.scale_gradients(clip_factor(self._global_grad_norm, limit) / scale)
        self._followed = False
        self.optimizer.step()
        if not self._followed:
            # The optimizer's step was replaced, and its hooks with it.
            self._follow_update()

    def _follow_update(self, *_: Any) -> None:
        self.partition.follow_update()
        self._followed = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the partition drops gradients after the step."""

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of this rank's master weights and optimizer state, for :meth:`load_state_dict` on the same
        rank of a run with the same layout. save_checkpoint saves everything that a run needs to go on."""
        return {
            "data_rank": self._data_rank,
            "class": self.class_name,
            "partition": _partition_state(self.partition),
            "optimizer": deepcopy(self.optimizer.state_dict()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a :meth:`state_dict`. All ranks call it together; raises CheckpointError on all, and changes
        nothing, if one's does not fit."""
        raise_everywhere(self._complaint_about_state(state_dict), CheckpointError)
        _load_partition_state(self.partition, state_dict["partition"])
        # Copied: torch would go on working in the tensors it is given.
        self.optimizer.load_state_dict(deepcopy(state_dict["optimizer"]))

    def refresh_fp32_params(self) -> None:
        """Copies the weights to the master weights, after user code changed them alike on all data-parallel ranks. As
        in DeepSpeed, this rounds master weights whose weights did not change, too."""
        self.partition.adopt_parameters()

    def _complaint_about_state(self, state: Any) -> str | None:
        """Returns why ``state`` is no state of this rank; None if it is one."""
        if not isinstance(state, dict) or set(state) != {"data_rank", "class", "partition", "optimizer"}:
            return "the state is none of engine.optimizer.state_dict(); pass what that returned on the same rank"
        rank, ranks = self._data_rank
        if tuple(state["data_rank"]) != (rank, ranks):
            written_rank, written_ranks = state["data_rank"]
            return (
                f"the state of engine.optimizer is that of data-parallel rank {written_rank} of {written_ranks}, this "
                f"is rank {rank} of {ranks}; load it where it was taken, or use save_checkpoint and load_checkpoint"
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
                f"the state of engine.optimizer has parameter groups of {written_sizes} shards, this optimizer of "
                f"{sizes}; build model, groups and ds_config.json as they were"
            )
        complaint = _complaint_about_units(self.partition, state["partition"])
        if complaint is not None:
            return complaint
        for unit in self.partition.units:
            saved = state["partition"][unit.name]
            if (saved["master"].shape, "weights" in saved) != (unit.master.shape, unit.master is not unit.shard):
                return (
                    f"the state of engine.optimizer holds {unit.name} as another zero_optimization.stage or data type "
                    "does; load it under the ds_config.json it was taken under"
                )
        return None

    @property
    def class_name(self) -> str:
        """The class of the optimizer that steps."""
        return type(self.optimizer).__name__

    def complaint_about_class(self, written: str | None) -> str | None:
        """Returns why the state of an optimizer of the class ``written`` does not fit; None if it does, or if the class
        is unknown."""
        if written in (self.class_name, None):
            return None
        return f"the optimizer state is that of {written}, this run's optimizer is {self.class_name}; use {written}"

    @property
    def _data_rank(self) -> tuple[int, int]:
        return self.dp_process_group.rank(), self.dp_process_group.size()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ConfigError: the optimizer updates shards, a new group would hold parameters it never sees change."""
        raise ConfigError(
            "a parameter group was added after deepspeed.initialize, when the optimizer holds shards; give it all "
            "groups before, with learning rate 0 for what trains later"
        )


def _partition_state(partition: ZeroPartition) -> dict[str, dict[str, Any]]:
    """Returns for every unit, by name, the contents of its storage in their order, this rank's master weights, and the
    weights if they are other tensors."""
    state = {}
    for unit in partition.units:
        # Cloned: a view would be written with the storage around it.
        state[unit.name] = {"contents": unit.contents(), "master": unit.master.detach().clone()}
        if unit.master is not unit.shard:
            state[unit.name]["weights"] = unit.shard.detach().clone()
    return state


def _complaint_about_units(partition: ZeroPartition, state: dict[str, dict[str, Any]]) -> str | None:
    """Returns how the units differ, in their parameters or in the order of these; None if they do not."""
    own = {unit.name: unit.contents() for unit in partition.units}
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
        unit.load(saved["master"], saved.get("weights"))
    partition.gather_stale()


def _initial_state(optimizer: torch.optim.Optimizer) -> defaultdict[torch.Tensor, Any]:
    """Returns the state before the first step, for the parameters that the groups have now. Adagrad makes its state
    when it is built, all other optimizers in their first step."""
    if type(optimizer) is not torch.optim.Adagrad:
        return defaultdict(dict)
    value = optimizer.defaults["initial_accumulator_value"]
    groups = [dict(group) for group in optimizer.param_groups]
    return torch.optim.Adagrad(groups, initial_accumulator_value=value).state
