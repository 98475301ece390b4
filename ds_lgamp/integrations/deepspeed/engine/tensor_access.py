"""Makes ``deepspeed.utils.safe_get_*``, ``safe_set_*`` and ``deepspeed.zero.GatheredParameters`` work on parameters.

These functions call attributes of the parameter itself, as stock DeepSpeed sets them on a ZeRO-3 parameter. ``ds_id``
marks it, ``_z3_optimizer`` reads and writes its parts, ``all_gather`` completes it and ``partition`` releases it. So
the functions work no matter when or from where they were imported.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.autograd.graph import increment_version

from ds_lgamp.config import ConfigError
from ds_lgamp.partition.flat_storage import FlatStorage
from ds_lgamp.partition.unit import Part, Unit, parts_of
from ds_lgamp.partition.zero_partition import ZeroPartition

_ids = count()
"""Numbers the parameters. All data-parallel ranks build the same engines in the same order, so their numbers agree."""


class CurrentStatus:
    """The ``ds_status`` of a unit's parameters. It always equals their current ZeroParamStatus."""

    def __init__(self, storage: FlatStorage) -> None:
        self._storage = storage

    def __eq__(self, other: object) -> bool:
        return self.now is getattr(other, "now", other)

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return repr(self.now)

    @property
    def now(self) -> ZeroParamStatus:
        """The current status. It is AVAILABLE only if every element is there and current. After a step at stages 1 and
        2 it is INFLIGHT until somebody needs the values, or NOT_AVAILABLE if gathers are deferred."""
        if self._storage.gathering is not None:
            return ZeroParamStatus.INFLIGHT
        complete = self._storage.resident and not self._storage.stale and self._storage.pending is None
        return ZeroParamStatus.AVAILABLE if complete else ZeroParamStatus.NOT_AVAILABLE


class TensorAccess:
    """Reads and writes single parameters, their gradients and their optimizer state, in full or in this rank's part, at
    every ZeRO stage.

    Reads return a copy in fp32. All data-parallel ranks call the functions for whole tensors together, with the same
    values. For a parameter that no optimizer owns, reads return None and writes raise ConfigError. Reads and writes of
    a gradient or state that does not exist at the moment raise ConfigError.

    Args:
        partition: its parameters get the attributes.
        optimizer: its state belongs to the partition's segments.
    """

    def __init__(self, partition: ZeroPartition, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parts: dict[torch.Tensor, Part] = {}
        self._in_blocks: set[str] = set()
        self.take(partition.units)

    def take(self, units: Iterable[Unit]) -> None:
        """Gives the parameters of ``units`` the attributes, in place of those that they had from other units."""
        for unit in units:
            for part in parts_of(unit):
                self._parts[part.parameter] = part
                self._mark(part)

    def _mark(self, part: Part) -> None:
        attributes = {
            "ds_id": next(_ids),
            "ds_shape": part.shape,
            "ds_numel": part.shape.numel(),
            "ds_status": CurrentStatus(part.unit.storage),
            "ds_process_group": part.unit.policy.data_group,
            "all_gather": partial(_all_gather, part.parameter),
            "partition": partial(_partition, part.parameter),
            "_z3_optimizer": self,
            # safe_get_full_grad reads these two before ``grad``, which holds only the gradients of this rank.
            "_hp_grad": True,
            "get_full_hp_grad": partial(self.get_fp32_grad_for_param, part.parameter),
        }
        for name, value in attributes.items():
            setattr(part.parameter, name, value)

    # Weights and optimizer state, as safe_get_full_fp32_param and similar functions call them

    def get_full_hp_param(
        self, parameter: torch.nn.Parameter, optim_state_key: str | None = None
    ) -> torch.Tensor | None:
        part = self._parts[parameter]
        return None if part.group is None else part.gather(self._values(part, optim_state_key, together=True).float())

    def set_full_hp_param(
        self, value: torch.Tensor, parameter: torch.nn.Parameter, optim_state_key: str | None = None
    ) -> None:
        part = self._writable(self._parts[parameter], value)
        if optim_state_key is None:
            part.write_weights(part.of(value))
        else:
            self._write_state(part, optim_state_key, part.of(value), together=True)

    def get_local_fp32_param(
        self, parameter: torch.nn.Parameter, optim_state_key: str | None = None
    ) -> torch.Tensor | None:
        part = self._local(parameter)
        return None if part.group is None else self._values(part, optim_state_key, together=False).float().clone()

    def set_local_hp_param(
        self, value: torch.Tensor, parameter: torch.nn.Parameter, optim_state_key: str | None = None
    ) -> None:
        part = self._writable(self._local(parameter), value, local=True)
        if optim_state_key is None:
            if part.unit.storage.frees_weights and part.unit.storage.resident:
                raise ConfigError(
                    f"safe_set_local_fp32_param is called for {part.shown} inside a block of "
                    "deepspeed.zero.GatheredParameters; leave it first, or use safe_set_full_fp32_param"
                )
            part.write_weights(value.reshape(-1))
        else:
            self._write_state(part, optim_state_key, value.reshape(-1), together=False)

    # Gradients

    def get_fp32_grad_for_param(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        part = self._parts[parameter]
        return None if part.group is None else part.gather(self._gradient(part).float())

    def set_fp32_grad_for_param(self, value: torch.Tensor, parameter: torch.nn.Parameter) -> None:
        part = self._writable(self._parts[parameter], value)
        self._gradient(part).copy_(part.of(value))

    def get_local_fp32_grad_for_param(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        part = self._local(parameter)
        return None if part.group is None else self._gradient(part).float().clone()

    def set_local_grad_for_param(self, value: torch.Tensor, parameter: torch.nn.Parameter) -> None:
        part = self._writable(self._local(parameter), value, local=True)
        self._gradient(part).copy_(value.reshape(-1))

    def update_fp32_grad_for_param_vectorized(
        self, update: Callable[[torch.Tensor, torch.nn.Parameter], torch.Tensor], parameters: Sequence[Any]
    ) -> None:
        for parameter in parameters:
            gradient = self.get_fp32_grad_for_param(parameter)
            if gradient is not None:
                self.set_fp32_grad_for_param(update(gradient, parameter), parameter)

    # GatheredParameters

    def gather(self, parameter: torch.nn.Parameter) -> FlatStorage:
        """Starts the gather of the storage that contains ``parameter`` and returns the storage. Its parameters stay
        complete until :meth:`release`."""
        part = self._parts[parameter]
        self._in_blocks.add(part.name)
        storage = part.unit.storage
        storage.hold(part.name, exact=True)
        if part.unit.policy.whole and not storage.frees_weights:
            # No gather could bring back what the block changes.
            storage.remember(part.in_flat)
        return storage

    def release(self, parameter: torch.nn.Parameter, changed: bool) -> None:
        """Lets the storage release its parameters again. If the parameter ``changed``, in the same way on all
        data-parallel ranks, training goes on with its new values; else at stage 3 with those before the block."""
        part = self._parts[parameter]
        before = part.unit.storage.forget(part.in_flat)
        if changed:
            part.adopt_weights()
            # Who has copied the parameter finds the copy old. Writes to ``data`` in the block do not count.
            increment_version(parameter)
        elif before is not None:
            parameter.data = part.unit.storage.flat[part.in_flat].copy_(before).view(part.shape)
        self._in_blocks.discard(part.name)
        part.unit.storage.drop(part.name)

    def refuse_inside_block(self, call: str) -> None:
        """Raises ConfigError inside a block of GatheredParameters: the end of the block would undo the changes that
        ``call`` makes to weights."""
        if self._in_blocks:
            raise ConfigError(f"{call} is called inside a block of deepspeed.zero.GatheredParameters; leave it first")

    # Shared by the sections above

    def _values(self, part: Part, key: str | None, together: bool) -> torch.Tensor:
        """Returns a view of this rank's part of the master weights, or of the optimizer state ``key``.

        With ``together``, all data-parallel ranks call it and raise together. A rank without elements cannot tell by
        itself whether the state exists.
        """
        part.unit.storage.catch_up()
        segment = part.segment
        if key is None:
            return part.unit.master.values[part.in_shard]
        state = None if segment is None else self._optimizer.state.get(segment.shard, {}).get(key)
        absent = segment is not None and (not isinstance(state, torch.Tensor) or state.shape != segment.shard.shape)
        if together and part.unit.storage.partitioned:
            flag = torch.tensor(int(absent), device=part.unit.storage.flat.device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=part.unit.policy.data_group)
            absent = bool(flag)
        if absent:
            raise ConfigError(
                f"the optimizer has no state '{key}' for every element of {part.shown}; use a name from "
                "engine.optimizer.state after the first step"
            )
        if segment is None or state is None:
            return part.unit.master.values[part.in_shard]
        return state[part.in_shard.start - segment.start : part.in_shard.stop - segment.start]

    def _write_state(self, part: Part, key: str, values: torch.Tensor, together: bool) -> None:
        state = self._values(part, key, together)
        part.unit.before_change()
        state.copy_(values)

    def _gradient(self, part: Part) -> torch.Tensor:
        reduction = part.unit.reduction
        if reduction.shard_gradient is None or not reduction.is_final or part.unit.storage.pending is not None:
            raise ConfigError(
                f"the gradient of {part.shown} exists only while the optimizer steps; call this in an optimizer hook, "
                "or wrap engine.optimizer.step and call it before the wrapped step"
            )
        # The device may still be copying it to the host.
        part.unit.settle_store()
        return reduction.shard_gradient[part.in_shard]

    def _local(self, parameter: torch.nn.Parameter) -> Part:
        part = self._parts[parameter]
        zero_stage = part.unit.policy.zero_stage
        if zero_stage < 3:
            raise ConfigError(
                f"zero_optimization.stage is {zero_stage}, but safe_get_local_* and safe_set_local_* are for "
                "stage 3; use safe_get_full_* and safe_set_full_*"
            )
        return part

    def _writable(self, part: Part, value: torch.Tensor, local: bool = False) -> Part:
        if part.group is None:
            raise ConfigError(
                f"no optimizer owns {part.shown}; write to it in deepspeed.zero.GatheredParameters with a modifier_rank"
            )
        numel = part.numel if local else part.shape.numel()
        if value.numel() != numel:
            raise ConfigError(f"the value has {value.numel()} elements, but {part.shown} takes {numel} here")
        return part


def _all_gather(
    parameter: torch.nn.Parameter, param_list: Sequence[Any] | None = None, async_op: bool = False, hierarchy: int = 0
) -> None:
    """Gathers the parameters, which may belong to several engines. All data-parallel ranks call it together."""
    for storage in [each._z3_optimizer.gather(each) for each in param_list or [parameter]]:
        storage.finish_gather()


def _partition(
    parameter: torch.nn.Parameter,
    param_list: Sequence[Any] | None = None,
    hierarchy: int = 0,
    has_been_updated: bool = False,
    free_data: bool = True,
) -> None:
    """Releases the parameters. If ``has_been_updated``, the shards first take over the values of the parameters."""
    for each in param_list or [parameter]:
        each._z3_optimizer.release(each, has_been_updated)
