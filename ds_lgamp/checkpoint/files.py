"""Files of checkpoints on the disk: written so that they survive a loss of power, with checksums that detect damage,
and read with an error that says what to do. All ranks raise errors of saving and loading together."""

import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any

import torch
import torch.distributed as dist
import xxhash
from pydantic import Field
from torch.distributed.checkpoint.api import CheckpointException

from ds_lgamp.partition.agreement import everyone


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or loaded. The message names the cause and the fix."""


class DamageError(CheckpointError):
    """A file of a checkpoint is missing or damaged."""


def distrusted(path: Path, complaint: Any, what: str = "checkpoint") -> CheckpointError:
    """Returns the error for a file of a form that no release writes, whatever its checksum says."""
    return CheckpointError(f"{path} is not what ds_lgamp writes ({complaint}); do not trust this {what}")


def everywhere(action: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Returns the result of ``action`` if it succeeds on all ranks. Raises CheckpointError on all ranks otherwise, as
    a DamageError if the first rank that fails met one. Collective."""
    result, complaint = None, None
    try:
        result = action()
    # CheckpointException is no subclass of Exception in torch.
    except (Exception, CheckpointException) as error:
        cause, rank = _cause(error, dist.get_rank())
        complaint = isinstance(cause, DamageError), sentence_of(cause, rank)
    first = next(filter(None, everyone(complaint, group)), None)
    if first is not None:
        is_damage, sentence = first
        raise (DamageError if is_damage else CheckpointError)(sentence)
    return result


def on_first_rank(action: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Returns on all ranks the result of ``action``, which the first rank calls. Raises as :func:`everywhere` does.
    Collective."""
    return everyone(everywhere(action if dist.get_rank(group) == 0 else lambda: None, group), group)[0]


def _cause(error: BaseException, rank: int) -> tuple[BaseException, int]:
    """Returns the error on ``rank``, or that on the first rank that torch.distributed.checkpoint names, with its
    rank."""
    if isinstance(error, CheckpointException) and error.failures:
        first = min(error.failures)
        return _cause(error.failures[first][0], first)
    return error, rank


def sentence_of(error: BaseException, rank: int) -> str:
    """Describes the error on ``rank``, or on the first rank that torch.distributed.checkpoint names."""
    error, rank = _cause(error, rank)
    if isinstance(error, CheckpointError):
        return str(error)
    lines = str(error).splitlines()
    return f"rank {rank}: {type(error).__name__}: {lines[0] if lines else ''}"


PIECE = 1 << 20
"""Bytes to read or write at a time. The checksum is computed while the piece is still in the cache."""
_LOST = (errno.EIO, errno.EUCLEAN, errno.EISDIR, errno.ENOTDIR)
"""Errors of a disk that has lost data, or another kind of file where it was."""
_NOT_FOR_FOLDERS = (errno.EBADF, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
"""Errors of file systems, such as mounted buckets, that sync files and no folders."""


def save_into(file: IO[bytes], content: Any) -> None:
    """Writes as torch.save does. Raises OSError if a write fails."""
    try:
        torch.save(content, file)
    except RuntimeError as error:
        # If a write fails, torch.save still closes its archive and raises a misleading error. The original error is its
        # context.
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def read_verified(path: Path, checksum: str) -> bytes:
    """Reads ``path``. Raises DamageError if it is missing or damaged."""
    with open_data(path) as file, reading(path):
        data = file.read()
    if checksum_of(data) != checksum:
        raise damaged(path)
    return data


def open_data(path: Path) -> io.BufferedReader:
    """Opens ``path`` for reading. Raises DamageError if it is missing, CheckpointError if it cannot be opened."""
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise DamageError(f"{path} is missing; restore it, or load another checkpoint") from None
    except OSError as error:
        raise unreadable(path, error) from None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises what :func:`unreadable` returns where ``path`` cannot be read inside the block."""
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Returns a DamageError if the disk has lost data. Another cause may pass, and then nothing is to be replaced."""
    if error.errno in _LOST:
        return DamageError(f"{path} cannot be read ({error.strerror}); restore it, or load another checkpoint")
    return CheckpointError(f"{path} cannot be read ({error.strerror}); let all ranks read it, and load again")


def damaged(path: Path) -> DamageError:
    return DamageError(
        f"{path} is damaged: its checksum differs; restore the original file, or load another checkpoint"
    )


def sync(file: Any) -> None:
    """Waits until everything written to ``file`` is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        sync(file)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yields a folder to write and sync files into. It becomes ``target``, which does not exist, at the end of the
    block, and nothing of it stays if the block raises."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        sync_folder(partial)
        os.rename(partial, target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def sync_folder(folder: Path) -> None:
    """Waits until the names in ``folder`` are on the disk, where its file system can do that for a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS:
            raise
    finally:
        os.close(descriptor)


Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
"""64-bit XXH3 in hexadecimal. It is as fast as reading memory, while CRC-32 takes longer than reading the file."""

Hasher = xxhash.xxh3_64
"""Incremental form: construct it with the first bytes, pass the next ones to ``update``, read ``hexdigest`` at the
end."""


def checksum_of(data: bytes | memoryview) -> str:
    return Hasher(data).hexdigest()
