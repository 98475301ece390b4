"""The state of the optimizer in Megatron-core's distributed checkpoints, at any layout.

The files have what Megatron-core saves without the distributed optimizer: whole tensors by the names of parameters.
Each tensor is collected on one data-parallel rank, in turn, which saves and loads it. So no rank holds more than about
its shard.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)

from ds_lgamp.partition.unit import Part, parts_of
from ds_lgamp.partition.zero_partition import ZeroPartition

MASTER, MASTER_OF_DISTRIBUTED = "fp32_param", "param"
"""Names of master weights: Megatron-core's, and that of its distributed optimizer, if its state is fully reshardable.
All other names are the same."""


class OwnedPart(NamedTuple):
    """A parameter, and who saves its state."""

    number: int
    """Its number among the parameters of this pipeline rank that train."""
    part: Part
    owner: int
    """The data-parallel rank that saves and loads the whole tensors."""


class OptimizerState:
    """Reads and writes the state of ``optimizer``, whose groups hold the shards of ``partition``.

    Args:
        names: the names of the optimizer's tensors, such as ``exp_avg``.
    """

    def __init__(self, partition: ZeroPartition, optimizer: Any, names: tuple[str, ...]) -> None:
        self._partition, self._optimizer, self._names = partition, optimizer, names

    def sharded(self, model: Mapping[str, Any], is_loading: bool, master: str = MASTER) -> dict[str, Any]:
        """The state and the options of the groups, for Megatron-core to save or to load into. Weights are whole. All
        ranks call it together.

        Args:
            model: what Megatron-core saves of the model.
            is_loading: whether the tensors are to be filled.
            master: the name of master weights in the files.
        """
        owned = list(self._owned())
        tensors = get_param_id_to_sharded_param_map(model, (entry.part.parameter for entry in owned))
        state: dict[Any, Any] = {}
        for number, part, owner in owned:
            for name in self._names_of(part):
                whole = self._empty(part) if is_loading else part.gather(self._value(part, name))
                if owner == part.unit.policy.data_group.rank():
                    # Of the data-parallel ranks only the owner has the tensor.
                    main = replace(tensors[number], replica_id=(*tensors[number].replica_id[:-1], 0))
                    prefix = f"optimizer.state.{master if name == MASTER else name}"
                    state.setdefault(number, {})[name] = make_sharded_optimizer_tensor(main, whole, prefix)
        steps = [values["step"] for values in self._optimizer.state.values() if "step" in values]
        if steps and not is_loading:
            state["common_step"] = steps[0].clone()
        groups = [{**group, "params": LocalNonpersistentObject([])} for group in self._optimizer.param_groups]
        return {"state": state, "param_groups": groups}

    def load(self, state: Mapping[Any, Any], step: Any) -> None:
        """Takes this rank's parts of tensors that Megatron-core has loaded on their owners. All ranks call it together.

        Args:
            state: the loaded tensors.
            step: how often the optimizer has stepped, for every parameter; None if it counts that itself.
        """
        self._begin(step)
        for number, part, owner in self._owned():
            group = part.unit.policy.data_group
            for name in self._names_of(part):
                whole = state[number][name].detach() if owner == group.rank() else self._empty(part)
                dist.broadcast(whole, group=group, group_src=owner)
                self._value(part, name).copy_(part.of(whole))

    def _begin(self, step: Any) -> None:
        """Makes the state that the optimizer has after its first step."""
        for segment in self._partition.segments():
            values = {name: torch.zeros_like(segment.shard, requires_grad=False) for name in self._names}
            if step is not None:
                values["step"] = torch.as_tensor(step, dtype=torch.float32).clone()
            self._optimizer.state[segment.shard] = values

    def _owned(self) -> Iterator[OwnedPart]:
        parts = [part for unit in self._partition.units if unit.trains for part in parts_of(unit)]
        for number, part in enumerate(parts):
            yield OwnedPart(number, part, number % part.unit.policy.data_group.size())

    def _names_of(self, part: Part) -> tuple[str, ...]:
        return (*self._names, MASTER) if part.unit.master.is_copy else self._names

    def _value(self, part: Part, name: str) -> torch.Tensor:
        """The part [numel] of one tensor of the state; zeros before the optimizer's first step."""
        master, segment = part.unit.master.values, part.segment
        if name == MASTER or segment is None:
            return master[part.in_shard]
        values = self._optimizer.state.get(segment.shard, {})
        if name not in values:
            return torch.zeros_like(master[part.in_shard])
        start = part.in_shard.start - segment.start
        return values[name][start : start + part.numel]

    def _empty(self, part: Part) -> torch.Tensor:
        """A whole tensor to load into."""
        return torch.empty(part.shape, dtype=part.unit.master.values.dtype, device=self._partition.device)
