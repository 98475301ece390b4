"""Hierarchical shards, offloading, the home of frozen weights, as ds_config.json asks for them."""

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.pipe.module import PipelineModule

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.cost.offload import OnDisk
from ds_lgamp.integrations.deepspeed.config.optimizer_choice import (
    ON_ACCELERATOR,
    ON_CPU,
    check_updates_alone,
    known_kind,
)
from ds_lgamp.integrations.deepspeed.config.precision import parameter_dtype
from ds_lgamp.integrations.deepspeed.model.module import Layout, Tensors, layer_prefix, over_data, prefix_of
from ds_lgamp.integrations.program_spec import HPZ, MICS, shard_groups
from ds_lgamp.optimizers.rounding import InEightBits
from ds_lgamp.partition.agreement import everyone, raise_everywhere
from ds_lgamp.partition.memory import common_copy
from ds_lgamp.runtime.node import memory_of, node_name
from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.orders import lowest_chunks
from ds_lgamp.schedule.placement import Placement
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import Hierarchy, Offload, ProgramSpec
from ds_lgamp.watch.this_rank import this_rank

Home = Literal["device", "host", "none"]
"""Where frozen weights lie between uses, as ``keep_frozen`` names it."""
FOR_FROZEN = 0.25
"""The part of a memory that ``keep_frozen`` "auto" gives to frozen weights. The rest is for what it does not know, such
as activations."""


def hierarchy_of(config: Mapping[str, Any], zero_stage: int, module: PipelineModule) -> Hierarchy | None:
    """Returns the hierarchical shards that ``config`` asks for; None if nothing asks for them, or if the group is all
    ranks.

    Below stage 3 the keys mean nothing, as in DeepSpeed. Collective over all ranks; raises ConfigError on all of them
    if the group does not fit the data-parallel ranks or their nodes.
    """
    asked = shard_groups(config)
    if zero_stage < 3 or not asked:
        return None
    if len(asked) > 1:
        raise ConfigError(
            f"zero_optimization.{HPZ} is {asked[HPZ]} and zero_optimization.{MICS} is {asked[MICS]}, but both say "
            "how shards form groups; keep one of them"
        )
    ((name, size),) = asked.items()
    ranks = module.topology().get_dim("data")
    if ranks % size:
        fitting = ", ".join(str(number) for number in range(1, ranks + 1) if ranks % number == 0)
        raise ConfigError(
            f"zero_optimization.{name} is {size}, which does not divide {ranks} data-parallel ranks; use one of "
            f"{fitting}"
        )
    if size == ranks:
        return None
    raise_everywhere(next(_complaints_about_nodes(name, size, over_data(module, _place_of_rank())), None), ConfigError)
    return Hierarchy(size, replicated=name == MICS)


def _place_of_rank() -> str:
    """Returns where this rank is, in words: its island if there is a cluster file, else its node."""
    assignment = this_rank.assignment
    return f"node {node_name()}" if assignment is None else f"island {assignment.slots[dist.get_rank()].island}"


def _complaints_about_nodes(name: str, size: int, places: Sequence[str]) -> Iterator[str]:
    """Yields a sentence for every group of ``size`` neighbours that are not all in one place."""
    for first in range(0, len(places), size):
        other = next((rank for rank in range(first, first + size) if places[rank] != places[first]), None)
        if other is not None:
            yield (
                f"zero_optimization.{name} is {size}, but data-parallel ranks {first} and {other} of one group are in "
                f"two places, {places[first]} and {places[other]}; use a divisor of the "
                f"{places.count(places[first])} ranks of {places[first]}"
            )


_RATIO = "zero_optimization.offload_optimizer.ratio"
_OPTIMIZER, _PARAMETERS = "zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device"


def offload_of(given: Mapping[str, Any], config: Any) -> Offload | None:
    """Returns what a DeepSpeedConfig leaves to the host; None if everything stays on the device.

    Raises ConfigError for stages and shards that cannot be offloaded, and for parameters on the host without the
    optimizer.

    Args:
        given: ds_config.json, as the user wrote it.
    """
    optimizer, parameters = (_device(config, key) != "none" for key in (_OPTIMIZER, _PARAMETERS))
    stage = int(config.zero_config.stage)
    if parameters and stage < 3:
        raise ConfigError(
            f"{_words_of(config, _PARAMETERS)}, but zero_optimization.stage is {stage}; use stage 3, or remove it"
        )
    if parameters and not optimizer:
        raise ConfigError(
            f"{_words_of(config, _PARAMETERS)}, but {_OPTIMIZER} is 'none'; set that to 'cpu' or 'nvme' too, or "
            "remove both"
        )
    if not optimizer:
        return None
    if stage == 0:
        raise ConfigError(
            f"{_words_of(config, _OPTIMIZER)}, but zero_optimization.stage is 0; use stage 1, 2 or 3, or remove it"
        )
    shards = shard_groups(given)
    if stage == 3 and shards:
        name, ranks = next(iter(shards.items()))
        raise ConfigError(
            f"{_words_of(config, _OPTIMIZER)} and zero_optimization.{name} is {ranks}, but shards of nodes stay on the "
            "device; remove one of them"
        )
    return Offload(parameters)


def home_of_frozen(
    settings: LgampConfig, config: Any, layout: Layout, module: PipelineModule, tensors: Tensors
) -> Home:
    """Returns where frozen weights, among the ``tensors`` of all pipeline ranks, lie between uses. Collective over
    all ranks; raises ConfigError on all of them if ``keep_frozen`` means nothing beside a DeepSpeedConfig, contradicts
    it, or asks for more memory than there is."""
    asked, stage, data_ranks = settings.keep_frozen, int(config.zero_config.stage), module.topology().get_dim("data")
    given, offloads = f"{BLOCK}.keep_frozen is '{asked}'", _device(config, _PARAMETERS) != "none"
    if asked == "none":
        return asked
    if asked == "auto":
        if stage < 3 or offloads or data_ranks == 1:
            return "none"
    elif stage < 3:
        raise ConfigError(
            f"{given}, but zero_optimization.stage is {stage}, where every rank has all weights of its chunks anyway; "
            "use stage 3, or remove keep_frozen"
        )
    elif offloads:
        raise ConfigError(
            f"{given}, but {_words_of(config, _PARAMETERS)}, which says where weights lie that do not train, too; "
            "remove one of them"
        )
    chunks = range(len(layout.placement))
    weights = _most_bytes(layout, module, tensors, chunks, True, parameter_dtype(config))
    if not weights:
        return "none"
    memory = _memory_of_a_rank()
    if asked != "device":
        memory["host"] *= _ranks_with_one_home(module)
    if asked == "auto":
        homes: Iterator[Home] = (home for home in memory if weights <= FOR_FROZEN * memory[home])
        return next(homes, "none")
    if weights > memory[asked]:
        raise ConfigError(
            f"{given}, but frozen weights take {weights / 1e9:.3g} GB on a rank, and the {asked} has "
            f"{memory[asked] / 1e9:.3g} GB for each; use 'none'"
        )
    return asked


def regathers_from_host(settings: LgampConfig, zero_stage: int, hierarchy: Hierarchy | None, data_ranks: int) -> bool:
    """Whether gathered weights wait on the host. Raises ConfigError if ``regather`` means nothing here."""
    if settings.regather != "host":
        return False
    given = f"{BLOCK}.regather is 'host', but"
    if zero_stage < 3:
        raise ConfigError(
            f"{given} zero_optimization.stage is {zero_stage}, which gathers no chunk twice in a step; use stage 3, or "
            "remove regather"
        )
    if hierarchy is not None:
        key = MICS if hierarchy.replicated else HPZ
        raise ConfigError(
            f"{given} zero_optimization.{key} is {hierarchy.node_ranks}, with which gathers stay inside a node; remove "
            "one of them"
        )
    return data_ranks > 1


def refuse_large_copies(
    config: Any, layout: Layout, module: PipelineModule, tensors: Tensors, spec: ProgramSpec, frozen: Home
) -> None:
    """Raises ConfigError on all ranks if the host has no memory for the weights that ``regather`` keeps there.
    Collective over all ranks.

    Args:
        tensors: those of all pipeline ranks.
        frozen: where frozen weights lie.
    """
    again = {action.chunk for actions in build_program(spec) for action in actions if action.kind is Kind.STORE_WEIGHTS}
    kinds = (False,) if frozen != "none" else (False, True)
    weights = sum(_most_bytes(layout, module, tensors, again, kind, parameter_dtype(config)) for kind in kinds)
    memory = _memory_of_a_rank()["host"]
    if weights > memory:
        raise ConfigError(
            f"{BLOCK}.regather is 'host', but the weights of a rank that a step gathers again take {weights / 1e9:.3g} "
            f"GB, and the host has {memory / 1e9:.3g} GB for each rank; use 'network', or more pipeline ranks"
        )


def _most_bytes(
    layout: Layout,
    module: PipelineModule,
    tensors: Tensors,
    chunks: Container[int],
    frozen: bool,
    data_type: torch.dtype,
) -> int:
    """Returns the bytes of the weights, frozen ones or those that train, that ``chunks`` have of the pipeline rank with
    most of them, those that are not packed in ``data_type``."""
    owners: dict[str, set[int]] = {}
    for layer, spec in enumerate(module._layer_specs):
        if layout.chunk_of(layer) in chunks:
            owners.setdefault(prefix_of(layer, spec), set()).add(layout.owner(layer))
    held = Counter[int]()
    for name, info in tensors.items():
        if info.is_parameter and info.requires_grad != frozen:
            each = info.dtype.itemsize if info.packed else data_type.itemsize
            held.update(dict.fromkeys(owners.get(layer_prefix(name), ()), info.shape.numel() * each))
    return max(held.values(), default=0)


def _memory_of_a_rank() -> dict[Home, float]:
    """Returns the bytes of its device and of its host that the rank with fewest has. Collective over all ranks."""
    device = torch.device(get_accelerator().current_device_name())
    seen = everyone((node_name(), memory_of(device), memory_of(torch.device("cpu"))))
    ranks = Counter(name for name, _, _ in seen)
    host = min(size / ranks[name] for name, _, size in seen)
    return {"device": host if device.type == "cpu" else min(size for _, size, _ in seen), "host": host}


def _ranks_with_one_home(module: PipelineModule) -> int:
    """Returns how many data-parallel ranks of a machine can share frozen weights on the host, on the machine with
    fewest. Collective over all ranks."""
    device = get_accelerator().current_device_name()
    common = common_copy(torch.zeros(1, device=device), module._grid.get_data_parallel_group())
    return min(everyone(1 if common is None else common[1]))


def share_of_host(config: Any, offload: Offload, placement: Placement) -> Offload:
    """Returns ``offload`` with the chunks that ``offload_optimizer.ratio`` leaves on the device.

    DeepSpeed has refused other stages than 3. Raises ConfigError if that is not possible with so few chunks.
    """
    ratio = config.zero_config.offload_optimizer.ratio
    if ratio == 1:
        return offload
    if ratio == 0:
        raise ConfigError(f"{_RATIO} is 0, which leaves nothing to the host; remove offload_optimizer")
    on_device = lowest_chunks(placement, ratio)
    if not on_device:
        most = max(placement.count(rank) for rank in placement)
        fix = f"use at most {(most - 1) / most:.3g}, or remove it" if most > 1 else f"set {BLOCK}.chunks_per_rank"
        raise ConfigError(
            f"{_RATIO} is {ratio:g}, but whole chunks stay on the device, and no rank has more than {most}; {fix}"
        )
    return offload._replace(on_device=on_device)


def on_disk_of(config: Any, settings: LgampConfig) -> OnDisk:
    """Returns what of the host's part a DeepSpeedConfig and the block leave to a disk."""
    optimizer, parameters = (_device(config, key) == "nvme" for key in (_OPTIMIZER, _PARAMETERS))
    return OnDisk(optimizer, parameters, settings.offload_activations == "nvme")


def disk_path(config: Any, settings: LgampConfig) -> tuple[str, Path] | None:
    """Returns the folder of what lies on a disk, and the key that names it; None if nothing does.

    Raises ConfigError if no key names one, or if two name different ones.
    """
    users = {
        user: _section(config, user).nvme_path for user in (_OPTIMIZER, _PARAMETERS) if _device(config, user) == "nvme"
    }
    if settings.offload_activations == "nvme" and (settings.nvme_path is not None or not users):
        users[f"{BLOCK}.offload_activations"] = None if settings.nvme_path is None else Path(settings.nvme_path)
    if not users:
        return None
    paths = {f"{user.rpartition('.')[0]}.nvme_path": path for user, path in users.items()}
    for user, key in zip(users, paths):
        if users[user] is None:
            raise ConfigError(f"{user} is 'nvme', but {key} is missing; write a folder on the disk")
    (key, path), *others = paths.items()
    for other, second in others:
        if second != path:
            raise ConfigError(f"{key} is {str(path)!r} and {other} is {str(second)!r}; write one folder for both")
    return key, path


def live_folder(config: Any, settings: LgampConfig) -> Path | None:
    """Returns the folder of live states, wherever the script's working directory will be; None without one. Raises
    ConfigError if units lie on a disk."""
    if settings.live_checkpoint is None:
        return None
    for key in (_OPTIMIZER, _PARAMETERS):
        if _device(config, key) == "nvme":
            raise ConfigError(
                f"{BLOCK}.live_checkpoint is {settings.live_checkpoint!r}, but {_words_of(config, key)}, from which a "
                "state would be read in every step; use 'cpu', or remove live_checkpoint"
            )
    return Path(settings.live_checkpoint).absolute()


def device_of_updates(config: Any) -> torch.device:
    """Returns where the optimizer of a DeepSpeedConfig updates."""
    on_host = _device(config, _OPTIMIZER) != "none"
    return torch.device("cpu" if on_host else get_accelerator().current_device_name())


def refuse_offloaded_optimizer(config: Any, optimizer: Any) -> None:
    """Raises ConfigError if the host's thread cannot update one chunk after another with this optimizer. What a
    function makes is checked when it is made.

    Args:
        optimizer: what the user passed as such; None if ds_config.json names it.
    """
    device = device_of_updates(config)
    kind = known_kind(config, optimizer, device)
    if optimizer is None and kind is FusedAdam and get_accelerator().device_name() != device.type:
        raise ConfigError(
            "optimizer.params.bias_correction is False, for which DeepSpeed's Adam needs shards on the device, but "
            f"{_words_of(config, _OPTIMIZER)}; write optimizer.type DeepSpeedCPUAdam"
        )
    if kind is not None:
        check_offloaded(config, kind)


def check_offloaded(config: Any, kind: type) -> None:
    """Raises ConfigError if an optimizer of ``kind`` is not known to give the same result in the host's thread."""
    check_updates_alone(kind, _words_of(config, _OPTIMIZER))
    for key in (_OPTIMIZER, _PARAMETERS) if issubclass(kind, InEightBits) else ():
        if _device(config, key) == "nvme":
            raise ConfigError(
                f"{_words_of(config, key)}, but the optimizer is {kind.__name__}, with state of 8 bits, which no disk "
                "holds; use 'cpu', or an optimizer of 32 bits"
            )
    if kind in ON_ACCELERATOR and get_accelerator().device_name() != "cpu":
        raise ConfigError(
            f"optimizer is {kind.__name__}, which takes shards on the device, but {_words_of(config, _OPTIMIZER)}; use "
            f"{kind.__name__.replace('Fused', 'DeepSpeedCPU')}"
        )
    ratio = config.zero_config.offload_optimizer.ratio
    if ratio < 1 and kind in ON_CPU and get_accelerator().device_name() != "cpu":
        raise ConfigError(
            f"{_RATIO} is {ratio:g}, which leaves chunks on the device, but {kind.__name__} updates on the CPU only; "
            "use AdamW, or remove the ratio"
        )


def _section(config: Any, key: str) -> Any:
    """Returns the section of a DeepSpeedConfig that has ``key``, one of the two devices; None if it is missing."""
    return getattr(config.zero_config, key.split(".")[1])


def _device(config: Any, key: str) -> str:
    section = _section(config, key)
    return "none" if section is None else section.device


def _words_of(config: Any, key: str) -> str:
    """Returns words on the value of ``key``."""
    return f"{key} is '{_device(config, key)}'"
