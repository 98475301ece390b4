"""What ``engine.optimizer.state_dict()`` returns: a rank's own state, which the same rank of the same layout loads."""

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.ranges import with_own_kernels
from ds_lgamp.partition.agreement import raise_everywhere
from ds_lgamp.partition.zero_partition import ZeroPartition

_STATE_KEYS = {"data_rank", "shard", "class", "partition", "optimizer"}
_ALIKE = {"DeepSpeedCPULion": "FusedLion"}
"""Classes that take over each other's state: the same rule on the host and on the device."""


def state_of(
    optimizer: torch.optim.Optimizer, partition: ZeroPartition, data_group: dist.ProcessGroup
) -> dict[str, Any]:
    """Returns a copy of this rank's master weights and optimizer state."""
    partition.catch_up()
    return {
        "data_rank": (data_group.rank(), data_group.size()),
        "shard": _shard_place(partition),
        "class": type(optimizer).__name__,
        "partition": _partition_state(partition),
        "optimizer": deepcopy(optimizer.state_dict()),
    }


def load_state(
    optimizer: torch.optim.Optimizer, partition: ZeroPartition, data_group: dist.ProcessGroup, state: dict[str, Any]
) -> None:
    """Loads what :func:`state_of` returned. Collective over all ranks. Raises CheckpointError on all of them, and
    changes nothing, if the state of one does not fit."""
    raise_everywhere(_complaint_about_state(optimizer, partition, data_group, state), CheckpointError)
    _load_partition_state(partition, state["partition"])
    # Copied, because torch would update the given tensors in place.
    saved, own = deepcopy(state["optimizer"]), optimizer.state_dict()["param_groups"]
    saved["param_groups"] = [with_own_kernels(*pair) for pair in zip(saved["param_groups"], own)]
    optimizer.load_state_dict(saved)


def names_of_cut(state: Any) -> set[str]:
    """Returns the parameters in ``state``, of :func:`state_of`, that count their steps by themselves."""
    if not isinstance(state, dict) or state.keys() != _STATE_KEYS:
        return set()
    cut = [unit for unit in state["partition"].values() if unit.get("is_cut")]
    return {name for unit in cut for name, *_ in unit["contents"]}


def _complaint_about_state(
    optimizer: torch.optim.Optimizer, partition: ZeroPartition, data_group: dist.ProcessGroup, state: Any
) -> str | None:
    """Returns why this rank cannot load ``state``; None if it can."""
    if not isinstance(state, dict) or state.keys() != _STATE_KEYS:
        return "the state is not from engine.optimizer.state_dict(); pass what it returned on this rank"
    rank, ranks = data_group.rank(), data_group.size()
    if tuple(state["data_rank"]) != (rank, ranks):
        written_rank, written_ranks = state["data_rank"]
        return (
            f"the state of engine.optimizer is from data-parallel rank {written_rank} of {written_ranks}, but "
            f"this is rank {rank} of {ranks}; load it on its own rank, or use save_checkpoint and load_checkpoint"
        )
    shard_place = _shard_place(partition)
    if state["shard"] != shard_place:
        return (
            f"the state of engine.optimizer has {state['shard']}, but this run has {shard_place}; use "
            "save_checkpoint and load_checkpoint"
        )
    complaint = complaint_about_class(state["class"], type(optimizer).__name__)
    if complaint is not None:
        return complaint
    sizes, written_sizes = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, state["optimizer"]["param_groups"])
    )
    if sizes != written_sizes:
        if any(unit.master.is_cut for unit in partition.units) and not names_of_cut(state):
            return (
                "the state of engine.optimizer is from a time before a parameter was frozen; use save_checkpoint and "
                "load_checkpoint"
            )
        return (
            f"the state of engine.optimizer has parameter groups of {written_sizes} shards, but this optimizer "
            f"of {sizes}; build model, groups and ds_config.json as they were"
        )
    complaint = _complaint_about_units(partition, state["partition"])
    if complaint is not None:
        return complaint
    for unit in partition.units:
        saved = state["partition"][unit.name]
        if (saved["master"].shape, "weights" in saved) != (unit.master.values.shape, unit.master.is_copy):
            return (
                f"the state of engine.optimizer holds {unit.name} for another zero_optimization.stage or data "
                "type; load it with the ds_config.json of the run that it comes from"
            )
    return None


def complaint_about_class(written: str | None, own: str) -> str | None:
    """Returns why optimizer state of the class ``written`` does not fit the class ``own``. Returns None if it does, or
    if ``written`` is None because the class is unknown."""
    if written is None or len({_ALIKE.get(name, name) for name in (written, own)}) == 1:
        return None
    return f"the optimizer state is from {written}, but this run has {own}; use {written}"


def _shard_place(partition: ZeroPartition) -> str:
    """Returns which of a unit's parts is this rank's shard, in words."""
    policies = {unit.policy for unit in partition.units if unit.trains}
    return ", ".join(sorted(f"shard {policy.shard_index} of {policy.shard_group.size()}" for policy in policies))


def _partition_state(partition: ZeroPartition) -> dict[str, dict[str, Any]]:
    """Returns the state of every unit by name: the contents of its storage in their order, this rank's master weights,
    and the weights if they are other tensors."""
    state = {}
    for unit in partition.units:
        # Cloned, because torch.save writes a view with its whole storage.
        state[unit.name] = {"contents": unit.storage.contents(), "master": unit.master.values.detach().clone()}
        if unit.master.is_cut:
            state[unit.name]["is_cut"] = True
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
