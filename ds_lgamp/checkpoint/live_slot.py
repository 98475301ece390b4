"""The files of one slot of a live state: numbers at fixed places, and a header that makes them a state.

FOLDER/live-RUN/RANK-SLOT.bin     the numbers, in blobs
FOLDER/live-RUN/RANK-SLOT.json    the header: what the blobs hold, their checksums, and everything but tensors

The header is removed before the first blob changes, and renamed into place when all of them are on the disk. So the
slot of a rank that dies while it writes has no header.
"""

import fcntl
import json
import os
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationError, model_validator

from ds_lgamp.checkpoint.files import (
    Checksum,
    Hasher,
    checksum_of,
    damaged,
    distrusted,
    open_data,
    reading,
    sync_folder,
    write_synced,
)
from ds_lgamp.checkpoint.ranges import FlatShard
from ds_lgamp.checkpoint.schema import Count, DataType, Sizes, Strict, first_complaint
from ds_lgamp.checkpoint.values import name_of_dtype

FORMAT: Literal[1] = 1
RUN = "live-"
"""Prefix of the name of a run's folder."""
_ALIGNED = 4096
"""Bytes; every blob begins at a multiple of it."""


class BlobRange(Strict):
    """Consecutive elements of a tensor in a blob; see :class:`FlatShard`."""

    name: str
    first: Count
    """Element of the blob."""
    numel: Count
    start: Count
    shape: Sizes
    whole_shape: Sizes
    slice_offsets: Sizes

    @model_validator(mode="after")
    def _lies_inside(self) -> "BlobRange":
        ranks = {len(self.shape), len(self.whole_shape), len(self.slice_offsets)}
        axes = zip(self.slice_offsets, self.shape, self.whole_shape)
        if len(ranks) > 1 or any(offset + size > whole for offset, size, whole in axes):
            raise ValueError(f"the slice of {self.name} lies outside")
        if not 0 < self.numel <= prod(self.shape) - self.start:
            raise ValueError(f"the range of {self.name} lies outside")
        return self


class Blob(Strict):
    """Numbers of one type that are written together."""

    dtype: DataType
    position: Count
    length: Count
    """Bytes."""
    checksum: Checksum
    held: list[BlobRange]

    @model_validator(mode="after")
    def _holds_all(self) -> "Blob":
        numel, rest = divmod(self.length, getattr(torch, self.dtype).itemsize)
        if rest or any(held.first + held.numel > numel for held in self.held):
            raise ValueError("a range lies outside of its blob")
        return self


class Header(Strict):
    """The content of a header, beside its checksum."""

    format: Literal[1]
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
    """Of all ranks of a run."""
    written: float
    """Seconds since 1970."""
    step: Count
    rank: Count
    ranks: Count
    places: Annotated[list[Count], Field(min_length=3, max_length=3)]
    """Pipeline, data-parallel and tensor-parallel rank."""
    directory: str | None
    """Where the run saves and loads checkpoints; None if it has not yet."""
    blobs: list[Blob]
    state: dict[str, Any]
    """What state.json says of the run, as this rank knows it."""
    parameters: dict[str, Any]
    scalars: dict[str, dict[str, Any]]
    of_parameters: dict[str, dict[str, Any]] = {}
    extra_states: list[str]
    rank_state: dict[str, Any]
    """Random states and client state."""


class LiveSlot:
    """Writes one slot of this rank, whose files have this ``path`` with a suffix each. Used by one thread."""

    def __init__(self, path: Path) -> None:
        self._data, self._header = path.with_suffix(".bin"), path.with_suffix(".json")
        self._fresh = path.with_suffix(".partial")
        """The next header."""
        self._file: int | None = None
        self._close: Callable[[], object] | None = None
        self._end = 0
        self._places: dict[Any, tuple[int, int]] = {}
        """Position and length of every blob."""

    def open(self) -> None:
        """Begins another state in the place of the last one. The process locks the file, also against other nodes where
        their disk can."""
        self.drop()
        if self.is_gone:
            self.close()
            self._places, self._end = {}, 0
        if self._file is None:
            self._data.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._data, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            self._close = weakref.finalize(self, os.close, self._file)
        with suppress(OSError):
            # Unlike a lock of flock, it ends with this process: the processes of a data loader do not inherit it.
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @property
    def is_gone(self) -> bool:
        """Whether the file has none of the blobs that were written: it is closed, or somebody has removed it."""
        with suppress(OSError):
            return self._file is None or os.fstat(self._file).st_nlink == 0
        # A network file system has forgotten it.
        return True

    def drop(self) -> None:
        """Drops the state in the slot."""
        self._header.unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes the files."""
        self.drop()
        # A full disk may have left it.
        self._fresh.unlink(missing_ok=True)
        if self._file is not None:
            # Memory stays in use as long as a file is open.
            self.close()
            self._data.unlink(missing_ok=True)

    def close(self) -> None:
        """Lets other processes take what the files hold."""
        if self._close is not None:
            self._close()
            self._file = self._close = None

    def write(self, key: Any, dtype: torch.dtype, length: int, pieces: Iterable[memoryview], held: list[Any]) -> Any:
        """Writes a blob, where the one with the same ``key`` was if it has the same ``length``. Returns its entry in
        the header."""
        if self._places.get(key, (0, -1))[1] != length:
            self._places[key] = self._end, length
            self._end += -(-length // _ALIGNED) * _ALIGNED
        start = position = self._places[key][0]
        hasher = Hasher()
        for piece in pieces:
            hasher.update(piece)
            position += self._write(piece, position)
        return {
            "dtype": name_of_dtype(dtype),
            "position": start,
            "length": length,
            "checksum": hasher.hexdigest(),
            "held": held,
        }

    def _write(self, piece: memoryview, position: int) -> int:
        assert self._file is not None, "the slot is open"
        written = 0
        while written < len(piece):
            written += os.pwrite(self._file, piece[written:], position + written)
        return written

    def seal(self, header: dict[str, Any]) -> None:
        """Makes the blobs the state that ``header`` describes."""
        assert self._file is not None, "the slot is open"
        os.fdatasync(self._file)
        whole = {"format": FORMAT, "written": time.time(), **header}
        text = json.dumps(whole)
        write_synced(self._fresh, f"{checksum_of(text.encode())}\n{text}")
        os.replace(self._fresh, self._header)
        sync_folder(self._header.parent)


def is_written(folder: Path) -> bool:
    """Whether another process has a slot in the ``folder`` of a run open. A process that asks this of its own run loses
    its locks."""
    return any(map(_is_locked, folder.glob("*.bin")))


def _is_locked(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        # Also if it is a file of somebody else.
        return True
    except OSError:
        # It is gone, or the disk has no locks.
        pass
    return False


def read_header(path: Path) -> Header:
    """Reads a header. Raises DamageError if it is damaged, CheckpointError if it is not what a slot writes."""
    with open_data(path) as file, reading(path):
        checksum, _, text = file.read().partition(b"\n")
    if checksum_of(text) != checksum.decode(errors="replace"):
        raise damaged(path)
    try:
        return Header.model_validate_json(text)
    except ValidationError as error:
        raise distrusted(path, first_complaint(error), "live state") from None


def read_blobs(path: Path, header: Header) -> dict[str, list[FlatShard]]:
    """Returns the ranges of every tensor in the slot whose header is ``path``, by name. They are views of the file.

    Raises DamageError if the file is missing or damaged.
    """
    data = path.with_suffix(".bin")
    with open_data(data) as file:
        size = os.fstat(file.fileno()).st_size
    memory = (
        torch.from_file(str(data), shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0, device="cpu")
    )
    found: dict[str, list[FlatShard]] = {}
    for blob in header.blobs:
        own = memory[blob.position : blob.position + blob.length]
        if own.numel() != blob.length or checksum_of(memoryview(own.numpy())) != blob.checksum:  # type: ignore[arg-type]
            raise damaged(data)
        values = own.view(getattr(torch, blob.dtype))
        for held in blob.held:
            part = values[held.first : held.first + held.numel]
            shard = FlatShard(held.shape, held.start, part, held.whole_shape, held.slice_offsets)
            found.setdefault(held.name, []).append(shard)
    return found
