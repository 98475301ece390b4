"""Writes a training run as a checkpoint that a run of any layout loads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_lgamp.checkpoint import folder as folders
from ds_lgamp.checkpoint.errors import CheckpointError, everywhere
from ds_lgamp.checkpoint.shard import FlatShard
from ds_lgamp.checkpoint.units import optimizer_scalars, optimizer_tensors, weights
from ds_lgamp.integrations.deepspeed.checkpoint.buffers import buffers_to_write
from ds_lgamp.integrations.deepspeed.checkpoint.description import describe, describe_parameters
from ds_lgamp.integrations.deepspeed.checkpoint.rank_state import rank_state_to_write
from ds_lgamp.integrations.deepspeed.checkpoint.run import Run
from ds_lgamp.integrations.deepspeed.model.module import empty_extra_states
from ds_lgamp.partition.agreement import everyone


def save(run: Run, directory: Path, tag: str, client_state: Any, publish_latest: bool) -> None:
    """Writes the run as ``directory/tag``. Collective over all ranks; raises CheckpointError on all.

    Args:
        client_state: a dictionary of the user's, kept for every rank.
        publish_latest: whether ``directory/latest`` names the checkpoint afterwards.
    """

    def collect() -> tuple[dict[str, FlatShard], dict[str, Any], tuple[Any, Any, Any]]:
        folders.check_tag(tag)
        if not isinstance(client_state, Mapping):
            raise CheckpointError(f"client_state is a {type(client_state).__name__}; pass a dictionary that holds it")
        partition, optimizer = run.optimizer.partition, run.optimizer.optimizer
        tensors = {**weights(partition), **optimizer_tensors(partition, optimizer)}
        tensors |= rank_state_to_write(run, client_state)
        # Alike on all data-parallel ranks: the first one's suffice.
        parameters = describe_parameters(run) if run.grid.data_parallel_id == 0 else {}
        own = parameters, optimizer_scalars(partition, optimizer), empty_extra_states(run.module)
        return tensors, describe(run), own

    tensors, state, own = everywhere(collect)
    tensors |= buffers_to_write(run)
    _merge_ranks(state, everyone(own))
    run.saver.save(directory, tag, tensors, state, publish_latest)


def _merge_ranks(state: dict[str, Any], ranks: list[tuple[dict[str, Any], dict[int, Any], list[str]]]) -> None:
    """Adds to ``state`` the parameters, the optimizer's scalars by group, and the empty extra states of all ranks."""
    parameters = {name: info for rank, _, _ in ranks for name, info in rank.items()}
    scalars = {group: values for _, rank, _ in ranks for group, values in rank.items()}
    state["parameters"] = {name: parameters[name] for name in sorted(parameters, key=_layer_of)}
    state["optimizer"]["scalars"] = [scalars.get(group, {}) for group in range(len(state["optimizer"]["groups"]))]
    state["layers"]["extra_states"] = sorted({name for _, _, rank in ranks for name in rank})


def _layer_of(name: str) -> int:
    """Returns the number of the layer that a parameter belongs to. Tied modules come first, as in the module."""
    first = name.split(".")[0]
    return int(first) if first.isdecimal() else -1
