"""Reads, writes and verifies a whole checkpoint in one process, also for conversion to and from other formats. Exports
weights to safetensors files and imports them."""

import json
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ds_lgamp.checkpoint import folder as folders
from ds_lgamp.checkpoint.files import (
    CheckpointError,
    read_verified,
    sentence_of,
    sync,
    sync_folder,
    whole_folder,
    write_synced,
)
from ds_lgamp.checkpoint.names import (
    BUFFERS,
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
from ds_lgamp.version import __version__

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_BUFFERS_KEY = "ds_lgamp.buffers"
"""Metadata key of a file; lists which of its tensors are buffers."""
_NAMES_KEY = "ds_lgamp.names"
"""Metadata key of a file; by name in the file, the names in a checkpoint that differ."""


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


class Planned(NamedTuple):
    """A tensor to write."""

    name: str
    """Name in the file."""
    own_name: str
    """Name in a run, with the name of the layer."""
    key: str | None
    """Name in the checkpoint; None for a tensor without elements, which the checkpoint does not store."""
    shape: list[int]
    dtype: torch.dtype
    packed: bool = False
    """Whether it holds packed bytes, which no cast may change."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_safetensors(source: Path, target: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    """Writes weights and buffers of the checkpoint ``source`` to the folder ``target``.

    Writes one file, model.safetensors, if it fits in ``shard_bytes``. Otherwise writes several files and
    model.safetensors.index.json. Needs host memory for one file at a time.

    Args:
        target: folder to make; it must not exist.
        dtype: data type of the written parameters; buffers keep theirs.
        shard_bytes: maximum size of a file in bytes; only a single larger tensor exceeds it.

    Raises CheckpointError if the checkpoint cannot be read, ``target`` exists, or safetensors is not installed.
    ``target`` is then unchanged.
    """
    _library()
    state, reader = folders.open_checkpoint(source)
    shards = _shards(planned_of(state, reader, dtype), shard_bytes)
    if target.exists():
        raise CheckpointError(f"{target} exists; remove it or name another folder")
    with whole_folder(target) as partial:
        _write(shards, reader, partial)


def read_safetensors(source: Path) -> WholeCheckpoint:
    """Reads a safetensors file, or a folder with model.safetensors or an index, as a checkpoint without optimizer
    state.

    Tensors must have the names of the model's layers, or the names that :func:`write_safetensors` gave them.
    Tensors become buffers if it marked them or if they are not floating-point.

    Raises CheckpointError if a file is missing, is no safetensors file, or has no weights.
    """
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    of_model = False
    for path, listed in _files(source).items():
        tensors, marked, own_names = _read(path)
        of_model |= bool(own_names)
        if listed is not None and listed != tensors.keys():
            name = min(listed ^ tensors.keys())
            raise CheckpointError(f"{source / INDEX} and {path.name} disagree about {name}; restore both")
        for name, tensor in tensors.items():
            kind = buffers if name in marked or not tensor.is_floating_point() else parameters
            kind[own_names.get(name, name)] = tensor
    if not parameters:
        raise CheckpointError(f"{source} has no weights; name a file or folder with weights")
    in_order = {name: parameters[name] for name in sorted(parameters, key=lambda name: (layer_of(name), name))}
    return weights_only(in_order, buffers, of_model)


def _library() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        raise CheckpointError("safetensors is not installed; pip install safetensors") from None
    return safetensors


def planned_of(state: dict[str, Any], reader: VerifyingReader, dtype: torch.dtype) -> Iterator[Planned]:
    """Yields the parameters, in ``dtype``, and the buffers of the checkpoint with this ``state``. Packed bytes of
    quantised weights stay as they are."""
    of_model = state["layers"].get("names_of_model", False)
    beside = {parse(key).name for key in reader.tensors}
    for name, described in state["parameters"].items():
        key = parameter_name(name)
        shown = without_layer(name) if of_model else name
        own = reader.tensors[key].properties.dtype if key in reader.tensors else dtype
        packed = not own.is_floating_point or f"{name}.absmax" in beside
        present = key if key in reader.tensors else None
        yield Planned(shown, name, present, described["shape"], own if packed else dtype, packed)
    for key, entry in reader.tensors.items():
        parts = parse(key)
        if parts.is_first_copy:
            name = parts.name
            shown = without_layer(name) if of_model else name
            yield Planned(shown, name, key, list(entry.size), entry.properties.dtype)


def without_layer(name: str) -> str:
    """Returns the name inside the layer or tied module."""
    return name.split(".", 2 if name.startswith("tied_modules.") else 1)[-1]


def _shards(planned: Iterator[Planned], shard_bytes: int) -> list[list[Planned]]:
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in planned:
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _write(shards: list[list[Planned]], reader: VerifyingReader, folder: Path) -> None:
    several = len(shards) > 1
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if several else SINGLE
        _write_file(folder / file, shard, reader)
        files |= {tensor.name: file for tensor in shard}
    if several:
        total = sum(tensor.nbytes for shard in shards for tensor in shard)
        index = {"metadata": {"total_size": total}, "weight_map": files}
        write_synced(folder / INDEX, json.dumps(index, indent=1) + "\n")
    sync_folder(folder)


def _write_file(path: Path, shard: list[Planned], reader: VerifyingReader) -> None:
    tensors = {
        tensor.name: torch.empty(tensor.shape, dtype=tensor.dtype)
        if tensor.key is None
        else reader.whole(tensor.key).to(tensor.dtype)
        for tensor in shard
    }
    marked = [tensor.name for tensor in shard if tensor.key is not None and parse(tensor.key).kind == BUFFERS]
    # Some readers require the format key, which names the framework.
    metadata = {"format": "pt", _BUFFERS_KEY: json.dumps(marked)}
    names = {tensor.name: tensor.own_name for tensor in shard if tensor.name != tensor.own_name}
    if names:
        metadata[_NAMES_KEY] = json.dumps(names)
    _library().torch.save_file(tensors, path, metadata=metadata)
    with open(path, "rb") as file:
        sync(file)


def _files(source: Path) -> dict[Path, set[str] | None]:
    """Returns the files to read, each with the tensor names that the index lists; None without an index."""
    if not source.is_dir():
        return {source: None}
    index = source / INDEX
    if not index.is_file():
        return {source / SINGLE: None}
    files: dict[Path, set[str] | None] = {}
    try:
        for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise ValueError(f"'{file}' is not the name of a .safetensors file in the folder")
            files.setdefault(source / file, set()).add(name)  # type: ignore[union-attr]
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files ({error}); restore it") from None
    return files


def _read(path: Path) -> tuple[dict[str, torch.Tensor], set[str], dict[str, str]]:
    """Returns the tensors of a file, the names of the marked buffers, and the names in a run that differ."""
    library = _library()
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; name a .safetensors file or a folder with {SINGLE} or {INDEX}")
    try:
        with library.safe_open(path, framework="pt", device="cpu") as content:
            tensors = {name: content.get_tensor(name) for name in content.keys()}
            metadata = content.metadata() or {}
        marked = json.loads(metadata.get(_BUFFERS_KEY, "[]"))
        own_names = json.loads(metadata.get(_NAMES_KEY, "{}"))
        if not isinstance(marked, list) or not all(isinstance(name, str) for name in marked):
            raise ValueError(f"{_BUFFERS_KEY} is not a list of names")
        if not isinstance(own_names, dict) or not all(isinstance(name, str) for name in own_names.values()):
            raise ValueError(f"{_NAMES_KEY} does not map names to names")
    # The library raises various types for a file of another format.
    except Exception as error:
        first = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path} cannot be read as a safetensors file ({first}); restore it") from None
    return tensors, set(marked), own_names
