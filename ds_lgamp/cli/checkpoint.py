"""``ds_lgamp checkpoint``: describes and verifies checkpoints, and converts them to and from other formats."""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TextIO

import torch

from ds_lgamp.checkpoint import folder as folders
from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.live_recovery import publish_alone
from ds_lgamp.checkpoint.names import OPTIMIZER, parse
from ds_lgamp.checkpoint.whole import (
    INDEX,
    SINGLE,
    WholeCheckpoint,
    read_safetensors,
    read_whole,
    verify,
    write_safetensors,
    write_whole,
)
from ds_lgamp.cli.terminal import at_work

_DATA_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_GIGABYTE = 10**9


def run_command(action: str, options: argparse.Namespace, output: TextIO) -> int:
    """Runs the command ``action``. Returns 0, or 1 after it has written one sentence to standard error."""
    actions: dict[str, Callable[[argparse.Namespace, TextIO], None]] = {
        "info": _info,
        "verify": _verify,
        "export": _export,
        "import": _import,
        "publish": _publish,
    }
    try:
        actions[action](options, output)
    except (CheckpointError, OSError) as error:
        print(f"ds_lgamp checkpoint {action}: {error}", file=sys.stderr)
        return 1
    return 0


def _info(options: argparse.Namespace, output: TextIO) -> None:
    described = describe(_existing(options.source))
    _report(options, output, _as_text(described).rstrip("\n"), **described)


def _verify(options: argparse.Namespace, output: TextIO) -> None:
    folder = _existing(options.source)
    with at_work(f"reading {folder}"):
        verify(folder)
    _report(options, output, f"{folder} is whole", folder=str(folder), whole=True)


def _export(options: argparse.Namespace, output: TextIO) -> None:
    source, target = _existing(options.source), options.target
    with at_work(f"exporting {source}"):
        if options.format == "deepspeed":
            from ds_lgamp.integrations.deepspeed.checkpoint.stock_writer import write_stock

            target = _new(target, source.name)
            write_stock(read_whole(source), target, options.pipeline_ranks, options.data_ranks)
        else:
            write_safetensors(source, target, _DATA_TYPES[options.dtype], int(options.max_shard_size * _GIGABYTE))
    _report(options, output, f"wrote {target}", folder=str(target))


def _import(options: argparse.Namespace, output: TextIO) -> None:
    with at_work(f"importing {options.source}"):
        whole, tag = _read_foreign(options.source)
        target = _new(options.target, tag)
        write_whole(target, whole)
        folders.write_latest(target.parent, target.name)
    weights_only = whole.state["optimizer"] is None
    hint = ": weights only, for load_module_only=True" if weights_only else ""
    _report(options, output, f"wrote {target}{hint}", folder=str(target), weights_only=weights_only)


def _publish(options: argparse.Namespace, output: TextIO) -> None:
    with at_work(f"reading {options.source}"):
        target = publish_alone(options.source, partial(_inside, options.target))
        folders.write_latest(target.parent, target.name)
    _report(options, output, f"wrote {target}", folder=str(target))


def _report(options: argparse.Namespace, output: TextIO, sentence: str, **facts: Any) -> None:
    """Writes what was done, in words or as JSON."""
    output.write(f"{json.dumps(facts) if options.json else sentence}\n")


def describe(folder: Path) -> dict[str, Any]:
    """Describes the checkpoint ``folder`` as JSON-compatible data; sizes are in bytes.

    Raises CheckpointError if the folder is no checkpoint or is damaged.
    """
    state, reader = folders.open_checkpoint(folder)
    tensors = list(map(parse, reader.tensors))
    optimizer, scheduler = state["optimizer"], state["lr_scheduler"]
    elements = {name: prod(parameter["shape"]) for name, parameter in state["parameters"].items()}
    files = [folder / folders.STATE, *(folder / state["tensors"]).iterdir()]
    return {
        "folder": str(folder),
        "bytes": sum(path.stat().st_size for path in files),
        "versions": state["versions"],
        "layout": state["layout"],
        "counters": state["counters"],
        "parameters": {"count": len(elements), "elements": sum(elements.values())},
        "buffers": sum(tensor.is_first_copy for tensor in tensors),
        "optimizer": None
        if optimizer is None
        else {
            "class": optimizer["class"],
            "groups": len(optimizer["groups"]),
            "state": sorted(
                {tensor.of for tensor in tensors if tensor.kind == OPTIMIZER}.union(
                    *optimizer["scalars"], *optimizer.get("of_parameters", {}).values()
                )
            ),
        },
        "lr_scheduler": None if scheduler is None else scheduler["class"],
    }


def _as_text(described: dict[str, Any]) -> str:
    layout, counters, parameters = (described[key] for key in ("layout", "counters", "parameters"))
    optimizer, scheduler = described["optimizer"], described["lr_scheduler"]
    chunks = len(layout["chunk_bounds"]) - 1
    trained = "none, weights only"
    if optimizer is not None:
        state = ", ".join(optimizer["state"]) or "nothing"
        trained = f"{optimizer['class'] or 'of unknown class'}, {optimizer['groups']} groups, state: {state}"
    tensor = f" x {layout['tensor_ranks']} tensor-parallel" if layout["tensor_ranks"] > 1 else ""
    lines = {
        "checkpoint": described["folder"],
        "steps": f"{counters['global_steps']}, {counters['global_samples']} samples",
        "layout": f"{layout['pipeline_ranks']} pipeline x {layout['data_ranks']} data-parallel{tensor} ranks, ZeRO "
        f"stage {layout['zero_stage']}, {layout['schedule']}, {chunks} chunks",
        "data type": layout["data_type"],
        "parameters": f"{parameters['count']} of {parameters['elements']:,} elements, {described['buffers']} buffers",
        "optimizer": trained,
        "lr scheduler": scheduler or "none",
        "on disk": f"{described['bytes']:,} bytes",
        "versions": ", ".join(f"{name} {version}" for name, version in described["versions"].items()),
    }
    return "".join(f"{name:13}{value}\n" for name, value in lines.items())


def _existing(source: Path) -> Path:
    """Returns ``source`` if it is a checkpoint, else the checkpoint that its ``latest`` names."""
    source = source.resolve()
    tag = None if _is_checkpoint(source) else folders.read_latest(source)
    return source if tag is None else source / tag


def _new(target: Path, tag: str) -> Path:
    """Returns ``target``, or ``tag`` inside it if it is already a folder of checkpoints. Raises CheckpointError if that
    exists."""
    target = target.resolve()
    folder = target / tag if target.is_dir() and not _is_checkpoint(target) else target
    if folder.exists():
        raise CheckpointError(f"{folder} exists; remove it or name another folder")
    return folder


def _inside(directory: Path, tag: str) -> Path:
    """Returns ``tag`` in a directory of checkpoints. Raises CheckpointError if that exists, or if ``directory`` is a
    checkpoint itself."""
    if _is_checkpoint(directory):
        raise CheckpointError(f"{directory} is a checkpoint; name the directory that holds it")
    folder = (directory / tag).resolve()
    # What an interrupted save has left there goes away with the next one.
    if folder.exists() and not all(path.name.startswith(folders.TENSORS) for path in folder.iterdir()):
        raise CheckpointError(f"{folder} exists; remove it or name another folder")
    return folder


def _is_checkpoint(folder: Path) -> bool:
    return (folder / folders.STATE).exists()


def _read_foreign(source: Path) -> tuple[WholeCheckpoint, str]:
    """Reads a checkpoint of another program. Returns it and a name for it."""
    if source.suffix == ".safetensors" or any((source / name).is_file() for name in (SINGLE, INDEX)):
        return read_safetensors(source), source.resolve().name.removesuffix(".safetensors")
    folder = _existing(source)
    if _is_checkpoint(folder):
        raise CheckpointError(f"{folder} is a checkpoint of ds_lgamp already; load it as it is")
    from ds_lgamp.integrations.deepspeed.checkpoint.stock_reader import read_stock

    return read_stock(folder), folder.name


def check_export(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Checks that every option belongs to the format, and fills in defaults."""
    ranks, files = (options.pipeline_ranks, options.data_ranks), (options.dtype, options.max_shard_size)
    if options.format == "deepspeed":
        if files != (None, None):
            parser.error("--dtype and --max-shard-size belong to --format safetensors")
        if None in ranks or min(ranks) < 1:
            parser.error("--format deepspeed needs --pipeline-ranks and --data-ranks of at least 1")
        return
    if ranks != (None, None):
        parser.error("--pipeline-ranks and --data-ranks belong to --format deepspeed")
    options.dtype = options.dtype or "fp32"
    options.max_shard_size = 5.0 if options.max_shard_size is None else options.max_shard_size
    if not 0 < options.max_shard_size < float("inf"):
        parser.error(f"--max-shard-size is {options.max_shard_size:g}; use a size above 0, in 10^9 bytes")
