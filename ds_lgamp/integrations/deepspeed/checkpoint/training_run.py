"""A training run of the engine as a checkpoint, and back, at the same or another layout."""

import hashlib
import json
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import TiedLayerSpec

from ds_lgamp.checkpoint import folder as folders
from ds_lgamp.checkpoint.errors import CheckpointError, everywhere
from ds_lgamp.checkpoint.shard import FlatShard
from ds_lgamp.checkpoint.state import decode_text
from ds_lgamp.checkpoint.storage import VerifyingReader
from ds_lgamp.checkpoint.units import BUFFERS, Loading, optimizer_scalars, optimizer_tensors, weights
from ds_lgamp.checkpoint.values import UnsupportedValue, decode, encode
from ds_lgamp.integrations.deepspeed.config.precision import load_scaler_state, parameter_dtype, scaler_state
from ds_lgamp.integrations.deepspeed.model.module import (
    empty_extra_states,
    global_names,
    layer_types,
    over_pipeline,
    persistent_buffers,
)
from ds_lgamp.partition.agreement import everyone
from ds_lgamp.partition.parts import parts_of
from ds_lgamp.runtime.random_state import read_states, undisturbed
from ds_lgamp.version import __version__

if TYPE_CHECKING:
    from ds_lgamp.integrations.deepspeed.engine.engine import LgampEngine

_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
"""What a checkpoint keeps of the engine beside its parts."""
_PULLED = "_pulled_of_training_data"
"""Under this name, how many micro-batches of the engine's own data the run has taken."""


class Parts(NamedTuple):
    """What of a checkpoint a run goes on with."""

    strict: bool
    """Whether model and checkpoint must have the same parameters."""
    optimizer: bool
    scheduler: bool
    progress: bool
    """Counters, loss scale, random states and the position in the engine's own data."""


def save(engine: "LgampEngine", directory: Path, tag: str, client_state: Any, publish_latest: bool) -> None:
    """Writes the run as ``directory/tag``. Collective over all ranks; raises CheckpointError on all."""

    def collect() -> tuple[dict[str, FlatShard], dict[str, Any], tuple[Any, Any, Any]]:
        folders.check_tag(tag)
        if not isinstance(client_state, Mapping):
            raise CheckpointError(f"client_state is a {type(client_state).__name__}; pass a dictionary that holds it")
        partition, optimizer = engine.optimizer.partition, engine.optimizer.optimizer
        tensors = {**weights(partition), **optimizer_tensors(partition, optimizer)}
        text = torch.frombuffer(bytearray(_own_state(engine, client_state)), dtype=torch.uint8)
        tensors[_rank_name(*_ranks(engine))] = FlatShard(text.shape, 0, text)
        parameters = _parameters(engine) if engine.grid.data_parallel_id == 0 else {}
        return (
            tensors,
            _state(engine),
            (parameters, optimizer_scalars(partition, optimizer), empty_extra_states(engine.module)),
        )

    tensors, state, own = everywhere(collect)
    tensors |= _buffers_to_write(engine)
    ranks = everyone(own)
    parameters = {name: info for rank, _, _ in ranks for name, info in rank.items()}
    scalars = {group: values for _, rank, _ in ranks for group, values in rank.items()}
    state["parameters"] = {name: parameters[name] for name in sorted(parameters, key=_layer_of)}
    state["optimizer"]["scalars"] = [scalars.get(group, {}) for group in range(len(state["optimizer"]["groups"]))]
    state["layers"]["extra_states"] = sorted({name for _, _, rank in ranks for name in rank})
    engine.saver.save(directory, tag, tensors, state, publish_latest)


def load(engine: "LgampEngine", folder: Path, parts: Parts) -> dict[str, Any]:
    """Goes on with ``parts`` of the checkpoint ``folder``, whose client state is returned. Collective over all ranks;
    raises CheckpointError on all, and changes nothing, if the checkpoint does not fit or is damaged."""
    state, reader = everywhere(partial(_open, folder))
    sizes = {name: entry.size for name, entry in reader.tensors.items()}
    dtypes = {name: entry.properties.dtype for name, entry in reader.tensors.items()}
    parameters = everywhere(partial(_parameters, engine))
    own = {name: info for rank in over_pipeline(engine.module, parameters) for name, info in rank.items()}

    def memory() -> tuple[Loading, dict[str, FlatShard], dict[str, FlatShard]]:
        _check(engine, folder, state, parts, own, sizes)
        loading = Loading(engine.optimizer.partition, dtypes)
        loading.add_weights()
        if parts.optimizer:
            loading.add_optimizer()
        return loading, _buffers_to_read(engine, state, sizes), _text_to_read(engine, state, sizes)

    loading, buffers, text = everywhere(memory)
    engine.saver.load(reader, {**loading.targets, **buffers, **text})
    mine = everywhere(partial(_decoded, folder, text))
    if parts.scheduler and engine.lr_scheduler is not None:
        _load_scheduler(folder, engine.lr_scheduler, decode(state["lr_scheduler"]["state"]))

    def commit() -> None:
        loading.commit_weights()
        _commit_buffers(engine, buffers)
        if parts.optimizer:
            written = state["optimizer"]
            loading.commit_optimizer(engine.optimizer.optimizer, decode(written["groups"]), written["scalars"])
        if parts.progress:
            _resume(engine, state, mine["random"])

    everywhere(commit)
    engine.optimizer.partition.gather_stale()
    return mine["client_state"]


def _load_scheduler(folder: Path, scheduler: Any, state: dict[str, Any]) -> None:
    """What says that a state does not fit is the scheduler itself, half-way: on all ranks it is then as it was."""
    before = deepcopy(scheduler.state_dict())
    try:
        everywhere(partial(scheduler.load_state_dict, state))
    except CheckpointError as error:
        scheduler.load_state_dict(before)
        raise CheckpointError(
            f"{folder} has the state of another {type(scheduler).__name__} ({error}); build it as it was, or pass "
            "load_lr_scheduler_states=False"
        ) from None


def _decoded(folder: Path, text: Mapping[str, FlatShard]) -> dict[str, Any]:
    """What belongs to this rank."""
    mine: dict[str, Any] = {"random": {}, "client_state": {}}
    for name, shard in text.items():
        mine = decode_text(folder, name, shard.values)
    return mine


def latest(directory: Path) -> str | None:
    """The tag of the last checkpoint as the first rank sees it; None if there is none. Collective."""
    return everyone(everywhere(partial(folders.read_latest, directory)))[0]


def _open(folder: Path) -> tuple[dict[str, Any], VerifyingReader]:
    state = folders.read_state(folder)
    return state, folders.reader(folder, state)


def _encoded(name: str, value: Any) -> Any:
    try:
        return encode(value)
    except UnsupportedValue as error:
        raise CheckpointError(f"{name} holds {error}") from None


def _state(engine: "LgampEngine") -> dict[str, Any]:
    """What is no tensor and the same on all ranks, but for what they gather."""
    optimizer, scheduler = engine.optimizer, engine.lr_scheduler
    groups = [
        {key: _encoded(f"optimizer.param_groups: {key}", value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {
        "versions": {"ds_lgamp": __version__, "deepspeed": deepspeed.__version__, "torch": torch.__version__},
        "layout": _layout(engine),
        "layers": _layers(engine),
        "counters": {
            **{name: getattr(engine, name) for name in _COUNTERS},
            _PULLED: 0 if engine.own_data is None else engine.own_data.pulled,
        },
        "micro_offset": engine.module.micro_offset,
        "data": _epoch(engine),
        "loss_scaler": scaler_state(optimizer.loss_scaler),
        "lr_scheduler": None if scheduler is None else _scheduler_state(scheduler),
        "optimizer": {"class": optimizer.class_name, "groups": groups},
    }


def _scheduler_state(scheduler: Any) -> dict[str, Any]:
    return {"class": type(scheduler).__name__, "state": _encoded("lr_scheduler", scheduler.state_dict())}


def _layout(engine: "LgampEngine") -> dict[str, Any]:
    """Where the run was when it was written; any other may load it."""
    spec, layout = engine.program_spec, engine.module.layout
    return {
        "pipeline_ranks": spec.pipeline_ranks,
        "data_ranks": engine.dp_world_size,
        "tensor_ranks": engine.grid.get_slice_parallel_world_size(),
        "zero_stage": engine.zero_stage,
        "schedule": spec.schedule,
        "chunk_bounds": layout.bounds,
        "placement": layout.placement,
        "data_type": str(parameter_dtype(engine._config)).removeprefix("torch."),
    }


def _layers(engine: "LgampEngine") -> dict[str, Any]:
    """What parameters do not show of the layers: what they are, which use a tied module, how DeepSpeed cuts them."""
    tied: dict[str, list[int]] = {}
    for layer, spec in enumerate(engine.module._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            tied.setdefault(spec.key, []).append(layer)
    return {"types": layer_types(engine.module), "tied": tied, "partition_method": engine.partition_method}


def _own_state(engine: "LgampEngine", client_state: Mapping[Any, Any]) -> bytes:
    """What belongs to this rank, as JSON text."""
    sources = engine.random_sources
    states = {source.name: encode(state) for source, state in zip(sources, read_states(sources))}
    return json.dumps({"random": states, "client_state": _encoded("client_state", dict(client_state))}).encode()


def _rank_name(pipeline_rank: int, data_rank: int, tensor_rank: int) -> str:
    return f"ranks/{pipeline_rank}-{data_rank}" + (f"-{tensor_rank}" if tensor_rank else "")


def _parameters(engine: "LgampEngine") -> dict[str, dict[str, Any]]:
    """Shape and optimizer group of this pipeline rank's parameters, by name, in the module's order."""
    infos = {
        part.name: {"shape": list(part.whole_shape), "group": part.group}
        for unit in engine.optimizer.partition.units
        for part in parts_of(unit)
    }
    return {name: infos[name] for name, _ in global_names(engine.module) if name in infos}


def _layer_of(name: str) -> int:
    """The number of a parameter's layer; tied modules come first, as in the module."""
    first = name.split(".")[0]
    return int(first) if first.isdecimal() else -1


def _digests(engine: "LgampEngine") -> dict[str, str]:
    def digest(tensor: torch.Tensor) -> str:
        return hashlib.blake2b(tensor.detach().reshape(-1).cpu().view(torch.uint8).numpy().tobytes()).hexdigest()

    return {name: digest(tensor) for name, tensor in persistent_buffers(engine.module)}


def _ranks(engine: "LgampEngine") -> tuple[int, int, int]:
    """This rank's pipeline, data-parallel and tensor-parallel rank."""
    return engine.stage_id, engine.grid.data_parallel_id, engine.grid.get_slice_parallel_rank()


def _buffers_to_write(engine: "LgampEngine") -> dict[str, FlatShard]:
    """Each buffer as the first rank has it, and of others what differs from that, such as running means: under the
    number of the data-parallel rank, or under all three where pipeline or tensor-parallel ranks have a copy each."""
    pipeline_rank, data_rank, tensor_rank = _ranks(engine)
    own = everywhere(partial(_digests, engine))
    first: dict[str, str] = {}
    first_of_data_rank: dict[tuple[str, int], tuple[int, str]] = {}
    for rank, (of_data_rank, digests) in enumerate(everyone((data_rank, own))):
        for name, digest in digests.items():
            first.setdefault(name, digest)
            first_of_data_rank.setdefault((name, of_data_rank), (rank, digest))
    buffers = {}
    for name, tensor in persistent_buffers(engine.module):
        writer, digest = first_of_data_rank[name, data_rank]
        if writer == dist.get_rank():
            key, equals = f"{data_rank}", data_rank > 0 and own[name] == first[name]
        else:
            key, equals = f"{data_rank}-{pipeline_rank}-{tensor_rank}", own[name] == digest
        if not equals:
            buffers[f"{BUFFERS}/{key}/{name}"] = FlatShard(tensor.shape, 0, tensor.detach().reshape(-1))
    return buffers


def _buffers_to_read(
    engine: "LgampEngine", state: dict[str, Any], sizes: Mapping[str, torch.Size]
) -> dict[str, FlatShard]:
    """Memory for this rank's buffers, by name in the checkpoint: its own if there are the ranks there were, else the
    first one's."""
    here, there = _layout(engine), state["layout"]
    pipeline_rank, data_rank, tensor_rank = _ranks(engine)
    keys = ["0"]
    if all(here[kind] == there[kind] for kind in ("pipeline_ranks", "data_ranks", "tensor_ranks")):
        keys = [f"{data_rank}-{pipeline_rank}-{tensor_rank}", f"{data_rank}", "0"]
    buffers = {}
    for name, tensor in persistent_buffers(engine.module):
        written = next((key for key in keys if f"{BUFFERS}/{key}/{name}" in sizes), None)
        if written is not None:
            values = torch.empty(tensor.numel(), dtype=tensor.dtype)
            buffers[f"{BUFFERS}/{written}/{name}"] = FlatShard(tensor.shape, 0, values)
    return buffers


def _commit_buffers(engine: "LgampEngine", read: Mapping[str, FlatShard]) -> None:
    values = {key.split("/", 2)[2]: shard.values for key, shard in read.items()}
    for name, tensor in persistent_buffers(engine.module):
        if name in values:
            tensor.copy_(values[name].view(tensor.shape))


def _text_to_read(
    engine: "LgampEngine", state: dict[str, Any], sizes: Mapping[str, torch.Size]
) -> dict[str, FlatShard]:
    """Memory for what belongs to this rank. Where there are more ranks than there were, those beyond take what ranks
    had that are as far apart: what all ranks drew alike they go on drawing alike."""
    there = state["layout"]
    name = _rank_name(
        engine.stage_id % there["pipeline_ranks"],
        engine.grid.data_parallel_id % there["data_ranks"],
        engine.grid.get_slice_parallel_rank() % there["tensor_ranks"],
    )
    if name not in sizes:
        # Written by one process, for all.
        name = _rank_name(0, 0, 0)
    return {name: FlatShard(sizes[name], 0, torch.empty(sizes[name], dtype=torch.uint8))}


def _epoch(engine: "LgampEngine") -> dict[str, int] | None:
    """How many micro-batches an epoch of the engine's own data has for a data-parallel rank, and of how many samples
    one is over all of them. None if it has no data, or so few that it never has a micro-batch."""
    if engine.own_data is None or engine.own_data.micro_batches_per_epoch == 0:
        return None
    samples = engine.train_micro_batch_size_per_gpu() * engine.dp_world_size
    return {"micro_batches_per_epoch": engine.own_data.micro_batches_per_epoch, "samples": samples}


def micro_batches_here(pulled: int, there: dict[str, int], here: dict[str, int]) -> int:
    """Micro-batches that are as far into the data, in samples, as ``pulled`` where the checkpoint was written."""
    if there == here or not pulled:
        return pulled
    # At the end of an epoch, not at the beginning of the next, which draws random numbers.
    epochs, last = divmod(pulled - 1, there["micro_batches_per_epoch"])
    position = here["micro_batches_per_epoch"]
    if last + 1 < there["micro_batches_per_epoch"]:
        position = min(position, (last + 1) * there["samples"] // here["samples"])
    return epochs * here["micro_batches_per_epoch"] + position


def _check(
    engine: "LgampEngine",
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
    written = state["parameters"]
    names = own.keys() | written.keys() if parts.strict else own.keys() & written.keys()
    others = sorted(name for name in names if _shape(own, name) != _shape(written, name))
    if others:
        shown = ", ".join(f"{name} is {_shape(written, name)} there, {_shape(own, name)} here" for name in others[:3])
        raise CheckpointError(
            f"{folder} is of another model ({shown}{', ...' if len(others) > 3 else ''}); build the model as it was"
        )
    for name, tensor in persistent_buffers(engine.module):
        size = sizes.get(f"buffers/0/{name}")
        # Of no elements there is nothing to write.
        if size != tensor.shape and (size is not None or (parts.strict and tensor.numel())):
            there = "absent" if size is None else list(size)
            raise CheckpointError(
                f"{folder} is of another model (buffer {name} is {there} there, {list(tensor.shape)} here); build the "
                "model as it was"
            )
    if parts.optimizer:
        _check_optimizer(engine, folder, state, own)
    if parts.scheduler:
        _check_scheduler(folder, state["lr_scheduler"], engine.lr_scheduler)


def _check_scheduler(folder: Path, written: dict[str, Any] | None, own: Any) -> None:
    here = None if own is None else type(own).__name__
    # Stock DeepSpeed does not tell the class.
    there = None if written is None else written["class"] or here or "of unknown class"
    if here != there:
        raise CheckpointError(
            f"{folder} has learning rate scheduler {there}, this run has {here}; use the same, or pass "
            "load_lr_scheduler_states=False"
        )


def _shape(parameters: dict[str, Any], name: str) -> str:
    return str(parameters[name]["shape"]) if name in parameters else "absent"


def _check_optimizer(engine: "LgampEngine", folder: Path, state: dict[str, Any], own: dict[str, Any]) -> None:
    fix = "or pass load_optimizer_states=False"
    optimizer = state["optimizer"]
    if optimizer is None:
        raise CheckpointError(f"{folder} has weights only; pass load_module_only=True")
    complaint = engine.optimizer.complaint_about_class(optimizer["class"])
    if complaint is not None:
        raise CheckpointError(f"{folder}: {complaint}, {fix}")
    there, here = len(optimizer["groups"]), len(engine.optimizer.param_groups)
    if there != here:
        raise CheckpointError(f"{folder} has {there} parameter groups, this run {here}; build them as they were, {fix}")
    for name, entry in own.items():
        # What the checkpoint does not have, where that is allowed, begins without moments.
        group = state["parameters"].get(name, entry)["group"]
        if group != entry["group"]:
            raise CheckpointError(
                f"{folder} has {name} in parameter group {group}, this run in {entry['group']} (None: it does not "
                f"train); build the groups as they were, {fix}"
            )


def _resume(engine: "LgampEngine", state: dict[str, Any], random: dict[str, Any]) -> None:
    """Goes on where the checkpoint was written: counters, loss scale, position in the engine's own data, random
    states."""
    for name in _COUNTERS:
        setattr(engine, name, state["counters"][name])
    engine.module.micro_offset = state["micro_offset"]
    load_scaler_state(engine.optimizer.loss_scaler, state["loss_scaler"])
    here, there = _epoch(engine), state["data"]
    if engine.own_data is not None and here is not None:
        # Without own data there, nothing was taken of any.
        pulled = 0 if there is None else micro_batches_here(state["counters"][_PULLED], there, here)
        with undisturbed(engine.random_sources):
            engine.own_data.seek(pulled)
    for source in engine.random_sources:
        # On another kind of device, its generators go on from where they are.
        if source.name in random:
            source.write(random[source.name])
