"""Partitions the parameters of a pipeline rank: assigns each to its chunk or tied module and to an optimizer group."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import TiedLayerSpec
from deepspeed.utils.logging import logger

from ds_lgamp.config import ConfigError, LgampConfig
from ds_lgamp.integrations.deepspeed.config.precision import accumulation_dtype, has_master_copies
from ds_lgamp.integrations.deepspeed.config.run_checks import refuse_differing_freezing, refuse_irreproducible
from ds_lgamp.integrations.deepspeed.config.zero import Home, disk_path, on_disk_of
from ds_lgamp.integrations.deepspeed.engine.optimizer import PartitionedOptimizer
from ds_lgamp.integrations.deepspeed.model.experts import expert_group, place_among_experts, whole_names
from ds_lgamp.integrations.deepspeed.model.layer_moves import DeferredLayers
from ds_lgamp.integrations.deepspeed.model.module import PlacedModule, announced_tensors, global_names, shown_name
from ds_lgamp.integrations.deepspeed.model.recomputation import layer_sources
from ds_lgamp.integrations.deepspeed.model.shared_tensors import Sharing, sharing_of, tensor_group
from ds_lgamp.optimizers.rounding import InEightBits
from ds_lgamp.partition.agreement import everyone, raise_everywhere
from ds_lgamp.partition.bus import Bus
from ds_lgamp.partition.disk import Disk
from ds_lgamp.partition.host import Host, HostThread
from ds_lgamp.partition.policy import UnitParameter, ZeroPolicy, node_groups
from ds_lgamp.partition.quantised import compute_with_parameters
from ds_lgamp.partition.unit import Unit
from ds_lgamp.partition.zero_partition import TiedParameters, ZeroPartition, build_partition
from ds_lgamp.runtime.node import update_threads
from ds_lgamp.runtime.recompute import undisturbed
from ds_lgamp.schedule.spec import ProgramSpec


def policy_of(
    module: PlacedModule,
    settings: LgampConfig,
    config: Any,
    spec: ProgramSpec,
    data_group: dist.ProcessGroup,
    device: torch.device,
    disk: Disk | None,
) -> ZeroPolicy:
    """Returns how the parameters of this pipeline rank are spread over ``data_group``. Collective over all ranks.

    Args:
        config: the DeepSpeedConfig.
        spec: the program of a step.
        disk: where a part of the host's part lies; None if nothing does.
    """
    tensors = tensor_group(module)
    host = None
    if spec.offload is not None:
        threads, on_disk = HostThread(device, threads=update_threads()), on_disk_of(config, settings)
        host = Host(Bus(device, disk=disk), threads, spec.offload.parameters, on_disk, spec.offload.on_device)
    bus = None
    if spec.stores_weights:
        bus = Bus(device, disk=disk) if host is None else host.bus
    return ZeroPolicy(
        data_group,
        spec.zero_stage,
        accumulation_dtype(config),
        config.communication_data_type,
        settings.reproducible,
        tensors,
        None if spec.hierarchy is None else node_groups(spec.hierarchy, module._grid.dp_groups),
        host,
        expert_tensor_group=tensors,
        bus=bus,
        copies_weights=has_master_copies(config),
    )


def _keeping_frozen(policy: ZeroPolicy, home: Home, device: torch.device, disk: Disk | None) -> ZeroPolicy:
    """Returns the policy with frozen units at ``home``, whole on every rank."""
    if home == "host":
        buses = (policy.bus, None if policy.host is None else policy.host.bus)
        bus = next(filter(None, buses), None) or Bus(device, disk=disk)
        return policy._replace(frozen_home=Host(bus, HostThread(device), parameters=True))
    return policy if home == "none" else policy._replace(frozen_home=home)


def partition_parameters(
    module: PlacedModule,
    optimizer: torch.optim.Optimizer,
    policy: ZeroPolicy,
    device: torch.device,
    deferred: DeferredLayers | None = None,
    home: Home = "none",
    disk: Disk | None = None,
) -> ZeroPartition:
    """Partitions the parameters of this pipeline rank, and lets ``module`` read and write them. Collective over all
    ranks.

    Args:
        module: its layers are placed already.
        optimizer: holds whole parameters still.
        deferred: builds the layers that have no memory yet; None if all have.
        home: where frozen weights lie between uses.
        disk: where a part of the host's part lies; None if nothing does.
    """
    state = optimizer if isinstance(optimizer, InEightBits) else getattr(optimizer, "in_8_bits", None)
    policy = policy._replace(state_in_8_bits=state is not None)
    chunks, tied = _parameters_by_unit(module, _group_of_parameters(optimizer), state)
    build = partial(
        build_partition,
        chunks,
        # Every rank goes through the keys in the same order: deferred tied modules are broadcast as they are built.
        [TiedParameters(key, tied[key], _users(module, key), _tie_group(module, key)) for key in sorted(tied)],
        _keeping_frozen(policy, home, device, disk),
        device,
    )
    if deferred is None:
        partition = build()
    else:
        with undisturbed(layer_sources(device)):
            partition = build(materialise=deferred.with_values)
            deferred.build_rest()
    compute_with_parameters(module)
    module.full_parameters, module.adopt_parameters = partition.full_parameters, partition.adopt_parameters
    return partition


def thaw(
    module: PlacedModule, partition: ZeroPartition, optimizer: PartitionedOptimizer, settings: LgampConfig, config: Any
) -> tuple[list[Unit], int]:
    """Lets the parameters train that the script has unfrozen. Returns the new units, and the first chunk of all ranks
    that trains now. Collective over all ranks; raises ConfigError on every rank, and changes nothing, if they do not
    agree or one of them cannot do it.

    Args:
        optimizer: steps the partition.
        config: the DeepSpeedConfig.
    """
    refuse_differing_freezing(module)
    raise_everywhere(optimizer.complaint_about_thawed(), ConfigError)
    refuse_irreproducible(settings, config, module, announced_tensors(module))
    for entry in partition.thawed():
        if entry.group_of_script is None:
            logger.warning(
                f"ds_lgamp: parameter {entry.shown} is unfrozen, but no parameter group holds it, so that it stays as "
                "it is; pass what trains later to deepspeed.initialize, too"
            )
    units = partition.thaw()
    optimizer.take(units)
    training = (chunk for chunk, members in partition.chunk_units.items() if any(unit.trains for unit in members))
    return units, min(everyone(min(training, default=len(module.layout.placement))))


def open_disk(settings: LgampConfig, config: Any) -> Disk | None:
    """Returns the disk that the block and ``config``, a DeepSpeedConfig, ask for; None if they ask for none. Collective
    over all ranks; raises ConfigError on every rank if one of them cannot use its disk."""
    named = disk_path(config, settings)
    if named is None:
        return None
    key, path = named
    disk, complaint = None, None
    try:
        disk = Disk(path, key)
    except ValueError as error:
        complaint = str(error)
    raise_everywhere(complaint, ConfigError)
    return disk


def _group_of_parameters(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Returns the index of every parameter's optimizer group, by the parameter's id. Names would not do: a callable
    may have made groups of its own from the parameters it was given."""
    return {id(parameter): index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]}


def _parameters_by_unit(
    module: PlacedModule, groups: dict[int, int], state: InEightBits | None
) -> tuple[dict[int, list[UnitParameter]], dict[str, list[UnitParameter]]]:
    """Returns the parameters of this pipeline rank's chunks, by chunk, and those of its tied modules, by key."""
    layout = module.layout
    is_tensor_parallel = tensor_group(module) is not None
    chunks: dict[int, list[UnitParameter]] = {chunk: [] for chunk in layout.chunks_of(module.stage_id)}
    tied: dict[str, list[UnitParameter]] = {key: [] for key in module.tied_modules}
    for (local, _), (name, tensor) in zip(global_names(module), whole_names(module)):
        if isinstance(tensor, torch.nn.Parameter):
            group = groups.get(id(tensor))
            sharing = sharing_of(name, tensor) if is_tensor_parallel else Sharing()
            shown = shown_name(module, local)
            among = expert_group(tensor), place_among_experts(tensor)
            owner = group if tensor.requires_grad else None
            exact = state is not None and state.keeps_in_32_bits(local, tensor.numel())
            entry = UnitParameter(name, tensor, owner, *sharing, *among, shown, group, exact)
            first = name.split(".")
            if first[0] == "tied_modules":
                tied[first[1]].append(entry)
            else:
                chunks[layout.chunk_of(int(first[0]))].append(entry)
    return chunks, tied


def _users(module: PlacedModule, key: str) -> list[int]:
    """Returns the chunks of this pipeline rank that use the tied module ``key``."""
    layout, specs = module.layout, module._layer_specs
    return [
        chunk
        for chunk in layout.chunks_of(module.stage_id)
        if any(isinstance(specs[i], TiedLayerSpec) and specs[i].key == key for i in layout.layers(chunk))
    ]


def _tie_group(module: PlacedModule, key: str) -> dist.ProcessGroup | None:
    """Returns the pipeline ranks that hold the tied module ``key``; None if there is one."""
    tied = module.tied_comms.get(key)
    return tied["group"] if tied is not None and len(tied["ranks"]) > 1 else None
