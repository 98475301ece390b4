"""Imagined ranks: one process plays one of many, and builds what every pipeline rank would hold, without memory."""

import functools
import inspect
import os
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_lgamp.config import ConfigError, LgampConfig
from ds_lgamp.integrations.deepspeed.engine.memory import Update
from ds_lgamp.integrations.deepspeed.engine.parameters import partition_parameters, policy_of
from ds_lgamp.integrations.deepspeed.explain.activations import faked
from ds_lgamp.integrations.deepspeed.explain.facts import ChunkFacts, TiedFacts
from ds_lgamp.integrations.deepspeed.model.construction import build_without_memory
from ds_lgamp.integrations.deepspeed.model.experts import DividedLayer, divided
from ds_lgamp.integrations.deepspeed.model.layer_moves import place_built
from ds_lgamp.integrations.deepspeed.model.module import (
    Layout,
    PlacedModule,
    function_of,
    global_names,
    layer_types,
    prefix_of,
    tied_users,
)
from ds_lgamp.integrations.deepspeed.model.recomputation import layer_sources
from ds_lgamp.integrations.hosts import replace_attribute
from ds_lgamp.partition.quantised import own_constants
from ds_lgamp.partition.zero_partition import ZeroPartition
from ds_lgamp.runtime.recompute import undisturbed
from ds_lgamp.schedule.spec import ProgramSpec


def imagine_ranks(ranks: int, rank: int) -> None:
    """Makes this process rank ``rank`` of ``ranks``, of which the other ones do not exist.

    The environment is as a launcher sets it. The process group is torch's fake one: its collectives return at once, as
    if every rank had sent what this one did. In an all-to-all every rank sends this one what it gets from it, so that
    numbers of tokens for experts fit together.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    for name, value in {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    new_group, signature = dist.new_group, inspect.signature(dist.new_group)

    @functools.wraps(new_group)
    def imagined_group(*arguments: Any, **options: Any) -> Any:
        """Makes a group of the fake backend, whichever backend is asked for."""
        named = signature.bind(*arguments, **options).arguments
        return new_group(**{**named, "backend": None, "pg_options": None})

    all_to_all = dist.all_to_all_single

    @functools.wraps(all_to_all)
    def imagined_all_to_all(output: torch.Tensor, input: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """Gives this rank what it sends."""
        work = all_to_all(output, input, *arguments, **options)
        with torch.no_grad():
            output.copy_(input)
        return work

    def nothing(*arguments: Any, **options: Any) -> None:
        """Replaces what the fake group does not offer. Objects that a rank would receive stay as they are."""

    replacements: dict[str, Any] = {"new_group": imagined_group, "all_to_all_single": imagined_all_to_all}
    replacements |= dict.fromkeys(("init_process_group", "broadcast_object_list", "monitored_barrier"), nothing)
    # Never closed: this process imagines its ranks until it ends.
    undo = ExitStack()
    for name, replacement in replacements.items():
        for module in (dist, dist.distributed_c10d):
            replace_attribute(module, name, replacement, undo)


class ImaginedRank(NamedTuple):
    """What a pipeline rank would hold."""

    chunks: list[ChunkFacts]
    tied: list[TiedFacts]
    """Its tied modules, in the order of their keys."""
    partition: ZeroPartition
    """The engine's own, of tensors without memory. Shards are neither spread over nodes nor on the host."""
    expert_layers: dict[int, list[MoE | AutoEPMoELayer]]
    """The layers whose experts ranks divide, by chunk."""
    constants: int
    """Bytes of the constants of its quantised weights."""


class ImaginedModel:
    """The layers of a whole module. Layers that this process has built are as they are; the other layers have no
    memory, and are as their specifications build them."""

    def __init__(self, module: PipelineModule, layout: Layout) -> None:
        self.layout = layout
        self._module, self._specs = module, module._layer_specs
        self._names = [prefix_of(layer, spec) for layer, spec in enumerate(self._specs)]
        by_name: dict[str, Any] = {}
        sources = layer_sources(torch.device(get_accelerator().current_device_name()))
        with undisturbed(sources):
            for layer, name in enumerate(self._names):
                if name not in by_name:
                    by_name[name] = self._layer(layer)
        self.built = list(by_name.values())
        """Every layer once."""
        self.layers = [by_name[name] for name in self._names]
        """A tied module stands for each of its uses."""
        self.parameters = sum(map(_parameters, self.built)) + sum(map(_elsewhere, divided(self.modules)))

    @property
    def modules(self) -> nn.ModuleList:
        """The layers that are modules, each once."""
        return nn.ModuleList(layer for layer in self.built if isinstance(layer, nn.Module))

    def _expert_layers(self, chunk: int) -> list[MoE | AutoEPMoELayer]:
        """Returns the layers of ``chunk`` whose experts ranks divide."""
        own = [self.layers[layer] for layer in self.layout.layers(chunk)]
        layers = [inner for layer in own if isinstance(layer, nn.Module) for inner in divided(layer)]
        return [layer for layer in layers if isinstance(layer, MoE | AutoEPMoELayer)]

    def _layer(self, layer: int) -> Any:
        """Returns the layer as this rank has built it, else one without memory that its specification builds."""
        module, spec = self._module, self._specs[layer]
        if isinstance(spec, TiedLayerSpec) and spec.key in module.tied_modules:
            return module.tied_modules[spec.key]
        if str(layer) in module._modules:
            return module._modules[str(layer)]
        return build_without_memory(spec) if isinstance(spec, LayerSpec) else spec

    def ranks(self, settings: LgampConfig, config: Any, spec: ProgramSpec, update: Update) -> list[ImaginedRank]:
        """Returns all pipeline ranks.

        Args:
            config: the DeepSpeedConfig.
            spec: the program of a step.
            update: the step of the optimizer.
        """
        groups = {
            id(parameter): update.group_of(f"{prefix}.{name}", parameter)
            for prefix, layer in zip(self._names, self.layers)
            if isinstance(layer, nn.Module)
            for name, parameter in layer.named_parameters()
            if parameter.requires_grad
        }
        group, device = self._module._grid.get_data_parallel_group(), torch.device("cpu")
        spec = replace(spec, hierarchy=None, offload=None)
        ranks = []
        with FakeTensorMode(), faked(self.layers, config, device) as fakes:
            owned = {id(fakes[original]): index for original, index in groups.items()}
            for rank in range(self._module.num_stages):
                tied = self._tied(rank)
                placed = self._placed(rank, tied)
                optimizer: Any = SimpleNamespace(param_groups=_groups(placed, owned), in_8_bits=update.in_8_bits)
                policy = policy_of(placed, settings, config, spec, group, device, disk=None)
                partition = partition_parameters(placed, optimizer, policy, device)
                experts = {chunk: self._expert_layers(chunk) for chunk in self.layout.chunks_of(rank)}
                of_packed = {id(each): each.nbytes for layer in placed.modules() for _, each in own_constants(layer)}
                size = sum(of_packed.values())
                ranks.append(ImaginedRank(self._chunks(rank), tied, partition, experts, size))
        return ranks

    def _placed(self, rank: int, tied: list[TiedFacts]) -> PlacedModule:
        """Returns the module as it would be on pipeline rank ``rank`` after its layers were placed."""
        placed = copy(self._module)
        placed._modules, placed.stage_id = {}, rank
        keys = {spec.key: layer for spec, layer in zip(self._specs, self.layers) if isinstance(spec, TiedLayerSpec)}
        placed.tied_modules, placed.tied_weight_attrs = nn.ModuleDict(keys), dict.fromkeys(keys)
        placed.tied_comms = {
            facts.key: {"group": _TieGroup(facts.pipeline_ranks, rank), "ranks": facts.pipeline_ranks} for facts in tied
        }
        functions = [function_of(spec, layer) for spec, layer in zip(self._specs, self.layers)]
        return place_built(placed, self.layout, dict(enumerate(functions)))

    def _chunks(self, rank: int) -> list[ChunkFacts]:
        types = layer_types(self._module)
        facts = []
        for chunk in self.layout.chunks_of(rank):
            layers = self.layout.layers(chunk)
            own = [self.layers[layer] for layer in layers if not isinstance(self._specs[layer], TiedLayerSpec)]
            names = [types[layer] for layer in layers]
            facts.append(ChunkFacts(chunk, layers[0], layers[-1], names, sum(map(_parameters, own))))
        return facts

    def _tied(self, rank: int) -> list[TiedFacts]:
        types, facts = layer_types(self._module), []
        for key, users in sorted(tied_users(self._module).items()):
            owners = sorted({self.layout.owner(layer) for layer in users})
            if rank in owners:
                chunks = sorted({self.layout.chunk_of(layer) for layer in users if self.layout.owner(layer) == rank})
                facts.append(TiedFacts(key, types[users[0]], _parameters(self.layers[users[0]]), chunks, owners))
        return facts


class _TieGroup:
    """Stands for the group of the pipeline ranks that hold a copy of a tied module."""

    def __init__(self, ranks: list[int], rank: int) -> None:
        self.size, self.rank = ranks.__len__, lambda: ranks.index(rank)


def _groups(placed: PlacedModule, owned: dict[int, int]) -> list[dict[str, Any]]:
    """Returns the optimizer's groups of a rank, from the index of every parameter's group by the parameter's id."""
    groups: list[dict[str, Any]] = [{"params": []} for _ in range(1 + max(owned.values(), default=0))]
    for _, tensor in global_names(placed):
        if id(tensor) in owned:
            groups[owned[id(tensor)]]["params"].append(tensor)
    return groups


def _elsewhere(layer: DividedLayer) -> int:
    """Returns the elements of the experts of a layer that this rank does not have. Raises ConfigError for a layer of
    Megatron-core, whose all-to-alls nobody has compared."""
    if not isinstance(layer, MoE | AutoEPMoELayer):
        raise ConfigError(
            f"expert_model_parallel_size is {layer.ep_size}, which --explain does not know; set it to 1, and read what "
            "would be if every rank had all experts"
        )
    own = (parameter.numel() for parameter in layer.parameters() if not getattr(parameter, "allreduce", True))
    return (layer.ep_size - 1) * sum(own)


def _parameters(layer: Any) -> int:
    return sum(parameter.numel() for parameter in layer.parameters()) if isinstance(layer, nn.Module) else 0
