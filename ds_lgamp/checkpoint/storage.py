"""Writes and reads the files of torch.distributed.checkpoint (DCP), with checksums, and loads them as data only.

Any DCP reader can read the folder. DCP's own index, ``.metadata``, is a pickle and could run code. The reader here uses
index.json instead, which lies beside DCP's files.
"""

import dataclasses
import io
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from pydantic import ValidationError
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
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from ds_lgamp.checkpoint.files import (
    PIECE,
    CheckpointError,
    Hasher,
    checksum_of,
    damaged,
    distrusted,
    open_data,
    read_verified,
    reading,
    save_into,
    sync,
    sync_folder,
    write_synced,
)
from ds_lgamp.checkpoint.schema import Index, StoredPart, first_complaint, make_index
from ds_lgamp.partition.memory import row_of

METADATA, INDEX = ".metadata", "index.json"
_STORAGE, _BEFORE_STORAGE = b"archive/data/0", 4096
"""File name of a tensor's storage in torch.save's archive, and a limit in bytes before which the storage begins."""


class _Written(NamedTuple):
    """The place and checksum of an item. The writing rank sends them to the first rank."""

    place: _StorageInfo
    checksum: str


class ChecksummedWriter(FileSystemWriter):
    """Writes and syncs DCP's files, one for every rank that has something to write.

    Args:
        finished: called on the first rank when all files are on the disk. If it fails, the save fails on every rank.
        rest: called after every piece with the seconds it took.
    """

    def __init__(
        self,
        folder: Path,
        finished: Callable[[], None] = lambda: None,
        rest: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__(folder)
        self._finished, self._rest = finished, rest
        self.at_disk: float | None = None
        """Since when the disk has been at work on a piece, by time.monotonic; None while it has nothing to do."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with self._at_disk():
            results = self._written(plan, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    @contextmanager
    def _at_disk(self) -> Iterator[None]:
        self.at_disk = time.monotonic()
        try:
            yield
        finally:
            self.at_disk = None

    def _after_piece(self, seconds: float) -> None:
        self.at_disk = None
        if self._rest is not None:
            self._rest(seconds)
        self.at_disk = time.monotonic()

    def _written(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        results: list[WriteResult] = []
        if plan.items:
            name = f"{plan.storage_data.prefix}0.distcp"
            with open(Path(self.path) / name, "wb") as file:
                for item in plan.items:
                    data = planner.resolve_data(item)
                    assert isinstance(data, torch.Tensor), "the state has tensors only"
                    offset, sink = file.tell(), _ChecksummedFile(file, self._after_piece)
                    with _without_crc32():
                        # torch.save would also write the rest of a larger storage.
                        save_into(cast(IO[bytes], sink), _by_itself(data.detach().cpu()))
                    length = file.tell() - offset
                    place = _StorageInfo(name, offset, length)
                    results.append(WriteResult(item.index, length, _Written(place, sink.hasher.hexdigest())))
                sync(file)
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the indices. Runs on the first rank when all ranks have written."""
        with self._at_disk():
            self._write_indices(metadata, results)

    def _write_indices(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [(result.index, result.storage_data) for rank in results for result in rank]
        places = [
            [dataclasses.replace(result, storage_data=result.storage_data.place) for result in rank] for rank in results
        ]
        super().finish(metadata, places)
        folder = Path(self.path)
        _require_files(folder, [result.place for _, result in written])
        with open(folder / METADATA, "rb") as file:
            index = make_index(metadata, [(where, *each) for where, each in written], checksum_of(file.read()))
            # DCP syncs the file before its last bytes are written.
            os.fsync(file.fileno())
        write_synced(folder / INDEX, index.model_dump_json())
        sync_folder(folder)
        self._finished()

    def storage_meta(self) -> StorageMeta:
        """Omits the path, which changes when somebody moves the folder."""
        return StorageMeta()


def _require_files(folder: Path, places: Sequence[_StorageInfo]) -> None:
    """Raises CheckpointError unless ``folder`` has everything that ranks have written, as this rank sees it."""
    ends: dict[str, int] = {}
    for place in places:
        ends[place.relative_path] = max(place.offset + place.length, ends.get(place.relative_path, 0))
    for name, end in ends.items():
        # Opening a file asks a network file system for its size anew.
        with suppress(FileNotFoundError), open(folder / name, "rb") as file:
            if os.fstat(file.fileno()).st_size >= end:
                continue
        raise CheckpointError(
            f"{folder / name} was written by another rank and is not there for the first rank; save where all ranks "
            "share a disk"
        )


class _ChecksummedFile(io.RawIOBase):
    """The file object that torch.save writes to. It computes the checksum."""

    def __init__(self, file: io.BufferedWriter, after_piece: Callable[[float], None]) -> None:
        super().__init__()
        self._file, self._after_piece = file, after_piece
        self.hasher = Hasher()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        for first in range(0, len(data), PIECE):
            begun, piece = time.perf_counter(), data[first : first + PIECE]
            self.hasher.update(piece)
            self._file.write(piece)
            self._after_piece(time.perf_counter() - begun)
        return len(data)


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Turns off the checksums in torch.save's archives, because torch.load ignores them."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _by_itself(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` with a storage of exactly its size. Copies only if it is not contiguous."""
    flat = row_of(tensor)
    if flat.untyped_storage().nbytes() == flat.nbytes:
        return tensor.contiguous()
    return torch.from_numpy(flat.view(torch.uint8).numpy()).view(tensor.dtype).reshape(tensor.shape)


class VerifyingReader(FileSystemReader):
    """Reads a folder that :class:`ChecksummedWriter` wrote and verifies every item.

    Args:
        folder: folder with DCP's files.
        checksum: checksum of index.json.

    Raises CheckpointError if index.json is missing, damaged, or lists incomplete tensors.
    """

    def __init__(self, folder: Path, checksum: str) -> None:
        super().__init__(folder)
        self.folder = folder
        path = folder / INDEX
        try:
            self.index = Index.model_validate_json(read_verified(path, checksum))
        except ValidationError as error:
            raise distrusted(path, first_complaint(error)) from None
        self._metadata = self.index.in_dcp()
        self.tensors: dict[str, TensorStorageMetadata] = dict(self._metadata.state_dict_metadata)  # type: ignore[arg-type]

    def read_metadata(self) -> Metadata:  # type: ignore[override]
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[StoredPart, ReadItem]]] = {}
        for item in plan.items:
            part = self.storage_data[item.storage_index]
            by_file.setdefault(part.file, []).append((part, item))
        for name, items in by_file.items():
            with open_data(self.folder / name) as file, reading(self.folder / name):
                for part, item in sorted(items, key=lambda pair: pair[0].position):
                    self._read_item(file, part, item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def whole(self, name: str) -> torch.Tensor:
        """Reads the tensor ``name``. Raises CheckpointError if its file is missing or damaged."""
        entry = self.tensors[name]
        whole = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        for part in self.index.tensors[name].parts:
            target = whole[tuple(slice(offset, offset + size) for offset, size in zip(part.offsets, part.sizes))]
            with open_data(self.folder / part.file) as file, reading(self.folder / part.file):
                self._read(file, name, part, target, [slice(None)] * target.dim())
        return whole

    def _read_item(self, file: io.BufferedReader, part: StoredPart, item: ReadItem, planner: LoadPlanner) -> None:
        target = planner.resolve_tensor(item).detach()
        chosen = [slice(start, start + length) for start, length in zip(item.storage_offsets, item.lengths)]
        self._read(file, item.storage_index.fqn, part, target, chosen)
        planner.commit_tensor(item, target)

    def _read(
        self, file: io.BufferedReader, name: str, part: StoredPart, target: torch.Tensor, chosen: Sequence[slice]
    ) -> None:
        """Reads the slices ``chosen`` of ``part`` into ``target``. Needs no copy if ``target`` takes the whole part in
        the same data type, contiguous and on the CPU."""
        dtype = self.tensors[name].properties.dtype
        if target.numel() == prod(part.sizes) and target.dtype == dtype and target.is_contiguous() and target.is_cpu:
            self._fill(file, name, part, target.view(-1))
        else:
            values = torch.empty(part.sizes, dtype=dtype, device="cpu")
            self._fill(file, name, part, values.view(-1))
            target.copy_(values[tuple(chosen)])

    def _fill(self, file: io.BufferedReader, name: str, part: StoredPart, values: torch.Tensor) -> None:
        """Reads the numbers of ``part`` of the tensor ``name`` into ``values`` [numel] directly.

        torch.load would copy them once more, which takes as long as reading them. It would also interpret the pickle
        beside them.
        """
        path = self.folder / part.file
        if os.fstat(file.fileno()).st_size < part.position + part.length:
            raise damaged(path)
        file.seek(part.position)
        head = file.read(min(part.length, _BEFORE_STORAGE))
        hasher = Hasher(head)
        memory = memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]
        start = _storage_in(head)
        fits = 0 < start <= part.length - len(memory)
        if not fits:
            start, memory = 0, memory[:0]
        end = start + len(memory)
        within = head[start:end]
        memory[: len(within)] = within
        for first in range(len(within), len(memory), PIECE):
            piece = memory[first : first + PIECE]
            file.readinto(piece)
            hasher.update(piece)
        rest = file.read(max(part.length - max(len(head), end), 0))
        hasher.update(rest)
        if hasher.hexdigest() != part.checksum:
            raise damaged(path)
        # The numbers must end where the next zip record begins.
        if not fits or (head[end:] + rest)[:2] != b"PK":
            raise CheckpointError(f"{path} holds no tensor for {name}; do not trust this checkpoint")


def _storage_in(head: bytes) -> int:
    """Returns the byte at which a tensor's numbers begin in torch.save's archive; 0 if ``head`` is no such archive."""
    name = head.find(_STORAGE)
    if name < 2:
        return 0
    # A zip entry is its name, an extra field and its content. The two bytes before the name give the length of the
    # field.
    (between,) = struct.unpack_from("<H", head, name - 2)
    return name + len(_STORAGE) + between


class ShardSavePlanner(DefaultSavePlanner):
    """Saves FlatShards."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class ShardLoadPlanner(DefaultLoadPlanner):
    """Loads into FlatShards."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.original_state_dict = state_dict, state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)
