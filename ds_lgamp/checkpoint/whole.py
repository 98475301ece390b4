"""Reads, writes and verifies a whole checkpoint in one process, also for conversion to and from other formats."""

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ds_lgamp import __version__
from ds_lgamp.checkpoint import folder as folders
from ds_lgamp.checkpoint.files import CheckpointError, read_verified, sentence_of
from ds_lgamp.checkpoint.names import (
    OPTIMIZER,
    RANKS,
    layer_of,
    name_of_first,
    parameter_name,
    parse,
    rank_name,
    state_name,
)
from ds_lgamp.checkpoint.ranges import FlatShard, Ranges
from ds_lgamp.checkpoint.schema import COUNTERS, PULLED, decode_text, text_of
from ds_lgamp.checkpoint.storage import METADATA, ChecksummedWriter, ShardSavePlanner, VerifyingReader
from ds_lgamp.checkpoint.values import decode, encode, name_of_dtype


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


def state_of(
    versions: dict[str, str], layout: dict[str, Any], layers: dict[str, Any], parameters: dict[str, Any], **others: Any
) -> dict[str, Any]:
    """Returns the content of state.json for a checkpoint that no run has saved, from what other formats say of it. What
    they leave out begins anew."""
    return {
        "versions": versions,
        "layout": {"tensor_ranks": 1, **layout},
        "layers": {"types": None, "partition_method": None, **layers},
        "parameters": parameters,
        "optimizer": None,
        "lr_scheduler": None,
        "loss_scaler": None,
        "counters": dict.fromkeys((*COUNTERS, PULLED), 0),
        "micro_offset": 0,
        "data": None,
        **others,
    }


def weights_only(
    parameters: Mapping[str, torch.Tensor], buffers: dict[str, torch.Tensor], of_model: bool
) -> WholeCheckpoint:
    """Returns a checkpoint of weights that no run has trained, for ``load_module_only=True``.

    Args:
        of_model: whether the names are a model's, and not those of a PipelineModule.
    """
    layers = max(map(layer_of, parameters)) + 1
    state = state_of(
        {"ds_lgamp": __version__, "torch": str(torch.__version__)},
        {
            "pipeline_ranks": 1,
            "data_ranks": 1,
            "zero_stage": 0,
            "schedule": "layered",
            "chunk_bounds": [0, max(layers, 1)],
            "placement": [0],
            "data_type": name_of_dtype(next(iter(parameters.values())).dtype),
        },
        {"tied": {}, "extra_states": [], "names_of_model": of_model},
        {name: {"shape": list(tensor.shape), "group": None} for name, tensor in parameters.items()},
    )
    return WholeCheckpoint(dict(parameters), buffers, {}, state, {})


def read_whole(folder: Path) -> WholeCheckpoint:
    """Reads the checkpoint ``folder``. Raises CheckpointError if it is no checkpoint or is damaged."""
    state, reader = folders.open_checkpoint(folder)
    wanted = (name for name in reader.tensors if parse(name).kind != RANKS or name == rank_name(0, 0, 0))
    tensors = {name: reader.whole(name) for name in wanted}
    whole = WholeCheckpoint({}, {}, {}, decode(state), {})
    for name, described in state["parameters"].items():
        stored = tensors.get(parameter_name(name))
        # A checkpoint does not store tensors without elements.
        whole.parameters[name] = torch.empty(described["shape"]) if stored is None else stored
    for key, tensor in tensors.items():
        parts = parse(key)
        if parts.kind == OPTIMIZER:
            whole.moments.setdefault(parts.of, {})[parts.name] = tensor
        elif parts.is_first_copy:
            whole.buffers[parts.name] = tensor
        elif parts.kind == RANKS:
            whole.client_state.update(decode_text(folder, key, tensor)["client_state"])
    return whole


def write_whole(folder: Path, whole: WholeCheckpoint) -> None:
    """Writes ``whole`` as the checkpoint ``folder``, which runs at any layout can load.

    It has no random states: a run that loads it goes on with its own.
    """
    tensors = {parameter_name(name): tensor for name, tensor in whole.parameters.items()}
    tensors |= {name_of_first(name): tensor for name, tensor in whole.buffers.items()}
    for key, moments in whole.moments.items():
        tensors |= {state_name(key, name): tensor for name, tensor in moments.items()}
    text = text_of({"random": {}, "client_state": encode(whole.client_state)})
    shards = {name: FlatShard(each.shape, 0, each.reshape(-1)) for name, each in tensors.items() if each.numel()}
    write_alone(folder, {**shards, rank_name(0, 0, 0): text}, encode(whole.state))


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


def _alone(action: Any) -> None:
    """Runs DCP in this process only. Raises CheckpointError if it fails."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            action()
    except (OSError, CheckpointException) as error:
        raise CheckpointError(sentence_of(error, 0)) from None


def verify(folder: Path) -> None:
    """Reads and verifies the whole checkpoint ``folder``, one tensor at a time.

    Raises CheckpointError, which names the file, if a byte differs from what was written, or if an element or a tensor
    that state.json lists is missing.
    """
    state, reader = folders.open_checkpoint(folder)
    read_verified(reader.folder / METADATA, reader.index.metadata_checksum)
    _check_lengths(reader)
    for name in reader.tensors:
        values = reader.whole(name)
        if parse(name).kind == RANKS:
            decode_text(folder, name, values)


def _check_lengths(reader: VerifyingReader) -> None:
    """Raises CheckpointError if a file has bytes that belong to no part."""
    parts = sorted(
        (part.file, part.position, part.length) for tensor in reader.index.tensors.values() for part in tensor.parts
    )
    ends: dict[str, int] = {}
    for file, position, length in parts:
        if position != ends.get(file, 0):
            raise _other_length(reader.folder / file)
        ends[file] = position + length
    for file, end in ends.items():
        path = reader.folder / file
        # A missing or short file raises an error when it is read.
        if path.is_file() and path.stat().st_size > end:
            raise _other_length(path)


def _other_length(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} has bytes that belong to no tensor; restore the original file, or load another checkpoint"
    )
