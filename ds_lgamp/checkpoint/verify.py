"""Verifies a checkpoint byte by byte."""

from pathlib import Path

from ds_lgamp.checkpoint import folder as folders
from ds_lgamp.checkpoint.errors import CheckpointError
from ds_lgamp.checkpoint.files import verified
from ds_lgamp.checkpoint.state import decode_text
from ds_lgamp.checkpoint.storage import METADATA, VerifyingReader
from ds_lgamp.checkpoint.units import RANKS


def verify(folder: Path) -> None:
    """Reads and verifies the whole checkpoint ``folder``, one tensor at a time.

    Raises CheckpointError, which names the file, if a byte differs from what was written, or if an element or a tensor
    that state.json lists is missing.
    """
    state = folders.read_state(folder)
    reader = folders.reader(folder, state)
    verified(reader.folder / METADATA, reader.index.metadata_checksum)
    _check_lengths(reader)
    for name in reader.tensors:
        values = reader.whole(name)
        if name.startswith(f"{RANKS}/"):
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
