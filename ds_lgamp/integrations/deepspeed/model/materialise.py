"""Builds the layers that :func:`ds_lgamp.deferred_init` left without memory, one unit at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from deepspeed.runtime import utils as deepspeed_utils
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.model.construction import (
    build_without_memory,
    deferred_seed,
    defers,
    end_deferral,
    showing,
)
from ds_lgamp.integrations.deepspeed.model.layer_moves import adopt_traits, replace_layers, share_tied_values, traits_of
from ds_lgamp.integrations.deepspeed.model.module import (
    TIED_MODULES,
    PlacedModule,
    built_layers,
    layer_prefix,
    prefix_of,
    tensors_of,
)
from ds_lgamp.partition.flat_storage import UnitParameter


class DeferredLayers:
    """Builds the deferred layers of this rank.

    The seed of a layer is a base seed plus the layer's index; a tied module takes the index of the first layer that
    uses it. With ``seed_layers`` this is the seed of stock DeepSpeed. Otherwise rank 0 drew the base seed from torch's
    generator when it constructed the module. So weights depend neither on the number of pipeline ranks nor on the
    placement. As in stock DeepSpeed, the values of data-parallel rank 0 count.

    Collective over all ranks.

    Args:
        module: the module after its layers were placed.
        prepare: converts the layers that ``module`` shows to the type and device of training, and gives them the values
            of data-parallel rank 0.
    """

    def __init__(self, module: PlacedModule, prepare: Callable[[], None]) -> None:
        self._module = module
        self._prepare = prepare
        self._waiting = deferred_layers(module)
        self._built: dict[str, nn.Module] = {}
        seeds: list[Any] = [deferred_seed(module)]
        dist.broadcast_object_list(seeds, src=0)
        self._seed = seeds[0]

    def with_values(self, parameters: Sequence[UnitParameter]) -> list[UnitParameter]:
        """Builds the layers of a unit. Returns its ``parameters``, with built ones in place of deferred ones.

        Raises ConfigError if a layer builds other parameters or buffers for real than on the meta device.
        """
        values: dict[str, nn.Parameter] = {}
        for prefix in dict.fromkeys(layer_prefix(entry.name) for entry in parameters):
            if prefix in self._waiting:
                layer = self._build(prefix)
                values.update((f"{prefix}.{name}", parameter) for name, parameter in layer.named_parameters())
        return [entry._replace(parameter=values.get(entry.name, entry.parameter)) for entry in parameters]

    def build_rest(self) -> None:
        """Builds the layers without parameters, for which no unit asked."""
        for prefix in sorted(self._waiting):
            self._build(prefix)

    def register(self) -> None:
        """Puts the built layers into the module, which is then as if it had been constructed with memory."""
        replace_layers(self._module, self._built)
        end_deferral(self._module)

    def _build(self, prefix: str) -> nn.Module:
        specs = self._module._layer_specs
        first = next(index for index, spec in enumerate(specs) if prefix_of(index, spec) == prefix)
        (self._module.seed_fn or deepspeed_utils.set_random_seed)(self._seed + first)
        layer = specs[first].build()
        described = self._waiting.pop(prefix)
        if _described(layer) != _described(described):
            raise ConfigError(
                f"layer {prefix} builds other parameters or buffers on the meta device than it builds for real; build "
                "the PipelineModule outside ds_lgamp.deferred_init()"
            )
        complaint = adopt_traits({prefix: layer}, traits_of({prefix: described}))
        if complaint is not None:
            raise ConfigError(complaint)
        for parameter, known in zip(layer.parameters(), described.parameters()):
            parameter.requires_grad_(known.requires_grad)
        key = prefix.removeprefix(TIED_MODULES) if prefix.startswith(TIED_MODULES) else None
        shown = {prefix: layer} if key is None else {"tied_modules": nn.ModuleDict({key: layer})}
        with showing(self._module, shown):
            self._prepare()
        if key is not None:
            share_tied_values(self._module, key, layer)
        self._built[prefix] = layer
        return layer


def deferred_layers(module: PipelineModule) -> dict[str, nn.Module]:
    """Returns this rank's layers without memory, by the prefix of their global names."""
    deferred = {prefix_of(index, spec) for index, spec in enumerate(module._layer_specs) if defers(module, spec)}
    return {prefix: layer for prefix, layer in built_layers(module).items() if prefix in deferred}


def changed_layer(module: PipelineModule) -> str | None:
    """Returns the prefix of a deferred layer that differs from a new build of its specification; None if none does."""
    specs = {prefix_of(index, spec): spec for index, spec in enumerate(module._layer_specs)}
    for prefix, layer in deferred_layers(module).items():
        fresh = build_without_memory(specs[prefix])
        devices = {tensor.device.type for _, tensor in tensors_of(layer)}
        if _described(layer) != _described(fresh) or devices - {"meta"}:
            return prefix
    return None


def _described(layer: nn.Module) -> list[tuple]:
    return [(name, list(tensor.shape), tensor.dtype) for name, tensor in tensors_of(layer)]
