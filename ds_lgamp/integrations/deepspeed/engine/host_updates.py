"""Steps a torch optimizer in the host's thread, for one unit after another, beside the program."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ds_lgamp.integrations.deepspeed.engine.updates import Options, Updates
from ds_lgamp.partition.unit import Unit
from ds_lgamp.partition.zero_partition import ZeroPartition


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
