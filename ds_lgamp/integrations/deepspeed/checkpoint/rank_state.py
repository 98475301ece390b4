"""The random states, extra states and client state of one rank, which a checkpoint keeps as JSON text in a tensor of
bytes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_lgamp.checkpoint.shard import FlatShard
from ds_lgamp.checkpoint.state import decode_text
from ds_lgamp.checkpoint.units import rank_name
from ds_lgamp.checkpoint.values import encode
from ds_lgamp.integrations.deepspeed.checkpoint.description import encoded
from ds_lgamp.integrations.deepspeed.checkpoint.run import Run, ranks_of
from ds_lgamp.integrations.deepspeed.model.module import PlacedModule, with_extra_state
from ds_lgamp.runtime.recompute import RandomSource, read_states


def rank_state_to_write(run: Run, client_state: Mapping[Any, Any]) -> dict[str, FlatShard]:
    """Returns the text of this rank, by its name in the checkpoint. Raises CheckpointError if ``client_state`` holds
    what no checkpoint can."""
    text = torch.frombuffer(bytearray(json.dumps(rank_state(run, client_state)).encode()), dtype=torch.uint8)
    return {rank_name(*ranks_of(run)): FlatShard(text.shape, 0, text)}


def rank_state(run: Run, client_state: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns ``random``, ``extra_states`` and ``client_state`` of this rank, encoded. Raises CheckpointError as
    :func:`rank_state_to_write` does."""
    sources = run.random_sources
    random = {source.name: encode(state) for source, state in zip(sources, read_states(sources))}
    states = {name: part.get_extra_state() for name, part in with_extra_state(run.placed)}
    return {
        "random": random,
        "extra_states": {name: encoded(name, state) for name, state in states.items() if state is not None},
        "client_state": encoded("client_state", dict(client_state)),
    }


def rank_state_to_read(run: Run, layout: Mapping[str, Any], sizes: Mapping[str, torch.Size]) -> dict[str, FlatShard]:
    """Returns memory for the text of this rank, by its name in the checkpoint, and behind it, if layers have extra
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
    if any(with_extra_state(run.placed)):
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
