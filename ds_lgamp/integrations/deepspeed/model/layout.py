"""Cuts the layers of a PipelineModule into chunks and places the chunks on pipeline ranks."""

from bisect import bisect_right
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule

from ds_lgamp.config import LgampConfig
from ds_lgamp.integrations.deepspeed.model.random_sources import layer_sources
from ds_lgamp.integrations.program_spec import chunk_bounds, place
from ds_lgamp.runtime.recompute import undisturbed
from ds_lgamp.schedule.orders import chunks_of
from ds_lgamp.schedule.placement import Placement


class Layout(NamedTuple):
    """The layers of every chunk, and the pipeline rank that holds it."""

    bounds: list[int]
    """The first layer of every chunk, then the number of layers."""
    placement: Placement

    def chunk_of(self, layer: int) -> int:
        """Returns the chunk that contains ``layer``."""
        return bisect_right(self.bounds, layer) - 1

    def owner(self, layer: int) -> int:
        """Returns the pipeline rank that holds ``layer``."""
        return self.placement[self.chunk_of(layer)]

    def layers(self, chunk: int) -> range:
        return range(self.bounds[chunk], self.bounds[chunk + 1])

    def chunks_of(self, rank: int) -> list[int]:
        return chunks_of(self.placement, rank)


def layout_of(settings: LgampConfig, module: PipelineModule, partition_method: str) -> Layout:
    """Returns the layout that ``settings`` ask for. Raises ConfigError if there are too few layers for it.

    Args:
        partition_method: the module's method to cut its layers. ``chunks_per_rank`` balances chunks by it.
    """
    if settings.one_chunk_per_rank and settings.pipeline_rank_speeds is None:
        bounds = [int(bound) for bound in module.parts]
    else:
        weights = [] if settings.chunks_per_rank is None else layer_weights(module, partition_method)
        bounds = chunk_bounds(settings, module.num_stages, layer_types(module), weights)
    return Layout(bounds, place(settings, len(bounds) - 1, module.num_stages))


def layer_types(module: PipelineModule) -> list[str]:
    """Returns the class or function name of every layer. Automatic chunks compare them."""
    return [_type_name(layer) for layer in module._layer_specs]


def layer_weights(module: PipelineModule, method: str) -> list[float]:
    """Returns the weight that DeepSpeed's partition ``method`` gives every layer. Draws no random numbers."""
    method = method.lower()
    if method == "parameters":
        device = torch.device(get_accelerator().current_device_name())
        sources = layer_sources(device)
        with undisturbed(sources):
            return [float(count) for count in module._count_layer_params()]
    if method.startswith("type:"):
        chosen = set(module._find_layer_type(method.split(":", 1)[1]))
        return [float(layer in chosen) for layer in range(module._num_layers)]
    return [1.0] * module._num_layers


def _type_name(layer: Any) -> str:
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return getattr(layer, "__name__", type(layer).__name__)
