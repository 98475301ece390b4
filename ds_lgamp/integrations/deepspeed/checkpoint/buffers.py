"""The buffers of a run, which a checkpoint names as ``ds_lgamp.checkpoint.buffers`` says."""

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ds_lgamp.checkpoint.buffers import Copy, first_copies, name_of_first, name_of_own, names_to_write
from ds_lgamp.checkpoint.errors import everywhere
from ds_lgamp.checkpoint.shard import FlatShard
from ds_lgamp.integrations.deepspeed.checkpoint.run import Run, ranks_of
from ds_lgamp.integrations.deepspeed.model.module import PlacedModule, persistent_buffers
from ds_lgamp.partition.agreement import everyone
from ds_lgamp.partition.memory import bytes_of, row_of, write

_KINDS_OF_RANKS = ("pipeline_ranks", "data_ranks", "tensor_ranks")


def buffers_to_write(run: Run) -> dict[str, FlatShard]:
    """Returns the buffers that this rank writes, by name in the checkpoint. Collective over all ranks, but digests
    travel only between ranks that may have the same buffer."""
    own = everywhere(partial(_copies, run))
    of_data_rank = first_copies(everyone(own, run.grid.get_model_parallel_group()))
    first = everyone({name: of_data_rank[name] for name in own}, run.grid.get_data_parallel_group())[0]
    names = names_to_write(own, first)
    return {
        names[name]: FlatShard(tensor.shape, 0, row_of(tensor.detach()))
        for name, tensor in persistent_buffers(run.placed)
        if name in names
    }


def buffers_to_read(
    run: Run, here: Mapping[str, Any], there: Mapping[str, Any], sizes: Mapping[str, torch.Size]
) -> dict[str, FlatShard]:
    """Returns memory for the buffers of this rank, by name in the checkpoint: its own copy if the run has as many ranks
    of every kind as the checkpoint, else the first rank's.

    Args:
        here, there: the layouts of the run and of the checkpoint.
        sizes: the tensors in the checkpoint.
    """
    has_own = all(here[kind] == there[kind] for kind in _KINDS_OF_RANKS)
    buffers = {}
    for name, tensor in persistent_buffers(run.placed):
        own = name_of_own(name, ranks_of(run))
        written = own if has_own and own in sizes else name_of_first(name)
        if written in sizes:
            values = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
            buffers[written] = FlatShard(tensor.shape, 0, values)
    return buffers


def commit_buffers(module: PlacedModule, read: Mapping[str, FlatShard]) -> None:
    """Copies what was ``read`` into the buffers of ``module``."""
    values = {key.split("/", 2)[2]: shard.values for key, shard in read.items()}
    for name, tensor in persistent_buffers(module):
        if name in values:
            write(tensor, values[name].view(tensor.shape))


def _copies(run: Run) -> dict[str, Copy]:
    return {name: Copy(ranks_of(run), _digest(tensor)) for name, tensor in persistent_buffers(run.placed)}


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(bytes_of(tensor.detach().cpu()).numpy().tobytes()).hexdigest()
