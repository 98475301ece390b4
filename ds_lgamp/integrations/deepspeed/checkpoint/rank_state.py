"""What one rank has of its own: random states, extra states of layers, client state and buffers.

A checkpoint has the first three as JSON text in a tensor of bytes, and names buffers as ``ds_lgamp.checkpoint.names``
says."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_lgamp.checkpoint.files import everywhere
from ds_lgamp.checkpoint.names import Copy, first_copies, name_of_first, name_of_own, names_to_write, rank_name
from ds_lgamp.checkpoint.ranges import FlatShard
from ds_lgamp.checkpoint.schema import decode_text
from ds_lgamp.checkpoint.values import encode
from ds_lgamp.integrations.deepspeed.checkpoint.description import Run, encode_named, ranks_of
from ds_lgamp.integrations.deepspeed.model.module import PlacedModule, persistent_buffers, with_extra_state
from ds_lgamp.partition.agreement import everyone
from ds_lgamp.partition.memory import bytes_of, row_of, write
from ds_lgamp.runtime.recompute import RandomSource, read_states


def rank_state(run: Run, client_state: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns ``random``, ``extra_states`` and ``client_state`` of this rank, encoded. Raises CheckpointError if
    ``client_state`` holds what no checkpoint can."""
    sources = run.lgamp.random_sources
    random = {source.name: encode(state) for source, state in zip(sources, read_states(sources))}
    states = {name: part.get_extra_state() for name, part in with_extra_state(run.lgamp.placed)}
    return {
        "random": random,
        "extra_states": {name: encode_named(name, state) for name, state in states.items() if state is not None},
        "client_state": encode_named("client_state", dict(client_state)),
    }


def rank_state_to_read(run: Run, layout: Mapping[str, Any], sizes: Mapping[str, torch.Size]) -> dict[str, FlatShard]:
    """Returns memory for the text of this rank, by its name in the checkpoint, and after it, if layers have extra
    state, for those of all pipeline ranks there.

    Ranks beyond those of the checkpoint's ``layout`` take the text of a rank that had the same numbers modulo the
    numbers of ranks there. So ranks that drew the same numbers go on drawing the same.
    """
    pipeline_rank, data_rank, tensor_rank = ranks_of(run)
    name = rank_name(
        pipeline_rank % layout["pipeline_ranks"],
        data_rank % layout["data_ranks"],
        tensor_rank % layout["tensor_ranks"],
    )
    if name not in sizes:
        # One process wrote the checkpoint for all ranks.
        name = rank_name(0, 0, 0)
    names = [name]
    if any(with_extra_state(run.lgamp.placed)):
        others = (rank_name(rank, 0, 0) for rank in range(layout["pipeline_ranks"]))
        names += (other for other in others if other in sizes)
    return {
        name: FlatShard(sizes[name], 0, torch.empty(sizes[name], dtype=torch.uint8, device="cpu")) for name in names
    }


def decode_rank_state(folder: Path, text: Mapping[str, FlatShard]) -> dict[str, Any]:
    """Returns ``random``, states by generator, and ``client_state`` of this rank, and ``extra_states`` of all layers.
    Raises CheckpointError if a text holds something else."""
    own, *others = (decode_text(folder, name, shard.values) for name, shard in text.items())
    extra_states: dict[str, Any] = {}
    for each in (*others, own):
        extra_states |= each["extra_states"]
    return {**own, "extra_states": extra_states}


def write_extra_states(module: PlacedModule, states: Mapping[str, Any]) -> None:
    """Gives the layers of this rank their extra ``states``. One without a state stays as it is."""
    for name, part in with_extra_state(module):
        if name in states:
            part.set_extra_state(states[name])


def write_random_states(sources: Sequence[RandomSource], states: Mapping[str, Any]) -> None:
    """Sets the generators to ``states``. One without a state, as on another kind of device, stays as it is."""
    for source in sources:
        if source.name in states:
            source.write(states[source.name])


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
        for name, tensor in persistent_buffers(run.lgamp.placed)
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
    for name, tensor in persistent_buffers(run.lgamp.placed):
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
    return {name: Copy(ranks_of(run), _digest(tensor)) for name, tensor in persistent_buffers(run.lgamp.placed)}


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(bytes_of(tensor.detach().cpu()).numpy().tobytes()).hexdigest()
