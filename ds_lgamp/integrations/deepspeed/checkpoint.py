"""Saves and loads a training run at one layout: a folder with a file for every rank, whole or absent.

DIRECTORY/latest                 the tag of the last checkpoint
DIRECTORY/TAG/layout.json        what a run must agree with to load it
DIRECTORY/TAG/rank_00003.pt      shards, optimizer state, random states and client state of global rank 3
"""

import io
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from ds_lgamp.integrations.deepspeed.module import raise_everywhere
from ds_lgamp.partition.zero_partition import ZeroPartition
from ds_lgamp.runtime.random_state import RandomSource, read_states, write_states

LATEST, LAYOUT = "latest", "layout.json"
FORMAT = 2


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or loaded; the message names the file and the fix."""


def save(
    directory: Path, tag: str, layout: dict[str, Any], state: Callable[[], dict[str, Any]], publish_latest: bool
) -> None:
    """Writes the ``state`` of every rank beside the old checkpoint and puts all into its place at once. Collective.

    Raises CheckpointError on every rank if one cannot write, or if what it has cannot be loaded again.
    """
    final = directory / tag
    partial = final.with_name(f".{final.name}.partial")
    rank = dist.get_rank()
    _everywhere(lambda: _refuse_tag(tag))
    own = _everywhere(lambda: _loadable(state()))
    _everywhere(lambda: _prepare(partial, {"format": FORMAT, **layout}) if rank == 0 else None)
    _everywhere(lambda: torch.save(own, partial / _rank_file(rank)))
    _everywhere(lambda: _publish(partial, final) if rank == 0 else None)
    if publish_latest:
        _everywhere(lambda: _write_latest(directory / LATEST, tag) if rank == 0 else None)


def load(directory: Path, tag: str, layout: dict[str, Any], check: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The state this rank saved, if ``check`` raises on no rank. Collective.

    Raises CheckpointError on every rank if there is none that fits.
    """
    folder = directory / tag

    def read() -> dict[str, Any]:
        state = _read(folder, {"format": FORMAT, **layout})
        check(state)
        return state

    return _everywhere(read)


def read_latest(directory: Path) -> str | None:
    """The tag of the last checkpoint as rank 0 sees it; None if there is none. Collective."""
    path = directory / LATEST
    tag = _everywhere(lambda: path.read_text().strip() if dist.get_rank() == 0 and path.is_file() else None)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tag)
    return everyone[0]


def partition_state(partition: ZeroPartition) -> dict[str, dict[str, Any]]:
    """By unit, what its storage holds in which order, this rank's master weights, and the weights where they are
    others."""
    state = {}
    for unit in partition.units:
        # Cloned: a view would be written with the storage around it.
        state[unit.name] = {"contents": unit.contents(), "master": unit.master.detach().clone()}
        if unit.master is not unit.shard:
            state[unit.name]["weights"] = unit.shard.detach().clone()
    return state


def check_partition_state(partition: ZeroPartition, state: dict[str, dict[str, Any]]) -> None:
    """Raises CheckpointError if the units are others, or have their parameters in another order."""
    own = {unit.name: unit.contents() for unit in partition.units}
    for name in sorted(own.keys() | state.keys()):
        here, there = own.get(name, []), state.get(name, {}).get("contents", [])
        if here != there:
            different = sorted({str(entry) for entry in here} ^ {str(entry) for entry in there})
            raise CheckpointError(
                f"{name} has other parameters, shapes or optimizer groups than the checkpoint "
                f"({', '.join(different) or 'in another order'}); build model and groups as they were"
            )


def load_partition_state(partition: ZeroPartition, state: dict[str, dict[str, Any]]) -> None:
    """After :func:`check_partition_state`."""
    for unit in partition.units:
        saved = state[unit.name]
        with torch.no_grad():
            unit.master.copy_(saved["master"])
            if unit.master is not unit.shard:
                unit.shard.copy_(saved["weights"])
        unit.stale = unit.partitioned


def random_state(sources: Sequence[RandomSource]) -> list[Any]:
    """The states of all generators, as values that are safe to load."""
    return [_plain(state) for state in read_states(sources)]


def load_random_state(sources: Sequence[RandomSource], states: list[Any]) -> None:
    write_states(sources, [_with_arrays(state) for state in states])


def _loadable(state: dict[str, Any]) -> dict[str, Any]:
    """``state``, if all it holds beside tensors can be loaded without running code from the file."""
    small = {
        "client_state": state["client_state"],
        "optimizer.param_groups": state["optimizer"]["param_groups"],
        "lr_scheduler": state["lr_scheduler"],
    }
    for name, value in small.items():
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{name} holds objects that cannot be loaded without running code from the file "
                f"({str(error).splitlines()[0]}); use numbers, strings, tensors, lists and dictionaries"
            ) from None
    return state


def _refuse_tag(tag: str) -> None:
    path = Path(tag)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise CheckpointError(f"the tag is '{tag}'; name a folder inside the checkpoint's directory")


def _everywhere(action: Callable[[], Any]) -> Any:
    """The result of ``action`` if it succeeds on all ranks; otherwise raises CheckpointError on all."""
    result, complaint = None, None
    try:
        result = action()
    except CheckpointError as error:
        complaint = str(error)
    except Exception as error:
        complaint = (
            f"rank {dist.get_rank()}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
    raise_everywhere(complaint, CheckpointError)
    return result


def _prepare(partial: Path, layout: dict[str, Any]) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / LAYOUT).write_text(json.dumps(layout, indent=2) + "\n")


def _publish(partial: Path, final: Path) -> None:
    replaced = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        # What else lies there, such as a user's files or checkpoints below, stays.
        for other in final.iterdir():
            if other.name != LAYOUT and not other.match("rank_*.pt"):
                other.rename(partial / other.name)
        final.rename(replaced)
    partial.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_latest(latest: Path, tag: str) -> None:
    fresh = latest.with_name(f".{latest.name}.partial")
    fresh.write_text(tag)
    os.replace(fresh, latest)


def _read(folder: Path, layout: dict[str, Any]) -> dict[str, Any]:
    if not (folder / LAYOUT).is_file():
        raise CheckpointError(
            f"{folder} is no checkpoint of ds_lgamp; name a folder and tag that save_checkpoint wrote"
        )
    written = json.loads((folder / LAYOUT).read_text())
    # As JSON gives it back: tuples are lists there.
    for key, value in json.loads(json.dumps(layout)).items():
        if written.get(key) != value:
            raise CheckpointError(
                f"{folder} was written with {key} {written.get(key)}, this run has {value}; "
                "resume with the layout it was written with"
            )
    return torch.load(folder / _rank_file(dist.get_rank()), map_location="cpu", weights_only=True)


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _plain(value: Any) -> Any:
    """``value`` with tensors instead of NumPy arrays."""
    if isinstance(value, numpy.ndarray):
        return {"array": torch.from_numpy(value.astype(numpy.int64)), "dtype": str(value.dtype)}
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _with_arrays(value: Any) -> Any:
    """The inverse of :func:`_plain`."""
    if isinstance(value, dict) and set(value) == {"array", "dtype"}:
        return value["array"].numpy().astype(value["dtype"])
    return tuple(map(_with_arrays, value)) if isinstance(value, tuple) else value
