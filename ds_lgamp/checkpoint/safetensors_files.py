"""Exports weights to safetensors files and imports them."""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ds_lgamp.checkpoint import folder as folders
from ds_lgamp.checkpoint.files import CheckpointError, sync, sync_folder, whole_folder, write_synced
from ds_lgamp.checkpoint.names import BUFFERS, layer_of, parameter_name, parse
from ds_lgamp.checkpoint.storage import VerifyingReader
from ds_lgamp.checkpoint.whole import WholeCheckpoint, weights_only

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_BUFFERS_KEY = "ds_lgamp.buffers"
"""Metadata key of a file; lists which of its tensors are buffers."""
_NAMES_KEY = "ds_lgamp.names"
"""Metadata key of a file; by name in the file, the names in a checkpoint that differ."""


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
