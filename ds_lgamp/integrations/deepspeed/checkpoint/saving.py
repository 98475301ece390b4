"""Writes a training run as a checkpoint that a run of any layout loads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_lgamp.checkpoint import folder as folders
from ds_lgamp.checkpoint.errors import CheckpointError, everywhere
from ds_lgamp.checkpoint.shard import FlatShard
from ds_lgamp.checkpoint.shares import Share, enter, merged
from ds_lgamp.checkpoint.units import optimizer_scalars, optimizer_tensors, scalars_of_parameters, weights
from ds_lgamp.integrations.deepspeed.checkpoint.buffers import buffers_to_write
from ds_lgamp.integrations.deepspeed.checkpoint.description import describe, describe_parameters
from ds_lgamp.integrations.deepspeed.checkpoint.rank_state import rank_state_to_write
from ds_lgamp.integrations.deepspeed.checkpoint.run import Run
from ds_lgamp.integrations.deepspeed.model.module import empty_extra_states
from ds_lgamp.partition.agreement import everyone


def save(
    run: Run, directory: Path, tag: str, client_state: Any, publish_latest: bool, exclude_frozen: bool = False
) -> None:
    """Writes the run as ``directory/tag``. Collective over all ranks; raises CheckpointError on all.

    Args:
        client_state: a dictionary of the user's, kept for every rank.
        publish_latest: whether ``directory/latest`` names the checkpoint afterwards.
        exclude_frozen: whether to leave out parameters that do not train.
    """

    def collect() -> tuple[dict[str, FlatShard], dict[str, Any], Share]:
        folders.check_tag(tag)
        if not isinstance(client_state, Mapping):
            raise CheckpointError(f"client_state is a {type(client_state).__name__}; pass a dictionary that holds it")
        if run.optimizer.is_half_updated:
            raise CheckpointError(
                "the last batch failed after some chunks had been updated, so weights of two steps would be saved; "
                "go on from the last checkpoint"
            )
        partition, optimizer = run.optimizer.partition, run.optimizer.optimizer
        partition.attach_parameters()
        partition.catch_up()
        tensors = {**weights(partition, exclude_frozen), **optimizer_tensors(partition, optimizer)}
        tensors |= rank_state_to_write(run, client_state)
        share = share_of(run, exclude_frozen)
        state = {**describe(run), "late_overflow": run.optimizer.late_overflow}
        scalars, of_parameters = optimizer_scalars(partition, optimizer), scalars_of_parameters(partition, optimizer)
        return tensors, state, share._replace(scalars=scalars, of_parameters=of_parameters)

    tensors, state, own = everywhere(collect)
    tensors |= buffers_to_write(run)
    # Each step passes on what the ranks of the step before have, so after the last one every rank has everything.
    for group in (
        run.grid.get_data_parallel_group(),
        run.grid.get_slice_parallel_group(),
        run.grid.get_pipe_parallel_group(),
    ):
        own = merged(everyone(own, group))
    enter(state, own)
    run.saver.save(directory, tag, tensors, state, publish_latest)


def share_of(run: Run, exclude_frozen: bool = False) -> Share:
    """Returns this rank's share of the description, without the scalars of the optimizer, which change."""
    # The same on all data-parallel ranks, so the first one's suffice.
    parameters = describe_parameters(run, exclude_frozen) if run.grid.data_parallel_id == 0 else {}
    return Share(parameters, {}, set(empty_extra_states(run.placed)))
