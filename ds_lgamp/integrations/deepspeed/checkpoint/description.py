"""What state.json says of a run beside tensors, alike on all ranks; whether it fits another run; and how that run takes
over the counters and the position in the data. Also what checkpoints and trainings ask of an engine. The schema is in
``ds_lgamp.checkpoint.schema``."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple, Protocol

import deepspeed
import torch

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.names import Share, name_of_first
from ds_lgamp.checkpoint.schema import COUNTERS, PULLED
from ds_lgamp.checkpoint.values import UnsupportedValue, encode, name_of_dtype
from ds_lgamp.integrations.deepspeed.config.precision import parameter_dtype, scaler_state
from ds_lgamp.integrations.deepspeed.model.experts import divided, whole_names
from ds_lgamp.integrations.deepspeed.model.module import (
    PlacedModule,
    built_layers,
    empty_extra_states,
    layer_types,
    persistent_buffers,
    shown_name,
    tied_users,
)
from ds_lgamp.integrations.split.parts import Tree
from ds_lgamp.partition.unit import parts_of
from ds_lgamp.runtime.recompute import undisturbed
from ds_lgamp.version import __version__

_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)


class Run(Protocol):
    """An engine, as far as a checkpoint reads or writes it. The counters come on top."""

    global_steps: int
    optimizer: Any
    """Its PartitionedOptimizer."""
    lr_scheduler: Any
    own_data: Any
    """Its OwnData; None if it has no data of its own."""
    lgamp: Any
    """Its Training."""
    grid: Any
    """DeepSpeed's PipelineParallelGrid."""
    device: Any
    _config: Any
    """The DeepSpeedConfig."""

    def train_micro_batch_size_per_gpu(self) -> int: ...


class Door(Run, Protocol):
    """An engine of DeepSpeed, through which a script trains. What its training asks of it."""

    micro_batches: int
    """How many a pipeline computes for a batch, if all data-parallel ranks compute equally many."""
    live_client_state: dict[Any, Any]
    """The client_state of the states in ``live_checkpoint``."""
    shapes_advice: str
    """What to do where micro-batches have other shapes than those before, as a clause."""

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        """Returns the loss of a micro-batch, or outputs, from what the last layer returned."""

    def end_backward(self) -> None:
        """Called when the program comes to its step, before gradients are final on all ranks."""

    def take_step(self) -> None:
        """Steps the optimizer and the scheduler as DeepSpeed does, and counts the step."""

    def micro_batch_name(self, data_rank: int, micro_batch: int) -> str:
        """Returns what the user calls a micro-batch."""
        ...


def ranks_of(run: Run) -> tuple[int, int, int]:
    """Returns this rank's pipeline, data-parallel and tensor-parallel rank."""
    return run.lgamp.placed.stage_id, run.grid.data_parallel_id, run.grid.get_slice_parallel_rank()


def describe(run: Run) -> dict[str, Any]:
    """Returns the content of state.json, without what all ranks have to gather. Raises CheckpointError if the optimizer
    or the scheduler holds what no checkpoint can."""
    optimizer, scheduler = run.optimizer, run.lr_scheduler
    groups = [
        {key: encode_named(f"optimizer.param_groups: {key}", value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {
        "versions": {"ds_lgamp": __version__, "deepspeed": deepspeed.__version__, "torch": torch.__version__},
        "layout": describe_layout(run),
        "layers": _layers(run),
        "counters": {
            **{name: getattr(run, name) for name in COUNTERS},
            PULLED: 0 if run.own_data is None else run.own_data.pulled,
        },
        "micro_offset": run.lgamp.placed.micro_offset,
        # Only the device may know of one so far. Callers that may wait for it fill this in.
        "late_overflow": False,
        "data": epoch_of(run),
        "loss_scaler": scaler_state(optimizer.loss_scaler),
        "lr_scheduler": None
        if scheduler is None
        else {"class": type(scheduler).__name__, "state": encode_named("lr_scheduler", scheduler_state(scheduler))},
        "optimizer": {"class": optimizer.class_name, "groups": groups},
    }


def describe_layout(run: Run) -> dict[str, Any]:
    """Returns the layout of the run. A run of any other layout may load the checkpoint."""
    spec, layout = run.lgamp.program_spec, run.lgamp.placed.layout
    return {
        "pipeline_ranks": spec.pipeline_ranks,
        "data_ranks": run.grid.data_parallel_size,
        "tensor_ranks": run.grid.get_slice_parallel_world_size(),
        "zero_stage": run.lgamp.zero_stage,
        "schedule": spec.schedule,
        "chunk_bounds": layout.bounds,
        "placement": layout.placement,
        "data_type": name_of_dtype(parameter_dtype(run._config)),
    }


def describe_parameters(run: Run, exclude_frozen: bool = False) -> dict[str, dict[str, Any]]:
    """Returns shape and optimizer group of this pipeline rank's parameters, by name, in the module's order."""
    infos = {
        part.name: {"shape": list(part.whole_shape), "group": part.group}
        for unit in run.optimizer.partition.units
        if unit.trains or not exclude_frozen
        for part in parts_of(unit)
    }
    return {name: infos[name] for name, _ in whole_names(run.lgamp.placed) if name in infos}


def share_of(run: Run, exclude_frozen: bool = False) -> Share:
    """Returns this rank's share of the description, without the scalars of the optimizer, which change."""
    # Without experts the same on all data-parallel ranks, so the first one's suffice.
    describes = run.grid.data_parallel_id == 0 or divided(run.lgamp.placed)
    parameters = describe_parameters(run, exclude_frozen) if describes else {}
    return Share(parameters, {}, set(empty_extra_states(run.lgamp.placed)))


def encode_named(name: str, value: Any) -> Any:
    """Returns ``value`` as JSON can hold it. Raises CheckpointError, which names it ``name``, if that cannot be."""
    try:
        return encode(value)
    except UnsupportedValue as error:
        raise CheckpointError(f"{name} holds {error}") from None


def scheduler_state(scheduler: Any) -> Any:
    """Returns the state of ``scheduler`` without functions. They are code, which the scheduler that loads it has
    itself. torch's own schedulers leave theirs out, but torch takes every attribute of other classes for their
    state."""
    state = scheduler.state_dict()
    if not isinstance(state, dict):
        return state
    return {key: value for key, value in state.items() if not isinstance(value, _FUNCTIONS)}


def _layers(run: Run) -> dict[str, Any]:
    """Returns what the parameters do not show: the types of layers, which of them use a tied module, how DeepSpeed cuts
    them, and whose names their parameters have."""
    return {
        "types": layer_types(run.lgamp.placed),
        "tied": tied_users(run.lgamp.placed),
        "partition_method": run.lgamp.partition_method,
        # The first rank has the first layer.
        "names_of_model": any(isinstance(layer, Tree) for layer in built_layers(run.lgamp.placed).values()),
        "other_names": dict(run.lgamp.placed.other_names),
    }


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
    """Raises CheckpointError if the checkpoint, with tensors of these ``sizes``, is of another model, optimizer or
    scheduler than the run, whose pipeline ranks have the parameters ``own``."""
    _check_parameters(run, folder, state["parameters"], own, parts.strict)
    _check_buffers(folder, run.lgamp.placed, sizes, parts.strict)
    if parts.optimizer:
        _check_optimizer(run, folder, state, own)
    if parts.scheduler:
        _check_scheduler(folder, state["lr_scheduler"], run.lr_scheduler)


def _check_parameters(run: Run, folder: Path, written: dict[str, Any], own: dict[str, Any], strict: bool) -> None:
    names = own.keys() | written.keys() if strict else own.keys() & written.keys()
    others = sorted(name for name in names if _shape(own, name) != _shape(written, name))
    if others:
        shown = ", ".join(
            f"{shown_name(run.lgamp.placed, name)} is {_shape(written, name)} there, {_shape(own, name)} here"
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
        shown = shown_name(run.lgamp.placed, name)
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
                f"train); freeze parameters and build the groups as they were, {fix}"
            )


Epoch = Mapping[str, int]
"""``micro_batches_per_epoch``: of one data-parallel rank; ``samples``: in one micro-batch, over all data-parallel
ranks."""


def epoch_of(run: Run) -> dict[str, int] | None:
    """Returns the size of an epoch of the engine's own data. None if the engine has no data, or too few for a
    micro-batch."""
    if run.own_data is None or run.own_data.micro_batches_per_epoch == 0:
        return None
    samples = run.train_micro_batch_size_per_gpu() * run.grid.data_parallel_size
    return {"micro_batches_per_epoch": run.own_data.micro_batches_per_epoch, "samples": samples}


def seek_data(run: Run, pulled: int, there: Epoch | None) -> None:
    """Moves the engine's own data, if it has any, to where they stood when the checkpoint was written.

    Args:
        pulled: micro-batches taken there.
        there: the size of an epoch there; None if the engine had no data of its own.
    """
    here = epoch_of(run)
    if run.own_data is not None and here is not None:
        # A run without own data has taken nothing from it.
        position = 0 if there is None else micro_batches_here(pulled, there, here)
        with undisturbed(run.lgamp.random_sources):
            run.own_data.seek(position)


def micro_batches_here(pulled: int, there: Epoch, here: Epoch) -> int:
    """Returns how many micro-batches here are as far into the data, in samples, as ``pulled`` micro-batches were where
    the checkpoint was written."""
    if there == here or not pulled:
        return pulled
    # At the end of an epoch, not at the beginning of the next, which draws random numbers.
    epochs, last = divmod(pulled - 1, there["micro_batches_per_epoch"])
    position = here["micro_batches_per_epoch"]
    if last + 1 < there["micro_batches_per_epoch"]:
        position = min(position, (last + 1) * there["samples"] // here["samples"])
    return epochs * here["micro_batches_per_epoch"] + position
