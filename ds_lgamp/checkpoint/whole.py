"""Reads and writes a whole checkpoint in the memory of one process, for conversion to and from other formats."""

import json
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ds_lgamp.checkpoint import folder as folders
from ds_lgamp.checkpoint.errors import CheckpointError, sentence_of
from ds_lgamp.checkpoint.shard import FlatShard, Ranges
from ds_lgamp.checkpoint.state import decode_text
from ds_lgamp.checkpoint.storage import ChecksummedWriter, ShardSavePlanner
from ds_lgamp.checkpoint.units import BUFFERS, OPTIMIZER, PARAMETERS, RANKS
from ds_lgamp.checkpoint.values import decode, encode


class WholeCheckpoint(NamedTuple):
    """The checkpoint that a run on one rank without parallelism would save."""

    parameters: dict[str, torch.Tensor]
    """Parameters by global name, in layer order; master weights where they exist."""
    buffers: dict[str, torch.Tensor]
    """Buffers of the first data-parallel rank, by global name."""
    moments: dict[str, dict[str, torch.Tensor]]
    """Optimizer state with one value per element, by key and then by global name."""
    state: dict[str, Any]
    """The decoded content of state.json."""
    client_state: dict[str, Any]
    """Client state of the first rank."""


def read_whole(folder: Path) -> WholeCheckpoint:
    """Reads the checkpoint ``folder``. Raises CheckpointError if it is no checkpoint or is damaged."""
    state = folders.read_state(folder)
    reader = folders.reader(folder, state)
    wanted = (name for name in reader.tensors if name.split("/")[0] != RANKS or name == f"{RANKS}/0-0")
    tensors = {name: reader.whole(name) for name in wanted}
    whole = WholeCheckpoint({}, {}, {}, decode(state), {})
    for name, described in state["parameters"].items():
        stored = tensors.get(f"{PARAMETERS}/{name}")
        # A checkpoint does not store tensors without elements.
        whole.parameters[name] = torch.empty(described["shape"]) if stored is None else stored
    for key, tensor in tensors.items():
        kind, rest = key.split("/", 1)
        if kind == OPTIMIZER:
            moment, name = rest.split("/", 1)
            whole.moments.setdefault(moment, {})[name] = tensor
        elif kind == BUFFERS and rest.startswith("0/"):
            whole.buffers[rest.removeprefix("0/")] = tensor
        elif kind == RANKS:
            whole.client_state.update(decode_text(folder, key, tensor)["client_state"])
    return whole


def write_whole(folder: Path, whole: WholeCheckpoint) -> None:
    """Writes ``whole`` as the checkpoint ``folder``, which runs at any layout can load.

    It has no random states: a run that loads it keeps its own.
    """
    tensors = {f"{PARAMETERS}/{name}": tensor for name, tensor in whole.parameters.items()}
    tensors |= {f"{BUFFERS}/0/{name}": tensor for name, tensor in whole.buffers.items()}
    for key, moments in whole.moments.items():
        tensors |= {f"{OPTIMIZER}/{key}/{name}": tensor for name, tensor in moments.items()}
    text = json.dumps({"random": {}, "client_state": encode(whole.client_state)}).encode()
    tensors[f"{RANKS}/0-0"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    write_alone(folder, _shards(tensors), encode(whole.state))


def write_alone(folder: Path, tensors: Mapping[str, Ranges], state: dict[str, Any]) -> None:
    """Writes the checkpoint ``folder`` in this process.

    Args:
        tensors: ranges that hold every element exactly once, by the name of the tensor.
        state: everything else, encoded.
    """
    destination = folders.new_tensors(folder)
    writer = ChecksummedWriter(destination)
    try:
        _alone(partial(dcp.save, dict(tensors), storage_writer=writer, planner=ShardSavePlanner(), no_dist=True))
        folders.publish(folder, destination, state)
    except BaseException:
        folders.discard(destination)
        raise


def _shards(tensors: Mapping[str, torch.Tensor]) -> dict[str, FlatShard]:
    return {name: FlatShard(tensor.shape, 0, tensor.reshape(-1)) for name, tensor in tensors.items() if tensor.numel()}


def _alone(action: Any) -> None:
    """Runs DCP in this process only. Raises CheckpointError if it fails."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            action()
    except (OSError, CheckpointException) as error:
        raise CheckpointError(sentence_of(error, 0)) from None
