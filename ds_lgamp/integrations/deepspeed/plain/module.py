"""A plain model as a PipelineModule: its own modules become the layers."""

from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec
from torch import nn

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.deepspeed.plain.layers import Layers
from ds_lgamp.integrations.transformers.layers import Ends

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


def pipeline_module(layers: Layers, settings: LgampConfig) -> PipelineModule:
    """Returns the layers as a PipelineModule. Collective over all ranks; raises ConfigError if there are too few
    layers or ranks for ``settings.pipeline_ranks``."""
    world, ranks, modules = dist.get_world_size(), settings.pipeline_ranks or 1, list(layers.modules)
    if world % ranks:
        raise ConfigError(
            f"{BLOCK}.pipeline_ranks is {ranks}, which does not divide the {world} ranks; use a divisor of {world}"
        )
    if ranks > len(modules):
        raise ConfigError(
            f"{BLOCK}.pipeline_ranks is {ranks}, but the model has {len(modules)} layers; use at most as many"
        )
    specs: list[Any] = modules
    if isinstance(modules[0], Ends):
        ends = modules[0]
        first, last = (
            TiedLayerSpec(_ENDS, kind, ends, forward_fn=function, tied_weight_attr=[])
            for kind, function in ((SharedBeginning, Ends.begin), (SharedEnd, Ends.finish))
        )
        specs = [first, *modules[1:-1], last]
    return PipelineModule(specs, num_stages=ranks, partition_method="uniform")
