"""Writes a checkpoint that stock DeepSpeed's pipeline engine loads, in one process, for any of its layouts."""

import math
import re
from collections import defaultdict
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.utils import partition_balanced, partition_uniform
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from ds_lgamp.checkpoint.files import CheckpointError, save_into, sync, whole_folder
from ds_lgamp.checkpoint.folder import write_latest
from ds_lgamp.checkpoint.whole import WholeCheckpoint
from ds_lgamp.integrations.deepspeed.checkpoint.stock_files import (
    KEYS,
    TIED,
    layer_file,
    rank_file,
    refuse_whole_tensors,
    shard_file,
    tied_keys,
)
from ds_lgamp.integrations.deepspeed.model.module import layer_prefix

_ALIGNMENT = 2
"""DeepSpeed pads a group's flat tensor to a multiple of this many elements per data-parallel rank."""


class FlatGroup(NamedTuple):
    """A parameter group on one pipeline rank. Each tensor joins all parameters of the group in order."""

    sizes: dict[str, int]
    """Number of elements by parameter."""
    master: Tensor
    moments: dict[str, Tensor]
    scalars: dict[str, Any]


def write_stock(whole: WholeCheckpoint, folder: Path, pipeline_ranks: int, data_ranks: int, stage: int = 1) -> None:
    """Writes ``folder`` (DIR/TAG), which must not exist, and DIR/latest. Layers are cut as DeepSpeed does it with the
    module's ``partition_method``.

    The optimizer of the run that loads it must list the parameters of each group in the order of
    ``module.parameters()``. The configuration of that run must have neither ``round_robin_gradients`` nor
    ``elastic_checkpoint``.

    Args:
        pipeline_ranks, data_ranks: the layout of the run that will load it.
        stage: the ZeRO stage of that run: 1, or 0 for float32 weights.

    Raises CheckpointError if ``folder`` exists, or if the checkpoint has no optimizer state or does not say enough for
    this layout.
    """
    _check(whole, folder, pipeline_ranks, data_ranks, stage)
    bounds = _bounds(whole.state, pipeline_ranks)
    with whole_folder(folder) as partial:
        for layer in range(bounds[-1]):
            _save(partial / layer_file(layer), _layer_content(whole, layer))
        bf16 = whole.state["layout"]["data_type"] == "bfloat16"
        for rank, layers in enumerate(pairwise(bounds)):
            modules = _modules(whole.state, range(*layers))
            groups = _groups(whole, modules)
            content = _rank_content(whole, modules, groups, pipeline_ranks, data_ranks)
            if stage == 0:
                content["optimizer"] = _whole_optimizer(whole, groups)
            else:
                shards = [partial / shard_file(rank, number, bf16) for number in range(data_ranks)]
                _write_shards(whole, groups, shards)
            _save(partial / rank_file(rank), content)
    write_latest(folder.parent, folder.name)


def _save(path: Path, content: Any) -> None:
    with open(path, "wb") as file:
        save_into(file, content)
        sync(file)


def _check(whole: WholeCheckpoint, folder: Path, pipeline_ranks: int, data_ranks: int, stage: int) -> None:
    if folder.exists():
        raise CheckpointError(f"{folder} exists; remove it or name another folder")
    if whole.state["optimizer"] is None:
        raise CheckpointError("the checkpoint has no optimizer state, which DeepSpeed needs; take one that a run saved")
    if whole.state["layers"].get("names_of_model", False):
        raise CheckpointError(
            "the checkpoint is of a plain model, of which stock DeepSpeed loads no layers; export its "
            "weights without --format, which the model itself loads"
        )
    refuse_whole_tensors(whole.state["optimizer"]["class"], {})
    of_parameters = whole.state["optimizer"].get("of_parameters", {})
    if of_parameters:
        raise CheckpointError(
            f"parameters such as {min(of_parameters)} were frozen for a time and count their steps by themselves, "
            "which DeepSpeed's files cannot say; export the weights without --format, or a checkpoint from before"
        )
    if min(pipeline_ranks, data_ranks) < 1:
        raise CheckpointError(f"the layout is {pipeline_ranks} pipeline x {data_ranks} data ranks; use at least 1 x 1")
    data_type = whole.state["layout"]["data_type"]
    if stage not in (0, 1):
        raise CheckpointError(f"the stage is {stage}, which DeepSpeed's pipeline does not have; use 0 or 1")
    if stage == 0 and data_type != "float32":
        raise CheckpointError(f"the stage is 0 and the weights are {data_type}; use stage 1 for that type")
    taken = sorted(KEYS & whole.client_state.keys())
    if taken:
        raise CheckpointError(f"client_state has {', '.join(taken)}, which DeepSpeed's files use themselves; rename it")


def _bounds(state: dict[str, Any], pipeline_ranks: int) -> list[int]:
    """Returns the first layer of every pipeline rank, then the number of layers."""
    layers, tied = state["layers"], tied_keys(state["parameters"])
    # Only a run with a block describes all layers. DeepSpeed's own files suffice only for the layout that wrote them.
    known = layers["types"] is not None
    same = not known and pipeline_ranks == state["layout"]["pipeline_ranks"]
    fix = "load it in a run with a ds_lgamp block and save it there"
    if any(key not in layers["tied"] for key in tied) or (tied and not known and not same):
        raise CheckpointError(
            f"the checkpoint does not say which layers use the tied modules {', '.join(tied)}, so what "
            f"{pipeline_ranks} pipeline ranks hold is unknown; {fix}"
        )
    if known:
        return [int(bound) for bound in _stock_bounds(state, pipeline_ranks)]
    if same:
        return state["layout"]["chunk_bounds"]
    raise CheckpointError(
        f"the checkpoint has {state['layout']['pipeline_ranks']} stock pipeline ranks and does not say how "
        f"{pipeline_ranks} share the layers; {fix}"
    )


def _stock_bounds(state: dict[str, Any], pipeline_ranks: int) -> list[int]:
    """Returns the bounds at which DeepSpeed's PipelineModule cuts."""
    types, method = state["layers"]["types"], state["layers"]["partition_method"].lower()
    if method == "uniform":
        return partition_uniform(len(types), pipeline_ranks)
    if method.startswith("type:"):
        chosen = re.compile(method.split(":")[1], re.IGNORECASE)
        return partition_balanced([int(chosen.search(kind) is not None) for kind in types], pipeline_ranks)
    sizes: dict[str, int] = defaultdict(int)
    for name, described in state["parameters"].items():
        if described["group"] is not None:
            sizes[layer_prefix(name)] += math.prod(described["shape"])
    return partition_balanced([sizes[_module_of(state, layer)] for layer in range(len(types))], pipeline_ranks)


def _module_of(state: dict[str, Any], layer: int) -> str:
    """Returns the prefix of the names of ``layer``."""
    return next((f"{TIED}.{key}" for key, users in state["layers"]["tied"].items() if layer in users), str(layer))


def _modules(state: dict[str, Any], layers: range) -> list[str]:
    """Returns the prefixes of the names of ``layers`` in the order of PipelineModule: tied modules come first."""
    modules = list(dict.fromkeys(_module_of(state, layer) for layer in layers))
    return sorted(modules, key=lambda module: not module.startswith(TIED))


def _layer_content(whole: WholeCheckpoint, layer: int) -> dict[str, Tensor | None]:
    module = _module_of(whole.state, layer)
    data_type = getattr(torch, whole.state["layout"]["data_type"])
    extra_states = (name for name in whole.state["layers"]["extra_states"] if layer_prefix(name) == module)
    content: dict[str, Tensor | None] = {name.removeprefix(f"{module}."): None for name in extra_states}
    for name, tensor in (whole.parameters | whole.buffers).items():
        if layer_prefix(name) == module:
            trained = name in whole.parameters and whole.state["parameters"][name]["group"] is not None
            content[name.removeprefix(f"{module}.")] = tensor.to(data_type) if trained else tensor
    return content


def _groups(whole: WholeCheckpoint, modules: list[str]) -> list[tuple[int, list[str]]]:
    """Returns the number of every optimizer group that has parameters in ``modules``, and the names of these
    parameters in DeepSpeed's order."""
    described = whole.state["parameters"]
    names = [name for module in modules for name in described if layer_prefix(name) == module]
    groups = [
        (index, [name for name in names if described[name]["group"] == index])
        for index in range(len(whole.state["optimizer"]["groups"]))
    ]
    return [(index, members) for index, members in groups if members]


def _rank_content(
    whole: WholeCheckpoint,
    modules: list[str],
    groups: list[tuple[int, list[str]]],
    pipeline_ranks: int,
    data_ranks: int,
) -> dict[str, Any]:
    counters, scheduler = whole.state["counters"], whole.state["lr_scheduler"]
    return {
        **whole.client_state,
        **dict.fromkeys(KEYS - {"ds_config", "universal_checkpoint_info"}),
        "buffer_names": [name for name in whole.buffers if layer_prefix(name) in modules],
        "param_shapes": [{name: whole.parameters[name].shape for name in names} for _, names in groups],
        "shared_params": {},
        "lr_scheduler": scheduler and scheduler["state"],
        "skipped_steps": counters["skipped_steps"],
        "global_steps": counters["global_steps"],
        "global_samples": counters["global_samples"],
        "dp_world_size": data_ranks,
        "mp_world_size": pipeline_ranks,
        "checkpoint_parallel_dimensions": {"pp_degree": pipeline_ranks, "tp_degree": 1},
        "ds_version": deepspeed.__version__,
    }


def _options(whole: WholeCheckpoint, group: int, numbers: list[int]) -> dict[str, Any]:
    optimizer = whole.state["optimizer"]
    options = {**optimizer["groups"][group], "params": numbers}
    if optimizer["class"] in ("Adam", "AdamW") and "step" in optimizer["scalars"][group]:
        # DeepSpeed makes Adam and AdamW of its configuration a FusedAdam, which reads these options here.
        options |= {"step": int(optimizer["scalars"][group]["step"]), "bias_correction": True}
    return options


def _moments(whole: WholeCheckpoint, names: list[str]) -> dict[str, list[Tensor]]:
    """Returns the optimizer state of ``names`` as lists of tensors, by the key of the state. Raises CheckpointError if
    only some of the parameters have a key."""
    moments = {}
    for key, by_name in whole.moments.items():
        held = [by_name[name] for name in names if name in by_name]
        if held and len(held) < len(names):
            lacking = next(name for name in names if name not in by_name)
            raise CheckpointError(f"{lacking} has no {key}, but others of its group have; train it before saving")
        if held:
            moments[key] = held
    return moments


def _whole_optimizer(whole: WholeCheckpoint, groups: list[tuple[int, list[str]]]) -> dict[str, Any]:
    """Returns the optimizer for stage 0: the state_dict of torch's optimizer, which numbers parameters."""
    state: dict[int, dict[str, Any]] = {}
    options = []
    for group, names in groups:
        first = len(state)
        moments, scalars = _moments(whole, names), whole.state["optimizer"]["scalars"][group]
        for position in range(len(names)):
            own = {key: tensors[position] for key, tensors in moments.items()}
            # Copied: an optimizer counts steps in the loaded tensors, and tensors shared here stay shared in the file.
            state[first + position] = {**deepcopy(scalars), **own}
        options.append(_options(whole, group, list(range(first, first + len(names)))))
    # As in torch, parameters without state are absent.
    return {"state": {number: own for number, own in state.items() if own}, "param_groups": options}


def _write_shards(whole: WholeCheckpoint, groups: list[tuple[int, list[str]]], paths: list[Path]) -> None:
    """Writes the files for stage 1, one for every data-parallel rank."""
    flat = [_flatten(whole, group, names) for group, names in groups]
    options = [_options(whole, group, [number]) for number, (group, _) in enumerate(groups)]
    scaling = _loss_scaler(whole.state["loss_scaler"])
    for data_rank, path in enumerate(paths):
        shard = _shard(flat, data_rank, len(paths)) | scaling
        shard["base_optimizer_state"]["param_groups"] = options
        _save(path, {"optimizer_state_dict": shard, "ds_version": deepspeed.__version__})


def _flatten(whole: WholeCheckpoint, group: int, names: list[str]) -> FlatGroup:
    masters = [whole.parameters[name].float() for name in names]
    return FlatGroup(
        dict(zip(names, (tensor.numel() for tensor in masters), strict=True)),
        _flat(masters),
        {key: _flat(tensors) for key, tensors in _moments(whole, names).items()},
        whole.state["optimizer"]["scalars"][group],
    )


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _shard(groups: list[FlatGroup], data_rank: int, data_ranks: int) -> dict[str, Any]:
    """Returns the state of ``data_rank`` at stage 1: its part of every group, without the groups' options."""
    shards = [(group, _range(group.master.numel(), data_rank, data_ranks)) for group in groups]
    return {
        "base_optimizer_state": {
            "state": {
                number: {**group.scalars, **{key: _cut(tensor, shard) for key, tensor in group.moments.items()}}
                for number, (group, shard) in enumerate(shards)
                if group.scalars or group.moments
            },
        },
        "single_partition_of_fp32_groups": [_cut(group.master, shard) for group, shard in shards],
        "zero_stage": ZeroStageEnum.optimizer_states,
        "group_paddings": [len(shard) - len(_inside(shard, 0, group.master.numel())) for group, shard in shards],
        "partition_count": [data_ranks] * len(groups),
        "ds_version": deepspeed.__version__,
        "param_slice_mappings": [_places(group.sizes, shard) for group, shard in shards],
    }


def _range(elements: int, data_rank: int, data_ranks: int) -> range:
    """Returns the range of a group's flat, padded tensor that ``data_rank`` holds."""
    length = -(-elements // (_ALIGNMENT * data_ranks)) * _ALIGNMENT
    return range(data_rank * length, (data_rank + 1) * length)


def _inside(shard: range, start: int, stop: int) -> range:
    """Returns the elements of ``shard`` from ``start`` to ``stop``."""
    return range(max(shard.start, start), min(shard.stop, stop))


def _cut(flat: Tensor, shard: range) -> Tensor:
    part = flat.new_zeros(len(shard))
    held = flat[shard.start : shard.stop]
    part[: held.numel()] = held
    return part


def _places(sizes: dict[str, int], shard: range) -> dict[str, fragment_address]:
    """Returns the position inside ``shard`` of every parameter that it holds, by name."""
    places, start = {}, 0
    for name, size in sizes.items():
        held = _inside(shard, start, start + size)
        if held:
            places[name] = fragment_address(numel=len(held), start=held.start - shard.start)
        start += size
    return places


def _loss_scaler(state: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the entries for fp16 with a dynamic loss scale; none if ``state`` is None. DeepSpeed goes on with the
    object that it loads, settings included. Without one, its configuration counts."""
    if state is None:
        return {}
    scaler = DynamicLossScaler.__new__(DynamicLossScaler)
    vars(scaler).update(state, dtype=torch.float16)
    return {"loss_scaler": scaler, "dynamic_loss_scale": True}
