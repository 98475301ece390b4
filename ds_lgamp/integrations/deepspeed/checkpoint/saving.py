"""Writes a training run as a checkpoint that a run of any layout loads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

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


class Own(NamedTuple):
    """What ranks tell each other for the checkpoint's description."""

    parameters: dict[str, Any]
    """Their descriptions by name."""
    scalars: dict[int, dict[str, Any]]
    """The optimizer's state beside tensors, by group."""
    extra_states: set[str]
    """The names of empty extra states."""


def save(
    run: Run, directory: Path, tag: str, client_state: Any, publish_latest: bool, exclude_frozen: bool = False
) -> None:
    """Writes the run as ``directory/tag``. Collective over all ranks; raises CheckpointError on all.

    Args:
        client_state: a dictionary of the user's, kept for every rank.
        publish_latest: whether ``directory/latest`` names the checkpoint afterwards.
        exclude_frozen: whether to leave out parameters that do not train.
    """

    def collect() -> tuple[dict[str, FlatShard], dict[str, Any], Own]:
        folders.check_tag(tag)
        if not isinstance(client_state, Mapping):
            raise CheckpointError(f"client_state is a {type(client_state).__name__}; pass a dictionary that holds it")
        partition, optimizer = run.optimizer.partition, run.optimizer.optimizer
        partition.catch_up()
        tensors = {**weights(partition, exclude_frozen), **optimizer_tensors(partition, optimizer)}
        tensors |= rank_state_to_write(run, client_state)
        # Alike on all data-parallel ranks: the first one's suffice.
        parameters = describe_parameters(run, exclude_frozen) if run.grid.data_parallel_id == 0 else {}
        own = Own(parameters, optimizer_scalars(partition, optimizer), set(empty_extra_states(run.placed)))
        return tensors, describe(run), own

    tensors, state, own = everywhere(collect)
    tensors |= buffers_to_write(run)
    # All ranks of a step have what the ranks of the step before told them, so the last step tells all of all.
    for group in (
        run.grid.get_data_parallel_group(),
        run.grid.get_slice_parallel_group(),
        run.grid.get_pipe_parallel_group(),
    ):
        own = _merged(everyone(own, group))
    _enter(state, own)
    run.saver.save(directory, tag, tensors, state, publish_latest)


def _merged(ranks: list[Own]) -> Own:
    parameters = {name: info for rank in ranks for name, info in rank.parameters.items()}
    scalars = {group: values for rank in ranks for group, values in rank.scalars.items()}
    return Own(parameters, scalars, {name for rank in ranks for name in rank.extra_states})


def _enter(state: dict[str, Any], own: Own) -> None:
    """Adds to ``state`` what all ranks have."""
    state["parameters"] = {name: own.parameters[name] for name in sorted(own.parameters, key=_layer_of)}
    state["optimizer"]["scalars"] = [own.scalars.get(group, {}) for group in range(len(state["optimizer"]["groups"]))]
    state["layers"]["extra_states"] = sorted(own.extra_states)


def _layer_of(name: str) -> int:
    """Returns the number of the layer that a parameter belongs to. Tied modules come first, as in the module."""
    first = name.split(".")[0]
    return int(first) if first.isdecimal() else -1
