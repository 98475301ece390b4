"""A plain model as a PipelineModule: its own modules become the layers."""

from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec
from torch import nn

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.transformers.layers import Ends, ModelLayers

_ENDS = "ends"
"""The key of the tied module that holds what precedes and follows the blocks."""


class _Existing(nn.Module):
    """Building it returns a module that exists already. A TiedLayerSpec takes nothing but a class."""

    def __new__(cls, module: nn.Module) -> Any:
        return module


def pipeline_module(layers: ModelLayers, settings: LgampConfig) -> PipelineModule:
    """Returns the layers as a PipelineModule. Collective over all ranks."""
    first: Any
    last: Any
    if layers.ends is None:
        first, last = layers.beginning, layers.end
    else:
        first, last = (
            TiedLayerSpec(_ENDS, _Existing, layers.ends, forward_fn=function, tied_weight_attr=[])
            for function in (Ends.begin, Ends.finish)
        )
    world, ranks = dist.get_world_size(), settings.pipeline_ranks or 1
    if world % ranks:
        raise ConfigError(
            f"{BLOCK}.pipeline_ranks is {ranks}, which does not divide the {world} ranks; use a divisor of {world}"
        )
    if ranks > len(layers.blocks):
        raise ConfigError(
            f"{BLOCK}.pipeline_ranks is {ranks}, but the model has {len(layers.blocks)} blocks; use at most as many"
        )
    return PipelineModule([first, *layers.blocks, last], num_stages=ranks, partition_method="uniform")
