"""Where checkpoints lie, and how one appears, is replaced and disappears as a whole.

DIRECTORY/latest                  the tag of the last checkpoint
DIRECTORY/TAG/state.json          what is no tensor, and which folder has the tensors
DIRECTORY/TAG/tensors-ID/         the tensors, see storage.py

A checkpoint exists if and only if it has a state.json, which is put into its place by one rename when all it names is
on the disk. Saved again, a tag gets another folder of tensors, and the rename replaces the old checkpoint.
"""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from ds_lgamp.checkpoint.checksum import checksum_of
from ds_lgamp.checkpoint.errors import CheckpointError
from ds_lgamp.checkpoint.state import check_state, check_tensors
from ds_lgamp.checkpoint.storage import INDEX, VerifyingReader, damaged, sync_folder, write_synced

FORMAT = 3
LATEST, STATE, TENSORS = "latest", "state.json", "tensors-"


def check_tag(tag: str) -> None:
    """Raises CheckpointError if ``tag`` names no folder below another."""
    path = Path(tag)
    if not path.parts or path.is_absolute() or ".." in path.parts or not tag.isprintable():
        raise CheckpointError(f"the tag is '{tag}'; name a folder inside the checkpoint's directory")


def new_tensors(folder: Path) -> Path:
    """A fresh folder for the tensors of the checkpoint ``folder``; what an interrupted save left there is removed."""
    _make(folder)
    published = _published_tensors(folder)
    # Tensors beside a state.json that this release cannot read may be that one's.
    if published is not None or not (folder / STATE).exists():
        _remove_other_tensors(folder, published)
    tensors = folder / f"{TENSORS}{uuid4().hex[:8]}"
    tensors.mkdir()
    return tensors


def publish(folder: Path, tensors: Path, state: dict[str, Any]) -> None:
    """Makes ``state`` and ``tensors``, which are complete and synced, the checkpoint ``folder``. Raises
    CheckpointError if ``state`` is not as state.py says."""
    checksum = checksum_of((tensors / INDEX).read_bytes())
    whole = {"format": FORMAT, **state, "tensors": tensors.name, "index_checksum": checksum}
    # As it will be read: what could not be would be lost.
    check_state(folder / STATE, json.loads(json.dumps(whole)))
    sync_folder(folder)
    _replace(folder / STATE, json.dumps({"checksum": _checksum(whole), **whole}, indent=1) + "\n")
    _remove_other_tensors(folder, tensors.name)


def discard(tensors: Path) -> None:
    """Removes what a failed save has written, unless it is published already, and the checkpoint's folder if that
    leaves it empty."""
    # Nothing is removed unless it is known not to be the checkpoint.
    with suppress(OSError):
        if _published_tensors(tensors.parent) != tensors.name:
            shutil.rmtree(tensors, ignore_errors=True)
            _remove_if_empty(tensors.parent)


def write_latest(directory: Path, tag: str) -> None:
    _replace(directory / LATEST, tag)


def read_latest(directory: Path) -> str | None:
    """The tag of the last checkpoint; None if there is none. Raises CheckpointError if the file holds no tag."""
    path = directory / LATEST
    if not path.is_file():
        return None
    tag = path.read_text(encoding="utf-8", errors="replace").strip()
    try:
        check_tag(tag)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return tag


def keep_last(directory: Path, tag: str, count: int) -> None:
    """Removes the oldest checkpoints in ``directory``, of those with as many folders in their tags as ``tag``, but the
    newest ``count`` and the one ``latest`` names. Links, what else lies in their folders, and what this release cannot
    read stay."""
    pattern = "/".join(["*"] * len(Path(tag).parts))
    found = [folder for folder in directory.glob(pattern) if _is_own(directory, folder)]
    newest_first = sorted(found, key=lambda folder: (folder / STATE).stat().st_mtime_ns, reverse=True)
    last = read_latest(directory)
    for folder in newest_first[count:]:
        if last is None or folder != directory / last:
            (folder / STATE).unlink()
            sync_folder(folder)
            _remove_other_tensors(folder, None)
            _remove_if_empty(folder)


def _is_own(directory: Path, folder: Path) -> bool:
    """Whether ``folder`` is a checkpoint below ``directory``, and no link leads to it."""
    between = [folder, *folder.parents][: len(folder.relative_to(directory).parts)]
    return not any(path.is_symlink() for path in between) and _published_tensors(folder) is not None


def read_state(folder: Path) -> dict[str, Any]:
    """What state.json of the checkpoint ``folder`` holds, see state.py. Raises CheckpointError if it is none, damaged,
    or not what save_checkpoint writes."""
    path = folder / STATE
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} is no checkpoint of ds_lgamp; {_instead(folder)}") from None
    except (ValueError, RecursionError):
        raise damaged(path) from None
    if not isinstance(written, dict) or written.pop("checksum", None) != _checksum(written):
        raise damaged(path)
    if written.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has format {written.get('format')}, this release of ds_lgamp reads {FORMAT}; use the release "
            "that wrote it"
        )
    check_state(path, written)
    return written


def reader(folder: Path, state: dict[str, Any]) -> VerifyingReader:
    """Of the tensors of a checkpoint and its :func:`read_state`. Raises CheckpointError if they do not belong together
    or index.json is damaged."""
    tensors = VerifyingReader(folder / state["tensors"], state["index_checksum"])
    check_tensors(folder / STATE, state, tensors.tensors)
    return tensors


def _instead(folder: Path) -> str:
    if any(folder.glob("*mp_rank_*_model_states.pt")):
        return "stock DeepSpeed wrote it: convert it with ds_lgamp checkpoint import"
    if any(folder.glob(f"{TENSORS}*")):
        return "its save was interrupted: load another"
    return "name a folder and tag that save_checkpoint wrote"


def _checksum(state: dict[str, Any]) -> str:
    return checksum_of(json.dumps(state).encode())


def _published_tensors(folder: Path) -> str | None:
    """Which folder of tensors the checkpoint has that is there now."""
    try:
        return read_state(folder)["tensors"]
    except CheckpointError:
        return None


def _make(folder: Path) -> None:
    """With the folders above it that are missing, whose names are then on the disk, too."""
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file; name a folder for checkpoints")
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def _replace(path: Path, text: str) -> None:
    """Puts ``text`` into the place of ``path`` at once, or leaves everything as it was."""
    fresh = path.with_name(f".{path.name}.partial")
    try:
        write_synced(fresh, text)
        os.replace(fresh, path)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
        raise
    sync_folder(path.parent)


def _remove_other_tensors(folder: Path, kept: str | None) -> None:
    for path in folder.glob(f"{TENSORS}*"):
        # A tag of that name below this one is another checkpoint.
        if path.name != kept and not (path / STATE).exists():
            shutil.rmtree(path, ignore_errors=True)


def _remove_if_empty(folder: Path) -> None:
    # It is not where a user's files are, or checkpoints below.
    with suppress(OSError):
        folder.rmdir()
