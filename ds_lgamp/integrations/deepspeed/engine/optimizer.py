"""The optimizer object that DeepSpeed sees: it steps a torch optimizer on this rank's shards."""

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.fp16.loss_scaler import LossScaler, LossScalerBase
from torch.autograd.graph import increment_version

from ds_lgamp.config import ConfigError, LgampConfig
from ds_lgamp.integrations.deepspeed.checkpoint.rank_state import (
    complaint_about_class,
    load_state,
    names_of_cut,
    state_of,
)
from ds_lgamp.integrations.deepspeed.config.optimizer_choice import comes_from, skips_by_itself
from ds_lgamp.integrations.deepspeed.config.precision import checks_overflow, loss_scaler
from ds_lgamp.integrations.deepspeed.engine.nonfinite import LateFlag, NonfiniteCheck
from ds_lgamp.optimizers.host_updates import updates_of
from ds_lgamp.optimizers.norms import GradientNorm, clip_factor
from ds_lgamp.optimizers.tensors import TensorOptimizer
from ds_lgamp.optimizers.updates import Updates, has_other_step, start_postponed
from ds_lgamp.partition.unit import Unit
from ds_lgamp.partition.zero_partition import ZeroPartition
from ds_lgamp.schedule.spec import ProgramSpec


class PartitionedOptimizer(DeepSpeedOptimizer, torch.optim.Optimizer):
    """Steps a torch optimizer on this rank's shards. It passes for an optimizer of torch, whose schedulers take it, and
    leaves hooks to the one it steps.

    Args:
        updates: step the torch optimizer, on which the user's hyper-parameters and schedulers act unchanged. The
            gradients of their partition are final when :meth:`step` is called. Where they update a chunk when its
            gradient is reduced, nothing may depend on the gradients of all chunks.
        norm: that of the gradient over all ranks.
        data_group: the data-parallel group.
        gradient_clipping: the largest norm; 0 switches clipping off.
        skips_overflow: whether all ranks skip a step if any gradient is inf or NaN.
        learns_late: whether the optimizer's kernels can skip a step by themselves, on all ranks. If the scale is static
            too, the host learns of an overflow one step late.
        loss_scaler: holds the scale of the gradients, and adapts it after each step.
    """

    def __init__(
        self,
        updates: Updates,
        norm: GradientNorm,
        data_group: dist.ProcessGroup,
        gradient_clipping: float,
        skips_overflow: bool,
        learns_late: bool,
        loss_scaler: LossScalerBase,
    ) -> None:
        self._updates, self._norm = updates, norm
        self.optimizer, self.partition = updates.optimizer, updates.partition
        self.dp_process_group = data_group
        self.is_half_updated = False
        """Whether a step has updated some chunks and not all."""
        self.overflow = False
        """Whether the last step was skipped; if the host learns of it late, the step before the last."""
        self._late_overflow = LateFlag(self.partition.device) if learns_late else None
        self.loss_scaler = loss_scaler
        self.custom_loss_scaler = False
        self.loss_factor = 1.0
        """The factor of the loss, beside its scale. Gradients accumulate without it; the step multiplies them by it."""
        self._clipping, self._skips_overflow = gradient_clipping, skips_overflow
        self._global_grad_norm: torch.Tensor | None = None
        self.check: NonfiniteCheck | None = None
        """Looks for losses and gradients that are not finite; None looks for none."""
        self.optimizer.add_param_group = self.add_param_group  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        """The hooks and the defaults of the torch optimizer, where torch's constructor would have made others."""
        if name == "defaults" or name.startswith("_optimizer_"):
            return getattr(self.optimizer, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> dict:  # type: ignore[override]
        self.partition.catch_up()
        return self.optimizer.state

    @property
    def loss_scale(self) -> float:
        """The scale of the gradients that accumulate now. Setting it changes the scale of the next ones."""
        return self.loss_scaler.cur_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.loss_scaler.cur_scale = scale

    cur_scale = loss_scale

    def loss_gradient(self, loss: torch.Tensor, micro_batches: int) -> torch.Tensor:
        """Returns the gradient of the scaled mean over micro-batches with regard to the ``loss`` of one of them.

        A product, because a half-precision loss may not hold the scale: then the gradient is infinite, which the step
        finds. Filling a tensor with such a number may be an error.
        """
        return torch.ones_like(loss) * (self.loss_scale / micro_batches)

    @property
    def clip_grad(self) -> float:
        """The largest norm of the gradient; 0 for none. Setting it, on all ranks alike, changes the next steps. Raises
        ConfigError where chunks are updated before the norm of all gradients is known."""
        return self._clipping

    @clip_grad.setter
    def clip_grad(self, limit: float) -> None:
        if limit > 0 and self._updates.when == "reduction":
            raise ConfigError(
                f"engine.optimizer.clip_grad is set to {limit:g}, but gradient_clipping is 0 and chunks are updated as "
                "their gradients arrive; write the largest limit of the run into gradient_clipping"
            )
        self._clipping = limit

    def get_lr(self) -> float:
        """The learning rate of the first group."""
        return self.param_groups[0]["lr"]

    def set_lr(self, rate: float) -> None:
        """Sets the learning rate of all groups."""
        for group in self.param_groups:
            group["lr"] = rate

    @property
    def dynamic_loss_scale(self) -> bool:
        return self.loss_scaler.dynamic

    @property
    def late_overflow(self) -> bool:
        """Whether the last step was skipped and the host has not counted it yet. Reading it may wait for the device."""
        return self._late_overflow is not None and self._late_overflow.pending

    @late_overflow.setter
    def late_overflow(self, was_skipped: bool) -> None:
        if self._late_overflow is not None:
            self._late_overflow.pending = was_skipped

    def override_loss_scale(self, loss_scale: float) -> None:
        """Sets a scale that stays fixed unless the user changes it, as in DeepSpeed's optimizers."""
        self.loss_scaler, self.custom_loss_scaler = LossScaler(loss_scale), True

    def complaint_about_thawed(self) -> str | None:
        """Returns why the optimizer cannot step what the script has unfrozen on this rank; None if it can."""
        for unit in self.partition.units:
            for entry in unit.thawed:
                why = self._updates.cannot_take(unit, entry)
                if why is not None:
                    return (
                        f"parameter {entry.shown} was unfrozen after deepspeed.initialize, but {why}; unfreeze it "
                        "before that"
                    )
        return None

    def take(self, units: Collection[Unit]) -> None:
        """Steps the ``units`` of the partition, too, whose parameters the script has unfrozen."""
        self._updates.take(units)
        self._norm.watch(units)
        if self.check is not None:
            self.check.watch(units)

    def update(self, chunk: int) -> None:
        """Updates the shards of ``chunk``, as the last step asked or, with ``updates`` "reduction", before the step.
        Then it leaves to the step what several chunks share, and everything if user code watches. With offloading, the
        host's thread has the update to do when this returns."""
        if self._updates.when == "next_step":
            start_postponed(self.partition.chunk_units[chunk])
        elif not self._is_watched:
            self.is_half_updated = True
            units = self.partition.finish_gradients_of(chunk)
            self._updates.leave_out_frozen(units)
            for unit in units:
                # The optimizer may change the gradient.
                self._norm.measure(unit)
            self._updates.step_early(units, self._factor)

    @property
    def _is_watched(self) -> bool:
        return self._updates.is_watched or has_other_step(self)

    def settle_gradients(self) -> None:
        """Lets the host read every gradient, with the factor of the loss, if user code watches the step."""
        if self._is_watched:
            for unit in self.partition.units:
                unit.settle_store()
            for unit in self._updates.with_gradients():
                unit.scale_gradient(self.loss_factor)
            self.loss_factor = 1.0

    @property
    def _factor(self) -> float:
        """The factor of the accumulated gradients, without clipping."""
        return self.loss_factor / self.loss_scale

    def step(self) -> None:  # type: ignore[override]
        """Unscales the gradients, clips them by their norm over the whole model and updates the shards. Skips the
        update if ``skips_overflow`` is set and any gradient is inf or NaN, or if the :attr:`check` asks for it."""
        factor: Any = self._factor
        self._updates.leave_out_frozen(self._updates.with_gradients())
        bad_losses = None if self.check is None else self.check.bad_losses()
        self._global_grad_norm = self._norm.take(self._is_watched, bad_losses) * abs(factor)
        skips_now = self._find_overflow(self._global_grad_norm, bad_losses)
        self.loss_scaler.update_scale(self.overflow)
        if skips_now:
            return
        if self._clipping > 0 or factor != 1:
            limit = self._clipping or float("inf")
            factor = clip_factor(self._global_grad_norm, limit) * factor
        self.is_half_updated = True
        self._updates.step(factor, self._is_watched)
        self.is_half_updated = False
        for unit in self.partition.units:
            for entry in unit.storage.parameters if unit.trains else ():
                # A module that keeps what it has computed of a weight, such as a copy of fewer bits, finds it old.
                increment_version(entry.parameter)

    def _find_overflow(self, norm: torch.Tensor, bad_losses: torch.Tensor | None) -> bool:
        """Sets ``overflow``. Returns True if the host has to skip this step, because the optimizer would not. The
        ``norm`` is inf or NaN if any gradient is."""
        found = 1 - norm.isfinite().float() if self._skips_overflow else None
        if self.check is not None and bad_losses is not None:
            is_bad = self.check.record(norm, bad_losses)
            if self.check.skips:
                found = is_bad if found is None else found.maximum(is_bad)
        if found is None:
            return False
        if self._late_overflow is None or self.dynamic_loss_scale:
            # Nothing else makes the host wait for the device. A dynamic scale is needed before the next backward pass.
            self.overflow = bool(found)
            return self.overflow
        self.optimizer.found_inf = found  # type: ignore[attr-defined]
        self.overflow = self._late_overflow.exchange(found)
        if self.overflow:
            self._updates.learn_of_skip()
        return False

    def cut(self, names: Collection[str]) -> None:
        """Lets every parameter count its steps by itself that is in a unit with one of ``names``, as after one of the
        unit was frozen. Raises ConfigError where that cannot be done."""
        for unit in self.partition.units:
            named = [entry for entry in unit.storage.parameters if entry.name in names]
            if unit.trains and named:
                self._updates.cut(unit, named[0])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the partition drops gradients after the step."""

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of this rank's master weights and optimizer state. :meth:`load_state_dict` takes it on the
        same rank of a run with the same layout. To save everything that a run needs to go on, use save_checkpoint."""
        return state_of(self.optimizer, self.partition, self.dp_process_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned. All ranks call it together. Raises CheckpointError on all ranks, and
        changes nothing, if the state of one rank does not fit."""
        self.cut(names_of_cut(state_dict))
        load_state(self.optimizer, self.partition, self.dp_process_group, state_dict)

    def refresh_fp32_params(self) -> None:
        """Copies the weights to the master weights after user code changed the weights. The changes must be the same on
        all data-parallel ranks. As in DeepSpeed, master weights are rounded even where weights did not change."""
        self.partition.adopt_parameters()

    @property
    def class_name(self) -> str:
        """The class name of the torch optimizer. Those of bitsandbytes with state of 32 bits have names of torch's,
        and state of other names."""
        kind = type(self.optimizer)
        return f"bitsandbytes' {kind.__name__}" if comes_from("bitsandbytes", kind) else kind.__name__

    def complaint_about_class(self, written: str | None) -> str | None:
        """Returns why optimizer state of the class ``written`` does not fit. Returns None if it does, or if ``written``
        is None because the class is unknown."""
        return complaint_about_class(written, self.class_name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ConfigError: a new group would hold whole parameters, but the optimizer updates only shards."""
        raise ConfigError(
            "a parameter group was added after deepspeed.initialize, when the optimizer holds shards; pass all "
            "groups to deepspeed.initialize, with learning rate 0 for parameters that train later"
        )


def build_optimizer(
    optimizer: torch.optim.Optimizer,
    partition: ZeroPartition,
    settings: LgampConfig,
    config: Any,
    spec: ProgramSpec,
    norm_group: dist.ProcessGroup | None,
    data_group: dist.ProcessGroup,
) -> PartitionedOptimizer:
    """Returns the optimizer that block, DeepSpeedConfig and program ask for."""
    if isinstance(optimizer, TensorOptimizer):
        optimizer.bind(partition)
    norm = GradientNorm(partition, norm_group, settings.reproducible)
    return PartitionedOptimizer(
        updates_of(optimizer, partition, spec.updates, settings.stochastic_rounding),
        norm,
        data_group,
        config.gradient_clipping,
        checks_overflow(config),
        learns_late=skips_by_itself(optimizer),
        loss_scaler=loss_scaler(config),
    )
