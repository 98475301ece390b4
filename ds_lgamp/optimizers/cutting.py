"""Cuts what an optimizer holds into single parameters, so that it can step some of them and leave others alone."""

from typing import Any

import torch

from ds_lgamp.optimizers.tensors import TensorOptimizer
from ds_lgamp.partition.segments import Segment
from ds_lgamp.partition.unit import Unit
from ds_lgamp.partition.zero_partition import ZeroPartition


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
