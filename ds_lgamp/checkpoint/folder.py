"""The folder layout of checkpoints, and how a checkpoint is published, replaced and removed atomically.

DIRECTORY/latest                  the tag of the last checkpoint
DIRECTORY/TAG/state.json          everything but tensors, and the name of the tensor folder
DIRECTORY/TAG/tensors-ID/         the tensors, see storage.py

A checkpoint exists if and only if it has a state.json. A save writes and syncs all files first, and then renames
state.json into place. Saving a tag again writes a new tensor folder, and the rename replaces the old checkpoint.
"""

import json
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from ds_lgamp.checkpoint.files import (
    CheckpointError,
    DamageError,
    checksum_of,
    damaged,
    sync_folder,
    unreadable,
    write_synced,
)
from ds_lgamp.checkpoint.schema import check_state, check_tensors
from ds_lgamp.checkpoint.storage import INDEX, VerifyingReader

FORMAT = 3
_A_DAY = 86_400
"""Seconds."""
LATEST, STATE, TENSORS = "latest", "state.json", "tensors-"


def check_tag(tag: str) -> None:
    """Raises CheckpointError if ``tag`` names no folder below another."""
    path = Path(tag)
    if not path.parts or path.is_absolute() or ".." in path.parts or not tag.isprintable():
        raise CheckpointError(f"the tag is '{tag}'; name a folder inside the checkpoint's directory")


def new_tensors(folder: Path) -> Path:
    """Makes an empty tensor folder for the checkpoint ``folder``. Removes the leftovers of interrupted saves."""
    _make(folder)
    published = _published_tensors(folder)
    # If this release cannot read state.json, the tensors beside it may still belong to it. They stay.
    if published is not None or not (folder / STATE).exists():
        _remove_other_tensors(folder, published)
    tensors = folder / f"{TENSORS}{uuid4().hex[:8]}"
    tensors.mkdir()
    return tensors


def publish(folder: Path, tensors: Path, state: dict[str, Any]) -> None:
    """Publishes ``state`` and ``tensors``, which must be complete and synced, as the checkpoint ``folder``.

    Raises CheckpointError if ``state`` does not match the schema in schema.py.
    """
    checksum = checksum_of((tensors / INDEX).read_bytes())
    whole = {"format": FORMAT, **state, "tensors": tensors.name, "index_checksum": checksum}
    # Checks the form that will be read, because a checkpoint that fails this check could not be loaded.
    check_state(folder / STATE, json.loads(json.dumps(whole)))
    sync_folder(folder)
    _replace(folder / STATE, json.dumps({"checksum": _checksum(whole), **whole}, indent=1) + "\n")
    _remove_other_tensors(folder, tensors.name)


def discard(tensors: Path) -> None:
    """Removes the tensors of a failed save unless they are already published. Removes the checkpoint's folder if it is
    then empty."""
    # If state.json cannot be read at the moment, it may name them, so they stay.
    with suppress(OSError):
        if not _is_named(tensors):
            shutil.rmtree(tensors, ignore_errors=True)
            _remove_if_empty(tensors.parent)


def _is_named(tensors: Path) -> bool:
    """Whether state.json names ``tensors``, even if it is damaged. Raises OSError where it cannot be read."""
    try:
        return tensors.name in (tensors.parent / STATE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return False


def write_latest(directory: Path, tag: str) -> None:
    _replace(directory / LATEST, tag)


def read_latest(directory: Path) -> str | None:
    """Returns the tag of the last checkpoint; None if there is none. Raises CheckpointError if the file holds no
    tag."""
    path = directory / LATEST
    if not path.is_file():
        return None
    tag = path.read_text(encoding="utf-8", errors="replace").strip()
    try:
        check_tag(tag)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return tag


def rename_latest(directory: Path, damaged: Path, loaded: Path) -> None:
    """Lets ``latest`` name what was ``loaded`` in place of what is ``damaged``, if nobody has saved meanwhile."""
    with suppress(OSError):
        if directory / (read_latest(directory) or "") == damaged:
            write_latest(directory, str(loaded.relative_to(directory)))


def last_and_others(directory: Path) -> list[Path]:
    """Returns the last checkpoint, and then all other ones from the newest on; none if ``latest`` names none."""
    last = read_latest(directory)
    return [] if last is None else list(dict.fromkeys([directory / last, *_newest_first(directory, last)]))


def advice_without_latest(directory: Path) -> str:
    """Says what to do where no checkpoint in ``directory`` is the last."""
    if (directory / STATE).is_file():
        own = directory.absolute()
        return f"it is a checkpoint itself: name {own.parent}, and pass the tag '{own.name}'"
    whole = _newest_first(directory, "any")
    if whole:
        return f"pass the tag '{whole[0].name}', which is whole"
    begun = unfinished(directory)
    if begun:
        return f"the save in {', '.join(begun)} was not finished; remove {directory}, and go on from one that was"
    return "pass a tag, or save a checkpoint first"


def keep_last(directory: Path, tag: str, count: int) -> None:
    """Removes old checkpoints in ``directory``, and what saves left there that were interrupted. Keeps the newest
    ``count`` and the one that ``latest`` names.

    Only checkpoints with as many path parts in their tags as ``tag`` count. Links, other files in the folders, and
    checkpoints that this release cannot read stay.
    """
    last = read_latest(directory)
    for folder in _newest_first(directory, tag)[count:]:
        if last is None or folder != directory / last:
            (folder / STATE).unlink()
            sync_folder(folder)
            _remove_other_tensors(folder, None)
            _remove_if_empty(folder)
    for folder in _folders_like(directory, tag):
        if not (folder / STATE).exists():
            for tensors in filter(_is_forgotten, folder.glob(f"{TENSORS}*")):
                shutil.rmtree(tensors, ignore_errors=True)
                _remove_if_empty(folder)


def _is_forgotten(tensors: Path) -> bool:
    """Whether an interrupted save has left the folder."""
    with suppress(OSError):
        return re.fullmatch(f"{TENSORS}[0-9a-f]{{8}}", tensors.name) is not None and _rests(tensors, *tensors.iterdir())
    return False


def _rests(*paths: Path) -> bool:
    """Whether nothing was written to any of ``paths`` for a day."""
    return max(path.stat().st_mtime for path in paths) < time.time() - _A_DAY


def _newest_first(directory: Path, tag: str) -> list[Path]:
    """Returns the checkpoints in ``directory`` whose tags have as many path parts as ``tag``. Links, and checkpoints
    that this release cannot read, are left out."""
    found = [folder for folder in _folders_like(directory, tag) if _published_tensors(folder) is not None]
    return sorted(found, key=lambda folder: (folder / STATE).stat().st_mtime_ns, reverse=True)


def unfinished(directory: Path) -> list[str]:
    """Returns the names of the folders in ``directory`` in which a save has begun, and none was completed."""
    begun = {tensors.parent for tensors in directory.glob(f"*/{TENSORS}*")}
    return sorted(folder.name for folder in begun if not (folder / STATE).exists())


def _folders_like(directory: Path, tag: str) -> list[Path]:
    """Returns what lies as deep in ``directory`` as the folder of ``tag``, and has no link in its path."""
    parts = len(Path(tag).parts)
    found = directory.glob("/".join(["*"] * parts))
    return [folder for folder in found if not any(path.is_symlink() for path in [folder, *folder.parents][:parts])]


def read_state(folder: Path) -> dict[str, Any]:
    """Reads and checks state.json of the checkpoint ``folder``; schema.py has its schema.

    Raises CheckpointError if the folder is no checkpoint, or if the file is damaged or was not written by
    save_checkpoint.
    """
    path = folder / STATE
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if is_stock(folder):
            # It is not damaged: no older one may take its place.
            raise CheckpointError(
                f"{folder} is no checkpoint of ds_lgamp; stock DeepSpeed wrote it: convert it with ds_lgamp checkpoint "
                "import"
            ) from None
        raise DamageError(f"{folder} is no checkpoint of ds_lgamp; {_instead(folder)}") from None
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, RecursionError):
        raise damaged(path) from None
    if not isinstance(written, dict) or written.pop("checksum", None) != _checksum(written):
        raise damaged(path)
    if written.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has format {written.get('format')}, but this release of ds_lgamp reads {FORMAT}; use the "
            "release that wrote it"
        )
    check_state(path, written)
    return written


def open_checkpoint(folder: Path) -> tuple[dict[str, Any], VerifyingReader]:
    """Returns the content of state.json, as :func:`read_state` does, and a reader of the tensors.

    Raises CheckpointError as :func:`read_state` does, and if index.json is damaged or does not match state.json.
    """
    state = read_state(folder)
    tensors = VerifyingReader(folder / state["tensors"], state["index_checksum"])
    check_tensors(folder / STATE, state, tensors.tensors)
    return state, tensors


def is_stock(folder: Path) -> bool:
    """Whether stock DeepSpeed wrote the checkpoint ``folder``."""
    return any(folder.glob("*mp_rank_*_model_states.pt"))


def _instead(folder: Path) -> str:
    if any(folder.glob(f"{TENSORS}*")):
        return "its save was interrupted: load another"
    return "name a folder and tag that save_checkpoint wrote"


def _checksum(state: dict[str, Any]) -> str:
    return checksum_of(json.dumps(state).encode())


def _published_tensors(folder: Path) -> str | None:
    """Name of the tensor folder of the current checkpoint; None if there is no readable checkpoint."""
    try:
        return read_state(folder)["tensors"]
    except CheckpointError:
        return None


def _make(folder: Path) -> None:
    """Makes ``folder`` and its missing parents, and syncs their names to the disk."""
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file; name a folder for checkpoints")
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def _replace(path: Path, text: str) -> None:
    """Replaces the content of ``path`` by ``text`` atomically. Leaves everything as it was if that fails. Removes what
    interrupted calls left."""
    # Another job may replace the file at this moment.
    fresh = path.with_name(f".{path.name}.{uuid4().hex[:8]}.partial")
    for left in path.parent.glob(f".{path.name}*.partial"):
        with suppress(OSError):
            if _rests(left):
                left.unlink()
    try:
        write_synced(fresh, text)
        os.replace(fresh, path)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
        raise
    sync_folder(path.parent)


def _remove_other_tensors(folder: Path, current: str | None) -> None:
    for path in folder.glob(f"{TENSORS}*"):
        # A tag may begin with "tensors-" too. That folder is another checkpoint.
        if path.name != current and not (path / STATE).exists():
            shutil.rmtree(path, ignore_errors=True)


def _remove_if_empty(folder: Path) -> None:
    # rmdir fails if the folder holds files of the user or other checkpoints.
    with suppress(OSError):
        folder.rmdir()
