"""Reads a checkpoint of stock DeepSpeed's pipeline engine in one process, whatever its layout."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from torch import Tensor

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.values import name_of_dtype
from ds_lgamp.checkpoint.whole import WholeCheckpoint, state_of, weights_only
from ds_lgamp.integrations.deepspeed.checkpoint.stock_files import (
    KEYS,
    StockLayers,
    layer_files,
    load_file,
    name_layers,
    rank_file,
    refuse_tensor_ranks,
    refuse_whole_tensors,
    shard_file,
)
from ds_lgamp.integrations.deepspeed.config.optimizer_choice import ELEMENTWISE, JSON_NAMES, Kernels, choose_optimizer
from ds_lgamp.integrations.deepspeed.config.precision import scaler_state

_OF_NO_PIPELINE = (
    "so no PipelineModule was saved; load it without a block, or start from its weights alone (zero_to_fp32.py there)"
)
_ALONE = {"tp_degree": 1}
"""What files say of tensor parallelism that do not speak of it."""
_OPTIONS_OF_FUSED_ADAM = {"lr", "bias_correction", "betas", "eps", "weight_decay"}


class Group(NamedTuple):
    """A parameter group on one pipeline rank. DeepSpeed drops groups that have no parameter there."""

    names: list[str]
    options: dict[str, Any]
    scalars: dict[str, Any]
    """State that all parameters of the group share, such as the step."""


class OwnedState(NamedTuple):
    """The optimizer state of one pipeline rank, joined from its data-parallel ranks. Tensors are flat."""

    groups: list[Group]
    masters: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    loss_scaler: dict[str, Any] | None


def read_stock(folder: Path) -> WholeCheckpoint:
    """Returns the checkpoint of a pipeline run of stock DeepSpeed at ZeRO stage 0 or 1. Returns weights alone where the
    files hold nothing else, such as those of scripts that convert models.

    A tied parameter takes the values of the first pipeline rank, as when DeepSpeed loads.

    Raises CheckpointError if ``folder`` (DIR/TAG) holds no such checkpoint, or one that is incomplete, would run code
    or is ambiguous.
    """
    try:
        return _read(folder)
    except (AttributeError, IndexError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{folder} is no complete checkpoint of a DeepSpeed pipeline ({type(error).__name__}: {error}); name a "
            "folder and tag that save_checkpoint wrote"
        ) from None


def _read(folder: Path) -> WholeCheckpoint:
    ranks = _rank_files(folder)
    first = ranks[0]
    contents = {layer: load_file(path) for layer, path in layer_files(folder).items()}
    # Of a run with shards, the shapes of its parameters are beside them.
    if first["optimizer"] is None and first.get("param_shapes") is None:
        layers = name_layers(folder, contents, [], set(first.get("buffer_names", ())))
        return weights_only(layers.parameters, layers.buffers, of_model=False)
    buffers = {name for rank in ranks for name in rank["buffer_names"]}
    first_shards = (folder / shard_file(rank, 0, bf16) for rank in range(len(ranks)) for bf16 in (False, True))
    if any(path.is_file() for path in first_shards):
        owned = [_read_shards(folder, rank, first["dp_world_size"]) for rank in range(len(ranks))]
    else:
        owned = _read_whole_optimizers(folder, ranks, contents, buffers)
    layers = name_layers(folder, contents, [state.masters for state in owned], buffers)
    options, group_of, scalars = _merge_groups(folder, [state.groups for state in owned])
    kind = _optimizer_class(options[0], first.get("ds_config", {}))
    if kind in ("Adam", "AdamW"):
        # This option belongs to DeepSpeed's FusedAdam. A block replaces that by torch's class, which always corrects.
        for group in options:
            group.pop("bias_correction", None)
    scheduler = first["lr_scheduler"]
    parameters = {
        name: _first(owned, name).reshape(tensor.shape) if name in group_of else tensor
        for name, tensor in layers.parameters.items()
    }
    state = state_of(
        {"deepspeed": first["ds_version"]},
        _layout(first, layers, group_of),
        {"tied": layers.tied, "extra_states": layers.extra_states},
        {name: {"shape": list(tensor.shape), "group": group_of.get(name)} for name, tensor in parameters.items()},
        optimizer={"class": kind, "groups": options, "scalars": scalars},
        lr_scheduler=scheduler and {"class": None, "state": scheduler},
        loss_scaler=owned[0].loss_scaler,
    )
    # Stock DeepSpeed saves neither random states nor the position in the data. The run goes on as stock would.
    state["counters"] |= {name: first[name] for name in ("global_steps", "global_samples", "skipped_steps")}
    client_state = {key: value for key, value in first.items() if key not in KEYS}
    return WholeCheckpoint(parameters, layers.buffers, _moments(owned, parameters), state, client_state)


def _rank_files(folder: Path) -> list[dict[str, Any]]:
    """Returns the content of every pipeline rank's file. Raises CheckpointError if this reader does not support it."""
    if any(folder.glob(f"zero_pp_rank_*_{rank_file(0)}")):
        raise CheckpointError(f"{folder} is of stage 3, {_OF_NO_PIPELINE}")
    first = load_file(folder / rank_file(0))
    if first["module"] is not None:
        raise CheckpointError(f"{folder / rank_file(0)} holds a whole model, {_OF_NO_PIPELINE}")
    refuse_tensor_ranks(folder, first.get("checkpoint_parallel_dimensions", _ALONE)["tp_degree"])
    if first.get("ds_config", {}).get("zero_optimization", {}).get("round_robin_gradients"):
        raise CheckpointError(
            f"{folder} was written with zero_optimization.round_robin_gradients, where DeepSpeed does not say what a "
            "shard holds; save it without that option"
        )
    return [first, *(load_file(folder / rank_file(rank)) for rank in range(1, first["mp_world_size"]))]


def _read_shards(folder: Path, pipeline_rank: int, data_ranks: int) -> OwnedState:
    """Joins the optimizer state of the data-parallel ranks of ``pipeline_rank``."""
    bf16 = (folder / shard_file(pipeline_rank, 0, True)).is_file()
    shards = []
    for data_rank in range(data_ranks):
        path = folder / shard_file(pipeline_rank, data_rank, bf16)
        shards.append(load_file(path)["optimizer_state_dict"])
        if isinstance(shards[-1]["base_optimizer_state"], list):
            raise CheckpointError(
                f"{path} was written with zero_optimization.elastic_checkpoint, which does not hold the optimizer's "
                "groups; save it without that option"
            )
    pieces: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    groups = []
    for index, group in enumerate(shards[0]["base_optimizer_state"]["param_groups"]):
        names: dict[str, None] = {}
        scalars: dict[str, Any] = {}
        for shard in shards:
            state = shard["base_optimizer_state"]["state"].get(index, {})
            flat = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim() == 1}
            scalars = {key: value for key, value in state.items() if key not in flat}
            flat["master"] = shard["single_partition_of_fp32_groups"][index].detach()
            for name, place in shard["param_slice_mappings"][index].items():
                names[name] = None
                for key, tensor in flat.items():
                    pieces[key, name].append(tensor[place.start : place.start + place.numel])
        groups.append(_group(list(names), group, scalars))
    joined: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for (key, name), parts in pieces.items():
        joined[key][name] = torch.cat(parts)
    scaler = shards[0].get("loss_scaler")
    scaling = scaler_state(scaler) if isinstance(scaler, LossScalerBase) else None
    return OwnedState(groups, joined.pop("master", {}), dict(joined), scaling)


def _group(names: list[str], saved: dict[str, Any], scalars: dict[str, Any]) -> Group:
    options = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
    # DeepSpeed's FusedAdam counts steps in its options. torch's Adam has the same state, but counts beside its moments.
    step = options.pop("step", None)
    return Group(names, options, scalars if step is None else {"step": step, **scalars})


def _read_whole_optimizers(
    folder: Path, ranks: list[dict[str, Any]], contents: dict[int, dict[str, Tensor]], buffers: set[str]
) -> list[OwnedState]:
    """Returns the optimizer state of every pipeline rank at stage 0. There the optimizers number their parameters in
    the order of the module."""
    parameters = (
        (f"{layer}.{key}", tensor)
        for layer, content in contents.items()
        for key, tensor in content.items()
        if f"{layer}.{key}" not in buffers and isinstance(tensor, Tensor)
    )
    owned = [_whole_optimizer(folder, rank, saved["optimizer"], parameters) for rank, saved in enumerate(ranks)]
    left = next(parameters, None)
    if left is not None:
        raise CheckpointError(_ambiguous(folder, f"{left[0]} is in none"))
    return owned


def _whole_optimizer(
    folder: Path, rank: int, saved: dict[str, Any], parameters: Iterator[tuple[str, Tensor]]
) -> OwnedState:
    if "param_groups" not in saved:
        raise CheckpointError(
            f"{folder / rank_file(rank)} holds the optimizer of fp16 at zero_optimization.stage 0, which is not "
            "supported; save it at stage 1"
        )
    waiting = [list(group["params"]) for group in saved["param_groups"]]
    names: list[list[str]] = [[] for _ in waiting]
    masters: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = defaultdict(dict)
    scalars: list[dict[str, Any]] = [{} for _ in waiting]
    while any(waiting):
        name, tensor = next(parameters, ("", torch.empty(0)))
        fitting = [
            index
            for index, numbers in enumerate(waiting)
            if numbers and _shapes(saved["state"].get(numbers[0], {})) <= {tensor.shape}
        ]
        if len(fitting) != 1:
            raise CheckpointError(_ambiguous(folder, f"{name or 'a parameter'} fits {len(fitting) or 'none'}"))
        (group,) = fitting
        state = saved["state"].get(waiting[group].pop(0), {})
        names[group].append(name)
        masters[name] = tensor.flatten()
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                moments[key][name] = value.flatten()
            elif scalars[group].setdefault(key, value) != value:
                raise CheckpointError(
                    f"{folder / rank_file(rank)} has parameters of one group with different {key}; save it at "
                    "zero_optimization.stage 1"
                )
    groups = [_group(*parts) for parts in zip(names, saved["param_groups"], scalars, strict=True)]
    return OwnedState(groups, masters, dict(moments), None)


def _shapes(state: dict[str, Any]) -> set[torch.Size]:
    return {value.shape for value in state.values() if isinstance(value, Tensor) and value.dim() > 0}


def _ambiguous(folder: Path, what: str) -> str:
    return (
        f"{folder} was written at zero_optimization.stage 0, where DeepSpeed does not name what its optimizer holds, "
        f"and {what} of its parameter groups; save it at stage 1, where even tied and frozen parameters have names"
    )


def _merge_groups(
    folder: Path, by_rank: list[list[Group]]
) -> tuple[list[dict[str, Any]], dict[str, int], list[dict[str, Any]]]:
    """Returns the options of all groups, the group of every parameter, and the scalars of all groups.

    A rank that lacks a group has the others in the same order. Their options tell them apart.
    """
    complete = max(by_rank, key=len)
    options = [group.options for group in complete]
    group_of: dict[str, int] = {}
    scalars: list[dict[str, Any]] = [group.scalars for group in complete]
    for groups in by_rank:
        index = -1
        for group in groups:
            places = [place for place, known in enumerate(options) if known == group.options]
            if len(groups) == len(options) and index + 1 in places:
                index += 1
            elif len(places) == 1 and places[0] > index:
                index = places[0]
            else:
                raise CheckpointError(
                    f"{folder} has pipeline ranks with different parameter groups that cannot be told apart; save it "
                    "from a run where every pipeline rank has a parameter of each group"
                )
            group_of.update(dict.fromkeys(group.names, index))
    return options, group_of, scalars


def _first(owned: list[OwnedState], name: str) -> Tensor:
    return next(state.masters[name] for state in owned if name in state.masters)


def _moments(owned: list[OwnedState], parameters: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    moments: dict[str, dict[str, Tensor]] = {}
    for key in dict.fromkeys(chain.from_iterable(state.moments for state in owned)):
        found = {name: tensor for state in reversed(owned) for name, tensor in state.moments.get(key, {}).items()}
        moments[key] = {name: found[name].reshape(tensor.shape) for name, tensor in parameters.items() if name in found}
    return moments


def _layout(rank: dict[str, Any], layers: StockLayers, group_of: dict[str, int]) -> dict[str, Any]:
    config = rank.get("ds_config", {})
    trained = next(layers.parameters[name].dtype for name in group_of)
    return {
        "pipeline_ranks": rank["mp_world_size"],
        "data_ranks": rank["dp_world_size"],
        "zero_stage": int(rank["optimizer"] is None),
        "chunk_bounds": layers.bounds,
        "placement": list(range(rank["mp_world_size"])),
        "schedule": "1f1b",
        "data_type": name_of_dtype(trained),
        "micro_batch_size": config.get("train_micro_batch_size_per_gpu"),
    }


def _optimizer_class(options: dict[str, Any], config: dict[str, Any]) -> str | None:
    """Returns the name of the optimizer's class, which DeepSpeed does not save; None if it stays unknown.

    If ``config`` has an optimizer, a block's choice for it counts. Otherwise it is the class that has these options.
    """
    named = config.get("optimizer")
    refuse_whole_tensors(named and named["type"], options)
    if named is not None:
        name = named["type"].lower() if named["type"].lower() in JSON_NAMES else named["type"]
        without_kernels = Kernels(frozenset(), None)
        return choose_optimizer(name, named.get("params", {}), torch.device("cpu"), without_kernels).kind.__name__
    shown = {key: value for key, value in options.items() if key != "initial_lr"}
    for kind in ELEMENTWISE:
        defaults = kind([torch.zeros(1)], lr=1.0).defaults  # type: ignore[call-arg]
        if defaults.keys() == shown.keys() and (
            kind not in (torch.optim.Adam, torch.optim.AdamW)
            or defaults["decoupled_weight_decay"] == shown["decoupled_weight_decay"]
        ):
            return kind.__name__
    return "FusedAdam" if shown.keys() == _OPTIONS_OF_FUSED_ADAM else None
