"""Describes a run in state.json: everything but tensors that is the same on all ranks. state.py checks it when it is
read."""

from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import TiedLayerSpec

from ds_lgamp.checkpoint.errors import CheckpointError
from ds_lgamp.checkpoint.values import UnsupportedValue, encode
from ds_lgamp.integrations.deepspeed.checkpoint.data_position import epoch_of
from ds_lgamp.integrations.deepspeed.checkpoint.fields import COUNTERS, PULLED, TOP_LEVEL, read_fields
from ds_lgamp.integrations.deepspeed.checkpoint.run import Run
from ds_lgamp.integrations.deepspeed.config.precision import parameter_dtype, scaler_state
from ds_lgamp.integrations.deepspeed.model.module import built_layers, global_names, layer_types
from ds_lgamp.integrations.split.call import Tree
from ds_lgamp.partition.parts import parts_of
from ds_lgamp.version import __version__

_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)


def describe(run: Run) -> dict[str, Any]:
    """Returns the content of state.json, without what all ranks have to gather. Raises CheckpointError if the optimizer
    or the scheduler holds what no checkpoint can."""
    optimizer, scheduler = run.optimizer, run.lr_scheduler
    groups = [
        {key: encoded(f"optimizer.param_groups: {key}", value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {
        "versions": {"ds_lgamp": __version__, "deepspeed": deepspeed.__version__, "torch": torch.__version__},
        "layout": describe_layout(run),
        "layers": _layers(run),
        "counters": {**read_fields(run, COUNTERS), PULLED: 0 if run.own_data is None else run.own_data.pulled},
        **read_fields(run, TOP_LEVEL),
        # Only the device may know of one so far. Callers that may wait for it fill this in.
        "late_overflow": False,
        "data": epoch_of(run),
        "loss_scaler": scaler_state(optimizer.loss_scaler),
        "lr_scheduler": None if scheduler is None else _scheduler(scheduler),
        "optimizer": {"class": optimizer.class_name, "groups": groups},
    }


def describe_layout(run: Run) -> dict[str, Any]:
    """Returns the layout of the run. A run of any other layout may load the checkpoint."""
    spec, layout = run.program_spec, run.placed.layout
    return {
        "pipeline_ranks": spec.pipeline_ranks,
        "data_ranks": run.dp_world_size,
        "tensor_ranks": run.grid.get_slice_parallel_world_size(),
        "zero_stage": run.zero_stage,
        "schedule": spec.schedule,
        "chunk_bounds": layout.bounds,
        "placement": layout.placement,
        "data_type": str(parameter_dtype(run._config)).removeprefix("torch."),
    }


def describe_parameters(run: Run, exclude_frozen: bool = False) -> dict[str, dict[str, Any]]:
    """Returns shape and optimizer group of this pipeline rank's parameters, by name, in the module's order."""
    infos = {
        part.name: {"shape": list(part.whole_shape), "group": part.group}
        for unit in run.optimizer.partition.units
        if unit.trains or not exclude_frozen
        for part in parts_of(unit)
    }
    return {name: infos[name] for name, _ in global_names(run.placed) if name in infos}


def encoded(name: str, value: Any) -> Any:
    """Returns ``value`` as JSON can hold it. Raises CheckpointError, which names it ``name``, if that cannot be."""
    try:
        return encode(value)
    except UnsupportedValue as error:
        raise CheckpointError(f"{name} holds {error}") from None


def _scheduler(scheduler: Any) -> dict[str, Any]:
    return {"class": type(scheduler).__name__, "state": encoded("lr_scheduler", scheduler_state(scheduler))}


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
    tied: dict[str, list[int]] = {}
    for layer, spec in enumerate(run.placed._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            tied.setdefault(spec.key, []).append(layer)
    return {
        "types": layer_types(run.placed),
        "tied": tied,
        "partition_method": run.partition_method,
        # The first rank has the first layer.
        "names_of_model": any(isinstance(layer, Tree) for layer in built_layers(run.placed).values()),
        "other_names": dict(run.placed.other_names),
    }
