"""Whether a checkpoint fits a run: the same model, optimizer and scheduler."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ds_lgamp.checkpoint.buffers import name_of_first
from ds_lgamp.checkpoint.errors import CheckpointError
from ds_lgamp.integrations.deepspeed.checkpoint.run import Run
from ds_lgamp.integrations.deepspeed.model.module import PlacedModule, persistent_buffers, shown_name


class Parts(NamedTuple):
    """The parts of a checkpoint that a run loads beside the weights."""

    strict: bool
    """Whether model and checkpoint must have the same parameters."""
    optimizer: bool
    """The optimizer's state and the loss scale."""
    scheduler: bool
    progress: bool
    """Counters, random states and the position in the engine's own data."""


def check_fit(
    run: Run,
    folder: Path,
    state: dict[str, Any],
    parts: Parts,
    own: dict[str, Any],
    sizes: Mapping[str, torch.Size],
) -> None:
    """Raises CheckpointError if the checkpoint is of another model, optimizer or scheduler than the run.

    Args:
        own: the parameters of all pipeline ranks.
        sizes: the tensors in the checkpoint.
    """
    _check_parameters(run, folder, state["parameters"], own, parts.strict)
    _check_buffers(folder, run.placed, sizes, parts.strict)
    if parts.optimizer:
        _check_optimizer(run, folder, state, own)
    if parts.scheduler:
        _check_scheduler(folder, state["lr_scheduler"], run.lr_scheduler)


def _check_parameters(run: Run, folder: Path, written: dict[str, Any], own: dict[str, Any], strict: bool) -> None:
    names = own.keys() | written.keys() if strict else own.keys() & written.keys()
    others = sorted(name for name in names if _shape(own, name) != _shape(written, name))
    if others:
        shown = ", ".join(
            f"{shown_name(run.placed, name)} is {_shape(written, name)} there, {_shape(own, name)} here"
            for name in others[:3]
        )
        raise CheckpointError(
            f"{folder} is of another model ({shown}{', ...' if len(others) > 3 else ''}); build the model as it was, "
            "or if it was saved without frozen parameters, pass load_module_strict=False"
        )


def _shape(parameters: dict[str, Any], name: str) -> str:
    return str(parameters[name]["shape"]) if name in parameters else "absent"


def _check_buffers(folder: Path, module: PlacedModule, sizes: Mapping[str, torch.Size], strict: bool) -> None:
    for name, tensor in persistent_buffers(module):
        size = sizes.get(name_of_first(name))
        # A buffer without elements is in no file.
        if size != tensor.shape and (size is not None or (strict and tensor.numel())):
            there = "absent" if size is None else list(size)
            raise CheckpointError(
                f"{folder} is of another model (buffer {shown_name(module, name)} is {there} there, "
                f"{list(tensor.shape)} here); build the model as it was"
            )


def _check_scheduler(folder: Path, written: dict[str, Any] | None, own: Any) -> None:
    here = None if own is None else type(own).__name__
    # Stock DeepSpeed does not save the class.
    there = None if written is None else written["class"] or here or "of unknown class"
    if here != there:
        raise CheckpointError(
            f"{folder} has learning rate scheduler {there}, but this run has {here}; use the same, or pass "
            "load_lr_scheduler_states=False"
        )


def _check_optimizer(run: Run, folder: Path, state: dict[str, Any], own: dict[str, Any]) -> None:
    fix = "or pass load_optimizer_states=False"
    optimizer = state["optimizer"]
    if optimizer is None:
        raise CheckpointError(f"{folder} has weights only; pass load_module_only=True")
    complaint = run.optimizer.complaint_about_class(optimizer["class"])
    if complaint is not None:
        raise CheckpointError(f"{folder}: {complaint}, {fix}")
    there, here = len(optimizer["groups"]), len(run.optimizer.param_groups)
    if there != here:
        raise CheckpointError(f"{folder} has {there} parameter groups, not {here}; build them as they were, {fix}")
    for name, entry in own.items():
        shown = shown_name(run.placed, name)
        if name not in state["parameters"]:
            # Parameters of a group count their steps together, so a new one cannot begin at the first.
            if entry["group"] is not None:
                raise CheckpointError(
                    f"{folder} has no optimizer state of {shown}, which trains here; pass load_optimizer_states=False"
                )
            continue
        group = state["parameters"][name]["group"]
        if group != entry["group"]:
            raise CheckpointError(
                f"{folder} has {shown} in parameter group {group}, but this run in {entry['group']} (None: it does not "
                f"train); build the groups as they were, {fix}"
            )
