"""The files of torch.distributed.checkpoint (DCP), with checksums, and read as data only.

Any DCP reader can read the folder. Beside DCP's own files it has checksums.json: the CRC-32 of ``.metadata`` and of
every item in the other files.
"""

import dataclasses
import io
import json
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from ds_lgamp.checkpoint.errors import CheckpointError

METADATA, CHECKSUMS = ".metadata", "checksums.json"
_STORAGE, _BEFORE_STORAGE = b"archive/data/0", 4096
"""The file name of a tensor's storage in the archive that torch.save writes, and by which byte it has begun."""


class _Written(NamedTuple):
    """Where an item lies, and its checksum, on the way from the rank that wrote it to the first."""

    place: _StorageInfo
    crc32: int


class ChecksummedWriter(FileSystemWriter):
    """Writes DCP's files, one for every rank that has something to write, each synced.

    Args:
        folder: where they go.
        finished: called on the first rank when all are on the disk; if it fails, so does the save on every rank.
    """

    def __init__(self, folder: Path, finished: Callable[[], None] = lambda: None) -> None:
        super().__init__(folder)
        self._finished = finished

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        if plan.items:
            name = f"{plan.storage_data.prefix}0.distcp"
            with open(Path(self.path) / name, "wb") as file:
                for item in plan.items:
                    data = planner.resolve_data(item)
                    assert isinstance(data, torch.Tensor), "the state has tensors only"
                    offset, sink = file.tell(), _ChecksummedFile(file)
                    _save(data.detach().cpu(), sink)
                    length = file.tell() - offset
                    place = _StorageInfo(name, offset, length)
                    results.append(WriteResult(item.index, length, _Written(place, sink.crc32)))
                sync(file)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, when all have written."""
        checksums: dict[str, Any] = {}
        for result in (result for rank in results for result in rank):
            place, crc32 = result.storage_data
            checksums.setdefault(place.relative_path, []).append([place.offset, place.length, crc32])
        places = [
            [dataclasses.replace(result, storage_data=result.storage_data.place) for result in rank] for rank in results
        ]
        super().finish(metadata, places)
        folder = Path(self.path)
        with open(folder / METADATA, "rb") as file:
            checksums[METADATA] = zlib.crc32(file.read())
            # DCP syncs it before the end of it is written.
            os.fsync(file.fileno())
        write_synced(folder / CHECKSUMS, json.dumps(checksums))
        sync_folder(folder)
        self._finished()

    def storage_meta(self) -> StorageMeta:
        """Without the path, which is another when somebody moves the folder."""
        return StorageMeta()


class _ChecksummedFile(io.RawIOBase):
    """What torch.save writes to."""

    def __init__(self, file: io.BufferedWriter) -> None:
        super().__init__()
        self._file = file
        self.crc32 = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        return self._file.write(data)


def _save(tensor: torch.Tensor, file: _ChecksummedFile) -> None:
    try:
        with _without_crc32():
            # Without the storage around it, which torch.save would write too.
            torch.save(_by_itself(tensor), cast(IO[bytes], file))
    except RuntimeError as error:
        # After a write that fails, torch.save ends its archive and complains of that.
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Without the checksums in torch.save's archives, which torch.load does not look at."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _by_itself(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with a storage that ends where it ends; not copied if it is contiguous."""
    flat = tensor.contiguous().reshape(-1)
    if flat.untyped_storage().nbytes() == flat.nbytes:
        return tensor.contiguous()
    return torch.from_numpy(flat.view(torch.uint8).numpy()).view(tensor.dtype).reshape(tensor.shape)


class VerifyingReader(FileSystemReader):
    """Reads a folder that :class:`ChecksummedWriter` wrote; every item is checked as it is read.

    Args:
        folder: with DCP's files.
        checksums: what the CRC-32 of checksums.json must be.
    """

    def __init__(self, folder: Path, checksums: int) -> None:
        super().__init__(folder)
        self.folder = folder
        self._metadata: Metadata | None = None
        self._buffer = bytearray()
        listed = _verified(folder / CHECKSUMS, checksums)
        self.checksums: dict[str, Any] = json.loads(listed)
        self._crc32 = {
            (name, offset): crc32
            for name, items in self.checksums.items()
            if name != METADATA
            for offset, _, crc32 in items
        }

    def read_metadata(self) -> Metadata:  # type: ignore[override]
        """DCP's index of the folder. Raises CheckpointError if it is damaged or holds anything else."""
        if self._metadata is None:
            data = _verified(self.folder / METADATA, self.checksums[METADATA])
            self._metadata = _unpickle_metadata(self.folder / METADATA, data)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        tensors = tensors_of(self.read_metadata())
        by_file: dict[str, list[tuple[_StorageInfo, ReadItem]]] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            if place.relative_path not in self.checksums:
                raise CheckpointError(f"{self.folder / METADATA} names a file that is none of the checkpoint's")
            by_file.setdefault(place.relative_path, []).append((place, item))
        for name, items in by_file.items():
            with open_data(self.folder / name) as file:
                for place, item in sorted(items, key=lambda pair: pair[0].offset):
                    data = self.item(file, name, place.offset, place.length)
                    _read_item(item, data, tensors[item.storage_index.fqn], planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def item(self, file: io.BufferedReader, name: str, offset: int, length: int) -> memoryview:
        """The bytes of one item, which stay until the next is read. Raises CheckpointError if they are not what was
        written."""
        if len(self._buffer) < length:
            self._buffer = bytearray(length)
        data = memoryview(self._buffer)[:length]
        file.seek(offset)
        if file.readinto(data) < length or zlib.crc32(data) != self._crc32.get((name, offset)):
            raise damaged(self.folder / name)
        return data


def _read_item(item: ReadItem, data: memoryview, entry: TensorStorageMetadata, planner: LoadPlanner) -> None:
    target = planner.resolve_tensor(item).detach()
    (sizes,) = (chunk.sizes for chunk in entry.chunks if chunk.offsets == item.storage_index.offset)
    whole = _numbers(data, sizes.numel(), entry.properties.dtype).view(sizes)
    for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths)):
        whole = whole.narrow(dimension, start, length)
    target.copy_(whole)
    planner.commit_tensor(item, target)


def _numbers(data: memoryview, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The elements of the tensor that torch.save wrote, in place. torch.load would copy them into new memory, which
    takes longer than to read them, and would look at the code beside them.

    Raises CheckpointError if ``data`` is nothing else.
    """
    name = bytes(data[:_BEFORE_STORAGE]).find(_STORAGE)
    if name < 0:
        raise CheckpointError("an item is no tensor; do not trust this checkpoint")
    # An entry of a zip file: its name, as many bytes as those before the name say, then what it holds.
    (between,) = struct.unpack_from("<H", data, name - 2)
    return torch.frombuffer(data, dtype=torch.uint8, offset=name + len(_STORAGE) + between)[
        : numel * dtype.itemsize
    ].view(dtype)


class ShardSavePlanner(DefaultSavePlanner):
    """Saves FlatShards."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class ShardLoadPlanner(DefaultLoadPlanner):
    """Loads into FlatShards; never anything else, which DCP would unpickle."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.original_state_dict = state_dict, state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is no tensor; do not trust this checkpoint")


def tensors_of(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """What DCP's index lists. Raises CheckpointError for anything but tensors."""
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{name} is no tensor; do not trust this checkpoint")
    return dict(metadata.state_dict_metadata)  # type: ignore[arg-type]


_METADATA_CLASSES = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        *(getattr(dcp_metadata, name) for name in dcp_metadata.__all__ if name != "Metadata"),
        Metadata,
        dcp_metadata._MEM_FORMAT_ENCODING,
        _StorageInfo,
        torch.Size,
    )
}
_METADATA_CLASSES["torch.serialization", "_get_layout"] = torch.serialization._get_layout


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of DCP's metadata and torch's dtypes, nothing that does anything."""

    def find_class(self, module: str, name: str) -> Any:
        known = _METADATA_CLASSES.get((module, name))
        if known is not None:
            return known
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def _unpickle_metadata(path: Path, data: bytes) -> Metadata:
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} holds {error}, which is no metadata; do not trust this checkpoint") from None
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} holds no metadata; do not trust this checkpoint")
    return metadata


def _verified(path: Path, crc32: int) -> bytes:
    with open_data(path) as file:
        data = file.read()
    if zlib.crc32(data) != crc32:
        raise damaged(path)
    return data


def open_data(path: Path) -> io.BufferedReader:
    """Raises CheckpointError if the file is missing."""
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; bring it back, or load another checkpoint") from None


def damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: its checksum is another; bring it back, or load another checkpoint")


def sync(file: Any) -> None:
    """Waits until what was written to ``file`` is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        sync(file)


def sync_folder(folder: Path) -> None:
    """Waits until the names in ``folder`` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
