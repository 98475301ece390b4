"""Sizes of a module's layers, chunks and tied modules under a layout, known without the other ranks."""

from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from ds_lgamp.cost.state import UnitSize
from ds_lgamp.cost.storage import aligned
from ds_lgamp.integrations.deepspeed.explain.facts import ChunkFacts, TiedFacts
from ds_lgamp.integrations.deepspeed.model.construction import build_without_memory
from ds_lgamp.integrations.deepspeed.model.module import Layout, layer_types
from ds_lgamp.integrations.deepspeed.model.recomputation import layer_sources, offers_selective
from ds_lgamp.runtime.recompute import undisturbed


@dataclass(frozen=True)
class _LayerSize:
    parameters: int
    stored: int
    """Elements they take in a unit's storage."""
    trainable: int
    """Those of ``stored`` that the optimizer owns."""


class ModelSizes:
    """Sizes and names of a module's layers under a layout."""

    def __init__(self, module: PipelineModule, layout: Layout) -> None:
        self.layout = layout
        self.types = layer_types(module)
        self.keys = [spec.key if isinstance(spec, TiedLayerSpec) else None for spec in module._layer_specs]
        self.sizes: dict[int | str, _LayerSize] = {}
        """By layer; a tied module by its key."""
        self.offers_selective: list[bool] = []
        """Whether each of them can recompute a part of itself."""
        built: dict[int | str, Any] = {}
        device = torch.device(get_accelerator().current_device_name())
        sources = layer_sources(device)
        with undisturbed(sources):
            for layer, key in enumerate(self.keys):
                name = layer if key is None else key
                if name not in self.sizes:
                    built[name] = _layer_of(module, layer)
                    self.sizes[name] = _layer_size(built[name])
                    self.offers_selective.append(offers_selective(built[name]))
        self.layers = [built[layer if key is None else key] for layer, key in enumerate(self.keys)]
        """As built, mostly without memory; a tied module stands for each of its uses."""

    def chunks(self, rank: int) -> list[ChunkFacts]:
        """Returns the chunks of a pipeline rank."""
        return [self._chunk(chunk) for chunk in self.layout.chunks_of(rank)]

    def _chunk(self, chunk: int) -> ChunkFacts:
        layers = self.layout.layers(chunk)
        types = [self.types[layer] for layer in layers]
        return ChunkFacts(chunk, layers[0], layers[-1], types, self._size(chunk).parameters)

    def _size(self, chunk: int) -> _LayerSize:
        """Returns the size of the chunk's own layers, without tied modules."""
        own = [self.sizes[layer] for layer in self.layout.layers(chunk) if self.keys[layer] is None]
        return _LayerSize(
            sum(size.parameters for size in own), sum(size.stored for size in own), sum(size.trainable for size in own)
        )

    def tied(self, rank: int) -> list[TiedFacts]:
        """Returns the tied modules that a pipeline rank holds, in the order of their keys."""
        facts = []
        for key in sorted({key for key in self.keys if key is not None}):
            users = [layer for layer, name in enumerate(self.keys) if name == key]
            owners = sorted({self.layout.owner(layer) for layer in users})
            if rank in owners:
                chunks = sorted({self.layout.chunk_of(layer) for layer in users if self.layout.owner(layer) == rank})
                facts.append(TiedFacts(key, self.types[users[0]], self.sizes[key].parameters, chunks, owners))
        return facts

    def units(self, rank: int) -> list[UnitSize]:
        """Returns the units of a pipeline rank."""
        units = [unit for chunk in self.layout.chunks_of(rank) for unit in _units(self._size(chunk), (chunk,))]
        for tied in self.tied(rank):
            units += _units(self.sizes[tied.key], tuple(tied.chunks), True, len(tied.pipeline_ranks))
        return units


def _layer_of(module: PipelineModule, layer: int) -> Any:
    """Returns the layer as this rank has built it, else one without memory that its specification builds."""
    spec = module._layer_specs[layer]
    if isinstance(spec, TiedLayerSpec) and spec.key in module.tied_modules:
        return module.tied_modules[spec.key]
    if str(layer) in module._modules:
        return module._modules[str(layer)]
    if not isinstance(spec, LayerSpec):
        return spec
    return build_without_memory(spec)


def _layer_size(layer: Any) -> _LayerSize:
    parameters = list(layer.parameters()) if isinstance(layer, nn.Module) else []
    return _LayerSize(
        sum(parameter.numel() for parameter in parameters),
        sum(aligned(parameter.numel()) for parameter in parameters),
        sum(aligned(parameter.numel()) for parameter in parameters if parameter.requires_grad),
    )


def _units(size: _LayerSize, chunks: tuple[int, ...], tied: bool = False, copies: int = 1) -> list[UnitSize]:
    """Returns the unit of the parameters that train and the unit of those that are frozen, of a chunk or of a tied
    module."""
    frozen = size.stored - size.trainable
    units = [UnitSize(size.trainable, size.trainable, chunks, tied, copies)] if size.trainable else []
    return [*units, UnitSize(frozen, 0, chunks, tied, frozen=True)] if frozen else units
