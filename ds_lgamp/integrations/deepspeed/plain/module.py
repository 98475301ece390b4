"""A plain model as a PipelineModule: its own modules become the layers."""

from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, ProcessTopology
from torch import nn

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.deepspeed.model.module import BESIDE, NAMES_OF_MODEL, PlacedModule
from ds_lgamp.integrations.deepspeed.plain.layers import Layers
from ds_lgamp.integrations.split.layers import End
from ds_lgamp.integrations.split.parts import Tree

_ENDS = "ends"
"""The key of the tied module that holds what precedes and follows the blocks."""


class _Existing(nn.Module):
    """Building it returns a module that exists already. A TiedLayerSpec takes nothing but a class."""

    def __new__(cls, module: nn.Module) -> Any:
        return module


class SharedBeginning(_Existing):
    """What precedes the blocks, if it shares parameters with what follows them."""


class SharedEnd(_Existing):
    """What follows the blocks, if it shares parameters with what precedes them."""


def topology_of(layers: Layers, settings: LgampConfig) -> ProcessTopology:
    """Returns the places of all ranks in pipelines. Raises ConfigError if there are too few layers or ranks for
    ``settings.pipeline_ranks``, or if data-parallel ranks shall have different numbers of micro-batches."""
    if settings.data_rank_speeds is not None:
        raise ConfigError(
            f"{BLOCK}.data_rank_speeds is {settings.data_rank_speeds}, but a script that calls engine(...) gives every "
            "rank as many micro-batches; remove it, or make the model a PipelineModule"
        )
    world, ranks, number = dist.get_world_size(), settings.pipeline_ranks or 1, len(layers.modules)
    if world % ranks:
        raise ConfigError(
            f"{BLOCK}.pipeline_ranks is {ranks}, which does not divide the {world} ranks; use a divisor of {world}"
        )
    if ranks > number:
        raise ConfigError(f"{BLOCK}.pipeline_ranks is {ranks}, but the model has {number} layers; use at most as many")
    return PipeDataParallelTopology(num_pp=ranks, num_dp=world // ranks)


def pipeline_module(layers: Layers, topology: ProcessTopology) -> PipelineModule:
    """Returns the layers as a PipelineModule. Collective over all ranks."""
    specs: list[Any] = list(layers.modules)
    if isinstance(ends := specs[0], End):
        specs[0] = TiedLayerSpec(_ENDS, SharedBeginning, ends, forward_fn=End.begin, tied_weight_attr=[])
        specs[-1] = TiedLayerSpec(_ENDS, SharedEnd, ends, tied_weight_attr=[])
    module = PipelineModule(specs, topology=topology, partition_method=layers.partition_method)
    setattr(module, NAMES_OF_MODEL, any(isinstance(layer, Tree) for layer in layers.modules))
    module.before_layer = layers.calls.before_layer
    return module


def tell_of_model(module: PlacedModule, model: nn.Module, layers: Layers) -> None:
    """Tells ``module`` what ``model`` has besides its ``layers``: more names of parameters, such as those of tied ones,
    and modules in no layer."""
    trees = (layer for layer in layers.modules if isinstance(layer, Tree))
    inside = {id(parameter): name for tree in trees for name, parameter in tree.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    module.other_names = {name: inside[id(each)] for name, each in named if inside.get(id(each), name) != name}
    in_layers = {id(part) for layer in layers.modules for part in layer.modules()}
    module.beside_layers = [
        (f"{BESIDE}.{path}".rstrip("."), part) for path, part in model.named_modules() if id(part) not in in_layers
    ]
