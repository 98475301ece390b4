"""Tensors of two chunks on the ranks of a test, with an optimizer on their shards and gradients that are made up."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from ds_lgamp.optimizers.updates import cut
from ds_lgamp.partition.policy import NodeGroups, UnitParameter, ZeroPolicy, node_groups
from ds_lgamp.partition.unit import parts_of
from ds_lgamp.partition.zero_partition import ZeroPartition, build_partition
from ds_lgamp.runtime.measure import CollectiveCounter
from ds_lgamp.schedule.spec import Hierarchy

SHAPES = {
    "0.embedding": (11, 15),
    "0.tall": (40, 16),
    "0.bias": (40,),
    "0.joint": (48, 16),
    "1.wide": (16, 40),
    "1.square": (24, 24),
    "1.norm": (24,),
    "1.zero": (8, 8),
}
"""All tensors by name. The one that is called zero begins with zeros, and so does its gradient."""
SLICED = {"0.tall": 0, "0.bias": 0, "0.joint": 0, "1.wide": 1}
"""The dimension along which tensor-parallel ranks have slices."""


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.zeros(shape) if "zero" in name else 0.3 * torch.randn(shape, generator=generator)
        for name, shape in SHAPES.items()
    }


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.zeros(shape) if "zero" in name and step == 0 else torch.randn(shape, generator=generator)
        for name, shape in SHAPES.items()
    }


class Sharded:
    """The tensors on this rank, and ``optimizer`` on them.

    Args:
        optimizer: its groups have no parameters yet.
        group_of: the group of every tensor; a tensor without one does not train.
        stage: the ZeRO stage.
        data_group: the data-parallel ranks.
        tensor_group: the tensor-parallel ranks; None if there is one.
        nodes: the groups of hierarchical shards; None if all data-parallel ranks are alike.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group_of: dict[str, int],
        stage: int,
        data_group: dist.ProcessGroup,
        tensor_group: dist.ProcessGroup | None = None,
        nodes: NodeGroups | None = None,
    ) -> None:
        self.optimizer, self.tensor_group = optimizer, tensor_group
        chunks: dict[int, list[UnitParameter]] = {0: [], 1: []}
        for name, whole in weights().items():
            sliced = SLICED.get(name) if tensor_group is not None else None
            parameter = Parameter(self.slice_of(name, whole).clone())
            chunks[int(name[0])].append(UnitParameter(name, parameter, group_of.get(name), sliced))
        policy = ZeroPolicy(data_group, stage, tensor_group=tensor_group, nodes=nodes)
        self.partition: ZeroPartition = build_partition(chunks, [], policy, torch.device("cpu"))
        for group in optimizer.param_groups:
            group["params"] = []
        for segment in self.partition.segments():
            optimizer.param_groups[segment.group]["params"].append(segment.shard)
        optimizer.bind(self.partition)

    def slice_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Returns this tensor-parallel rank's slice of a tensor."""
        if self.tensor_group is None or name not in SLICED:
            return whole
        return whole.chunk(self.tensor_group.size(), SLICED[name])[self.tensor_group.rank()]

    def step(self, whole: dict[str, torch.Tensor]) -> None:
        """Steps with the gradients ``whole``, as they are after all reductions. What has none is frozen."""
        frozen = [
            [entry for entry in unit.storage.parameters if entry.name not in whole] for unit in self.partition.units
        ]
        for unit, entries in zip(self.partition.units, frozen):
            if entries:
                cut(self.optimizer, self.partition, unit)
        for segment in self.partition.segments():
            segment.shard.grad = torch.zeros_like(segment.shard)
        for unit in self.partition.units:
            for part in parts_of(unit):
                segment = part.segment
                if segment is not None and part.name in whole:
                    begin = part.in_shard.start - segment.start
                    own = part.of(self.slice_of(part.name, whole[part.name]))
                    segment.shard.grad[begin : begin + part.numel] = own
        for unit, entries in zip(self.partition.units, frozen):
            unit.master.leave_out(entries)
        self.optimizer.step()

    def gathered(self) -> dict[str, torch.Tensor]:
        """Returns the slices of all tensors that this rank's tensor-parallel rank has, from all data-parallel ranks."""
        return {
            part.name: part.gather(unit.master.values[part.in_shard].detach())
            for unit in self.partition.units
            for part in parts_of(unit)
        }


STEPS = 20


def trained(
    optimizer: torch.optim.Optimizer, group_of: dict[str, int], *place: Any, given: Callable[[int], dict] = gradients
) -> tuple[Sharded, dict[str, torch.Tensor], list[tuple[str, int]]]:
    """Returns the tensors at a place after some steps, whole, and the collectives of the last step."""
    sharded = Sharded(optimizer, group_of, *place)
    for step in range(STEPS):
        with CollectiveCounter() as counter:
            sharded.step(given(step))
    return sharded, sharded.gathered(), counter.log


def largest_difference(sharded: Sharded, own: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Returns the largest difference of a tensor, relative to its norm."""
    slices = {name: sharded.slice_of(name, tensor) for name, tensor in expected.items()}
    return max(float((own[name] - slices[name]).norm() / slices[name].norm()) for name in own)


def places_of_four() -> dict[Any, tuple]:
    """Returns places on four ranks: two data-parallel and two tensor-parallel ones by stage, or two nodes."""
    rank = dist.get_rank()
    data = [dist.new_group([first, first + 2]) for first in (0, 1)][rank % 2]
    tensor = [dist.new_group([first, first + 1]) for first in (0, 2)][rank // 2]
    nodes = {
        ("nodes", replicated): (3, dist.group.WORLD, None, node_groups(Hierarchy(2, replicated), [range(4)]))
        for replicated in (False, True)
    }
    return {stage: (stage, data, tensor) for stage in (0, 2)} | nodes
