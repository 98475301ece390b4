"""Steps a torch optimizer on the shards of all units at once, or of one unit after another: on the device, or in the
host's thread beside the program."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import optimizer as of_torch

from ds_lgamp.optimizers.tensors import TensorOptimizer
from ds_lgamp.partition.flat_storage import UnitParameter
from ds_lgamp.partition.segments import Segment
from ds_lgamp.partition.unit import Unit
from ds_lgamp.partition.zero_partition import ZeroPartition

Options = list[dict[str, Any]]
"""The hyper-parameters of every parameter group."""


class Updates:
    """Steps ``optimizer`` for some units, and lets their weights follow.

    Args:
        optimizer: its groups hold the shards of ``partition`` from now on.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, partition: ZeroPartition) -> None:
        self.optimizer, self._partition = optimizer, partition
        self._lagging: Sequence[Unit] = ()
        """Units whose weights do not equal their master weights, because the optimizer is updating these."""
        for group in optimizer.param_groups:
            group["params"] = []
        for segment in partition.segments():
            optimizer.param_groups[segment.group]["params"].append(segment.shard)
        # This hook runs before all others, because those may read parameters.
        hook = optimizer.register_step_post_hook(self._follow)
        optimizer._optimizer_step_post_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]

    @property
    def is_watched(self) -> bool:
        """Whether user code runs with each step of the optimizer: hooks, or a function in place of its step. It expects
        one step per batch, with all gradients."""
        optimizer = self.optimizer
        hooks = (
            *optimizer._optimizer_step_pre_hooks,  # type: ignore[attr-defined]
            *of_torch._global_optimizer_pre_hooks,
            *of_torch._global_optimizer_post_hooks,
        )
        own_step = vars(optimizer).get("step")
        # A scheduler of torch wraps the step of the class.
        replaced = own_step is not None and getattr(own_step, "__wrapped__", None) is not type(optimizer).step
        return bool(hooks) or len(optimizer._optimizer_step_post_hooks) > 1 or replaced  # type: ignore[attr-defined]

    def options(self) -> Options:
        """Returns a copy of the current hyper-parameters."""
        return [
            {key: deepcopy(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def update_some(self, units: Sequence[Unit], factor: Any) -> None:
        """Steps the optimizer for ``units`` on the device, at once, while others have gradients too.

        Args:
            factor: what multiplies the gradients.
        """
        for unit in units:
            unit.scale_gradient(factor)
        with self._groups_of(units, self.options()):
            self.update(units)

    def update(self, units: Sequence[Unit]) -> None:
        """Steps the optimizer. All other units than ``units`` have no gradient."""
        for unit in units:
            unit.before_change()
        self._lagging = units
        self.optimizer.step()
        if self._lagging:
            # Somebody replaced the optimizer's step and thereby its hooks.
            self._follow()

    def leave_out_frozen(self, units: Sequence[Unit]) -> None:
        """Lets the next step leave those parameters of ``units`` alone, with their state, that the script has frozen.
        The gradients are final."""
        for unit in units:
            if unit.reduction.frozen:
                self.cut(unit, unit.reduction.frozen[0])
                unit.master.leave_out(unit.reduction.frozen)

    def cut(self, unit: Unit, frozen: UnitParameter) -> None:
        """Lets the optimizer hold each parameter of ``unit`` by itself, because ``frozen`` is or was frozen for a
        time."""
        cut(self.optimizer, self._partition, unit)

    def settle_states(self) -> None:
        """Moves states that somebody made in memory to where they belong."""

    def announce(self, unit: Unit) -> None:
        """Tells that the host's thread is about to update ``unit``."""

    def update_alone(self, unit: Unit, factor: Any, options: Options) -> Callable[[], None] | None:
        """Steps the optimizer for ``unit`` alone and frees its gradient. The other units' gradients and states stay.
        Returns what waits until the update is on the disk; None without one.

        Args:
            factor: what multiplies the gradient.
            options: the hyper-parameters of the step, as far as they may have changed since.
        """
        unit.scale_gradient(factor)
        with self._groups_of([unit], options):
            self.update([unit])
        unit.drop_gradient()
        return None

    @staticmethod
    def shards_of(unit: Unit, group: int) -> list[torch.nn.Parameter]:
        """Returns the shards of ``unit`` that the optimizer's ``group`` owns."""
        return [segment.shard for segment in unit.master.segments if segment.group == group]

    @contextmanager
    def _groups_of(self, units: Sequence[Unit], options: Options) -> Iterator[None]:
        """Leaves only the shards of ``units`` in the optimizer's groups, and sets their ``options``."""
        groups = self.optimizer.param_groups
        before = []
        for index, group in enumerate(groups):
            own = {**options[index], "params": [shard for unit in units for shard in self.shards_of(unit, index)]}
            before.append({key: group[key] for key in own if key in group})
            group.update(own)
        try:
            yield
        finally:
            for group, values in zip(groups, before):
                group.update(values)

    def _follow(self, *_: Any) -> None:
        for unit in self._lagging:
            unit.follow_update()
            unit.after_update()
        self._lagging = ()


class HostUpdateError(RuntimeError):
    """An update on the host failed; the message names the rank and the unit."""


class HostUpdates(Updates):
    """Updates for shards on the host.

    :meth:`update_alone` runs in the host's thread. There it leaves the optimizer's groups alone, which schedulers and
    scripts read and write meanwhile: it steps a twin, which has groups of its own and shares the state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, partition: ZeroPartition) -> None:
        super().__init__(optimizer, partition)
        self._twin = _twin_of(optimizer)

    def update_alone(self, unit: Unit, factor: Any, options: Options) -> Callable[[], None] | None:
        with self._named(unit):
            unit.scale_gradient(factor)
            unit.before_change()
            self._twin.state = self.optimizer.state
            self._twin.param_groups = [
                {**group, "params": self.shards_of(unit, index)} for index, group in enumerate(options)
            ]
            self._twin.step()
            unit.round_weights()
            unit.drop_gradient()
            unit.after_update()
        return None

    @contextmanager
    def _named(self, unit: Unit) -> Iterator[None]:
        """Lets errors of an update name rank and unit."""
        try:
            yield
        except Exception as error:
            raise HostUpdateError(
                f"rank {dist.get_rank()} failed to update {unit.name} on the host ({type(error).__name__}: {error})"
            ) from error


def _twin_of(optimizer: torch.optim.Optimizer) -> Any:
    """Returns an optimizer with all attributes of ``optimizer`` but its hooks, and without what a scheduler or a script
    wrapped around its step."""
    # DeepSpeedCPUAdam would free its part in C++ a second time.
    kind = type(type(optimizer).__name__, (type(optimizer),), {"__del__": lambda self: None})
    twin: Any = object.__new__(kind)
    twin.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return twin


def cut(optimizer: torch.optim.Optimizer, partition: ZeroPartition, unit: Unit) -> None:
    """Gives each parameter of ``unit`` a segment of its own, with its part of the state of ``optimizer``, which counts
    its steps by itself from now on. No update of the unit is under way."""
    if unit.master.is_cut:
        return
    wholes = unit.master.segments
    unit.master.cut()
    for whole in wholes:
        parts = [segment for segment in unit.master.segments if segment.is_within(whole)]
        group = optimizer.param_groups[whole.group]
        if isinstance(optimizer, torch.optim.SGD):
            # Its fused kernel fails if one parameter has momentum and another has none yet.
            group["fused"] = False
        shards = group["params"]
        index = next(index for index, shard in enumerate(shards) if shard is whole.shard)
        shards[index : index + 1] = [part.shard for part in parts]
        state = optimizer.state.pop(whole.shard, None)
        if state:
            for part in parts:
                optimizer.state[part.shard] = {key: _of_part(value, whole, part) for key, value in state.items()}
    if isinstance(optimizer, TensorOptimizer):
        optimizer.bind(partition)


def _of_part(value: Any, whole: Segment, part: Segment) -> Any:
    """Returns what of a ``value`` in the state of ``whole`` belongs to ``part``."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == whole.shard.shape:
        value = value[part.start - whole.start : part.end - whole.start]
    return value.clone()
