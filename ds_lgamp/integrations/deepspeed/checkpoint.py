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
FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or loaded; the message names the file and the fix."""


def save(directory: Path, tag: str, layout: dict[str, Any], state: dict[str, Any], publish_latest: bool) -> None:
    """Writes ``state`` of every rank beside the old checkpoint and puts all into its place at once. Collective.

    Raises CheckpointError on every rank if one cannot write.
    """
    final = directory / tag
    partial = final.with_name(f".{final.name}.partial")
    rank = dist.get_rank()
    _everywhere(lambda: _prepare(partial, {"format": FORMAT, **layout}) if rank == 0 else None)
    _everywhere(lambda: torch.save(state, partial / _rank_file(rank)))
    _everywhere(lambda: _publish(partial, final) if rank == 0 else None)
    if publish_latest:
        _everywhere(lambda: _write_latest(directory / LATEST, tag) if rank == 0 else None)


def load(directory: Path, tag: str, layout: dict[str, Any]) -> dict[str, Any]:
    """The state this rank saved. Collective. Raises CheckpointError on every rank if there is none that fits."""
    folder = directory / tag
    return _everywhere(lambda: _read(folder, {"format": FORMAT, **layout}))


def read_latest(directory: Path) -> str | None:
    """The tag of the last checkpoint; None if there is none."""
    path = directory / LATEST
    return path.read_text().strip() if path.is_file() else None


def partition_state(partition: ZeroPartition) -> dict[str, dict[str, torch.Tensor]]:
    """The master weights of this rank's units, and the weights where they are others, by unit."""
    state = {}
    for unit in partition.units:
        state[unit.name] = {"master": unit.master.detach()}
        if unit.master is not unit.shard:
            state[unit.name]["weights"] = unit.shard.detach()
    return state


def load_partition_state(partition: ZeroPartition, state: dict[str, dict[str, torch.Tensor]]) -> None:
    """Raises ValueError before anything changes if the units are others."""
    own = partition_state(partition)
    for name in own.keys() | state.keys():
        shapes = [{key: tensor.shape for key, tensor in side.get(name, {}).items()} for side in (own, state)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{name} has {shapes[1] or 'nothing'} in the checkpoint and {shapes[0] or 'nothing'} here")
    for name, tensors in own.items():
        for key, tensor in tensors.items():
            tensor.copy_(state[name][key])
    for unit in partition.units:
        unit.stale = unit.partitioned


def random_state(sources: Sequence[RandomSource]) -> list[Any]:
    """The states of all generators, as values that are safe to load."""
    return [_plain(state) for state in read_states(sources)]


def load_random_state(sources: Sequence[RandomSource], states: list[Any]) -> None:
    write_states(sources, [_with_arrays(state) for state in states])


def check_loadable(client_state: Any) -> None:
    """Raises CheckpointError if ``client_state`` holds what a checkpoint cannot give back without running code."""
    buffer = io.BytesIO()
    try:
        torch.save(client_state, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"client_state holds objects that cannot be loaded without running code from the file ({reason}); "
            "use numbers, strings, tensors, lists and dictionaries"
        ) from None


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
