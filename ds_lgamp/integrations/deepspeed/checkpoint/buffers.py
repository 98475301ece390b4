"""The buffers of the model: one copy of those that are alike on all ranks, and every other copy beside it."""

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ds_lgamp.checkpoint.errors import everywhere
from ds_lgamp.checkpoint.shard import FlatShard
from ds_lgamp.checkpoint.units import BUFFERS
from ds_lgamp.integrations.deepspeed.checkpoint.run import Run, ranks_of
from ds_lgamp.integrations.deepspeed.model.module import PlacedModule, persistent_buffers
from ds_lgamp.partition.agreement import everyone

_KINDS_OF_RANKS = ("pipeline_ranks", "data_ranks", "tensor_ranks")


def first_copy(name: str) -> str:
    """Returns the name in a checkpoint of the buffer ``name`` as the first rank has it."""
    return f"{BUFFERS}/0/{name}"


def buffers_to_write(run: Run) -> dict[str, FlatShard]:
    """Returns the buffers that this rank writes, by name in the checkpoint. Collective over all ranks, but digests
    travel only between ranks that may have the same buffer.

    The first rank that has a buffer writes it. Others write theirs if it differs from that, as running means do: under
    the number of the data-parallel rank, or under all three where pipeline or tensor-parallel ranks have a copy each.
    """
    pipeline_rank, data_rank, tensor_rank = ranks_of(run)
    own = everywhere(partial(_digests, run.placed))
    model_group = run.grid.get_model_parallel_group()
    first_of_data_rank: dict[str, tuple[int, str]] = {}
    for rank, digests in zip(dist.get_process_group_ranks(model_group), everyone(own, model_group), strict=True):
        for name, digest in digests.items():
            first_of_data_rank.setdefault(name, (rank, digest))
    mine = {name: first_of_data_rank[name][1] for name in own}
    first = everyone(mine, run.grid.get_data_parallel_group())[0]
    buffers = {}
    for name, tensor in persistent_buffers(run.placed):
        writer, digest = first_of_data_rank[name]
        if writer == dist.get_rank():
            key, is_known = f"{data_rank}", data_rank > 0 and own[name] == first[name]
        else:
            key, is_known = f"{data_rank}-{pipeline_rank}-{tensor_rank}", own[name] == digest
        if not is_known:
            buffers[f"{BUFFERS}/{key}/{name}"] = FlatShard(tensor.shape, 0, tensor.detach().reshape(-1))
    return buffers


def buffers_to_read(
    run: Run, here: Mapping[str, Any], there: Mapping[str, Any], sizes: Mapping[str, torch.Size]
) -> dict[str, FlatShard]:
    """Returns memory for the buffers of this rank, by name in the checkpoint: its own copy if the run has as many ranks
    of every kind as the checkpoint, else the first rank's.

    Args:
        here, there: the layouts of the run and of the checkpoint.
        sizes: the tensors in the checkpoint.
    """
    pipeline_rank, data_rank, tensor_rank = ranks_of(run)
    keys = ["0"]
    if all(here[kind] == there[kind] for kind in _KINDS_OF_RANKS):
        keys = [f"{data_rank}-{pipeline_rank}-{tensor_rank}", f"{data_rank}", "0"]
    buffers = {}
    for name, tensor in persistent_buffers(run.placed):
        written = next((key for key in keys if f"{BUFFERS}/{key}/{name}" in sizes), None)
        if written is not None:
            values = torch.empty(tensor.numel(), dtype=tensor.dtype)
            buffers[f"{BUFFERS}/{written}/{name}"] = FlatShard(tensor.shape, 0, values)
    return buffers


def commit_buffers(module: PlacedModule, read: Mapping[str, FlatShard]) -> None:
    """Copies what was ``read`` into the buffers of ``module``."""
    values = {key.split("/", 2)[2]: shard.values for key, shard in read.items()}
    for name, tensor in persistent_buffers(module):
        if name in values:
            tensor.copy_(values[name].view(tensor.shape))


def _digests(module: PlacedModule) -> dict[str, str]:
    return {name: _digest(tensor) for name, tensor in persistent_buffers(module)}


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.detach().reshape(-1).cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
