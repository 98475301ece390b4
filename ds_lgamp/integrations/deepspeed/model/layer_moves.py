"""Moves the built layers of a PipelineModule to the pipeline ranks of their chunks.

Layers move with their values and are never initialised anew, because users load weights before
``deepspeed.initialize``. With a layer moves what it has beside tensors that users may have changed: a rate of dropout,
a hook.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.model.construction import build_without_memory, deferred_keys, defers
from ds_lgamp.integrations.deepspeed.model.module import (
    Layout,
    PlacedModule,
    TensorInfo,
    announced_tensors,
    built_layers,
    function_of,
    over_pipeline,
    prefix_of,
    tensors_of,
)
from ds_lgamp.integrations.deepspeed.model.recomputation import layer_sources
from ds_lgamp.integrations.deepspeed.model.shared_tensors import share_values
from ds_lgamp.partition.agreement import raise_everywhere
from ds_lgamp.partition.memory import bytes_of
from ds_lgamp.runtime.recompute import undisturbed

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Traits(NamedTuple):
    """What a layer, or a part of it, has beside tensors."""

    values: dict[str, bool | float]
    """Attributes of torch's own modules, such as a rate of dropout. Those of other classes may belong to a rank."""
    hooks: int
    """How many hooks it has, with a ``forward`` of its own and hooks of its parameters."""


def place_layers(module: PipelineModule, layout: Layout) -> None:
    """Moves every built layer to the pipeline rank of its chunk and makes ``module`` a :class:`PlacedModule`.

    Collective over all ranks. ``module`` stays the same object. The move consumes no random numbers. Deferred layers
    stay without memory. Raises ConfigError if a layer has other parameters, buffers or hooks than its specification
    builds.
    """
    previous_owner = [module.stage_owner(layer) for layer in range(module._num_layers)]
    infos, stayed = announced_tensors(module), built_layers(module)
    traits = dict(ChainMap(*over_pipeline(module, traits_of(stayed))))
    device = torch.device(get_accelerator().device_name(module.local_rank))
    sources = layer_sources(device)
    with undisturbed(sources):
        built = {
            layer: _obtain(module, layer, previous_owner[layer], layout.owner(layer), infos, device)
            for layer in range(module._num_layers)
        }
    place_built(module, layout, built)
    arrived = {prefix: layer for prefix, layer in built_layers(module).items() if prefix not in stayed}
    raise_everywhere(adopt_traits(arrived, traits), ConfigError)
    module.tied_comms = module._index_tied_modules()
    for layer in module.tied_modules.values():
        for parameter in layer.parameters():
            _forget_collectives(parameter)
    for key in module.tied_comms:
        if key not in deferred_keys(module):
            share_tied_values(module, key, module.tied_modules[key])


def place_built(module: PipelineModule, layout: Layout, built: dict[int, Any]) -> PlacedModule:
    """Makes ``module`` a :class:`PlacedModule` of the pipeline rank ``module.stage_id``, and returns it.

    Args:
        built: the functions of this rank's layers; functions of other layers are ignored.
    """
    module.__class__ = type(type(module).__name__, (PlacedModule, type(module)), {})
    module.layout = layout
    _register(module, built)
    return module


def _forget_collectives(parameter: nn.Parameter) -> None:
    """Drops the autograd hook that would warn, in every first backward pass, of the broadcast of a tied parameter by
    stock's module. Assigning the hooks that Python has added drops all other hooks."""
    parameter._backward_hooks = parameter._backward_hooks


def share_tied_values(module: PipelineModule, key: str, layer: nn.Module) -> None:
    """Gives ``layer``, which is the tied module ``key``, the values of the first pipeline rank that uses it. Collective
    over the ranks that use it."""
    if key in module.tied_comms:
        tied = module.tied_comms[key]
        device = torch.device(get_accelerator().device_name(module.local_rank))
        share_values((tensor for _, tensor in tensors_of(layer)), tied["group"], device)


def replace_layers(module: PlacedModule, layers: Mapping[str, nn.Module]) -> None:
    """Replaces layers of this rank by ``layers``, which are given by the prefix of their global names."""
    built = {}
    for chunk, functions in module.chunk_functions.items():
        for layer, function in zip(module.layout.layers(chunk), functions):
            spec = module._layer_specs[layer]
            new = layers.get(prefix_of(layer, spec))
            built[layer] = function if new is None else function_of(spec, new)
            if new is not None and isinstance(spec, TiedLayerSpec):
                module.tied_modules[spec.key] = new
    for key, tied in module.tied_comms.items():
        tied["module"] = module.tied_modules[key]
    _register(module, built)


def _obtain(
    module: PipelineModule,
    layer: int,
    source: int,
    target: int,
    infos: dict[str, TensorInfo],
    device: torch.device,
) -> Any:
    """Returns the layer's function on pipeline rank ``target``, None elsewhere. Its tensors travel from ``source``."""
    spec = module._layer_specs[layer]
    rank = module.stage_id
    prefix = prefix_of(layer, spec)
    built = built_layers(module).get(prefix)
    deferred = defers(module, spec)
    if rank == source and rank != target and built is not None and not deferred:
        transfer(dist.isend, module, target, [tensor.detach().contiguous() for _, tensor in tensors_of(built)])
        if built is spec:
            # The list of layers keeps the module that the user gave.
            for parameter in built.parameters():
                parameter.data = parameter.data.new_empty(0)
    if rank != target:
        return None
    if source != target:
        received = build_without_memory(spec) if deferred else _build(spec)
        if received is not None:
            if not deferred:
                received.to(device)
            arrived = _receive(module, received, prefix, source, infos)
            # If this rank has the tied module already, the arrived one is a copy of it.
            built = built if built is not None else arrived
    if isinstance(spec, TiedLayerSpec):
        if spec.key not in module.tied_modules:
            module.tied_modules[spec.key] = built
            module.tied_weight_attrs[spec.key] = spec.tied_weight_attr
        built = module.tied_modules[spec.key]
    return spec if built is None else function_of(spec, built)


def transfer(operation: Callable, module: PipelineModule, rank: int, tensors: Sequence[torch.Tensor]) -> None:
    """Sends contiguous ``tensors`` to pipeline rank ``rank``, or receives them from it.

    They travel in one batch in the pipeline's group. Alone, they would make NCCL keep a communicator for these two
    ranks. They travel as bytes, because NCCL does not carry every dtype.
    """
    group, peer = module._grid.get_pipe_parallel_group(), module._grid.stage_to_global(rank)
    messages = [bytes_of(tensor) for tensor in tensors if tensor.numel()]
    if messages:
        for work in dist.batch_isend_irecv([dist.P2POp(operation, message, peer, group) for message in messages]):
            work.wait()


def _receive(
    module: PipelineModule, layer: nn.Module, prefix: str, source: int, infos: dict[str, TensorInfo]
) -> nn.Module:
    """Gives ``layer`` the tensors that arrive from pipeline rank ``source``, and says which of them are trained.

    A layer without memory receives no tensors.
    """
    expected = [name for name in infos if name.startswith(f"{prefix}.")]
    names = [f"{prefix}.{name}" for name, _ in tensors_of(layer)]
    if sorted(names) != sorted(expected):
        raise ConfigError(
            f"layer {prefix} has other parameters or buffers than its specification builds "
            f"({', '.join(sorted(set(names) ^ set(expected)))}); change layers after deepspeed.initialize"
        )
    arriving = []
    for name, tensor in tensors_of(layer):
        info = infos[f"{prefix}.{name}"]
        if tensor.device.type != "meta":
            tensor.data = torch.empty(info.shape, dtype=info.dtype, device=tensor.device)
            arriving.append(tensor.data)
        if isinstance(tensor, nn.Parameter):
            tensor.requires_grad_(info.requires_grad)
    transfer(dist.irecv, module, source, arriving)
    return layer


def _register(module: PlacedModule, built: dict[int, Any]) -> None:
    """Registers this rank's layers, and only these, under DeepSpeed's names, in layer order."""
    layout, specs = module.layout, module._layer_specs
    for layer in range(module._num_layers):
        module._modules.pop(str(layer), None)
    own = layout.chunks_of(module.stage_id)
    needed_keys = set()
    module.chunk_functions = {}
    for chunk in own:
        module.chunk_functions[chunk] = [built[layer] for layer in layout.layers(chunk)]
        for layer in layout.layers(chunk):
            if isinstance(specs[layer], TiedLayerSpec):
                needed_keys.add(specs[layer].key)
            elif isinstance(built[layer], nn.Module):
                module.add_module(str(layer), built[layer])
    for key in set(module.tied_modules) - needed_keys:
        del module.tied_modules[key], module.tied_weight_attrs[key]
    module.parts = layout.bounds
    module.forward_funcs = [function for functions in module.chunk_functions.values() for function in functions]
    module.fwd_map = {}
    module._local_start, module._local_stop = 0, len(module.forward_funcs)


def _build(spec: Any) -> nn.Module | None:
    """Returns a new layer that can receive values; None for a function."""
    if isinstance(spec, LayerSpec):
        return spec.build()
    return spec if isinstance(spec, nn.Module) else None


def traits_of(layers: Mapping[str, nn.Module]) -> dict[str, Traits]:
    """Returns the traits of ``layers`` and of their parts, by global name."""
    return {
        name: _traits(part) for prefix, layer in layers.items() for name, part in layer.named_modules(prefix=prefix)
    }


def adopt_traits(layers: Mapping[str, nn.Module], traits: Mapping[str, Traits]) -> str | None:
    """Gives layers, which were built anew, the ``traits`` of those whose places they take.

    Returns a complaint if one of the layers before had other hooks, which cannot move; else None.
    """
    for prefix, layer in layers.items():
        for name, part in layer.named_modules(prefix=prefix):
            values, hooks = traits.get(name) or _traits(part)
            if hooks != _traits(part).hooks:
                return (
                    f"layer {name} has hooks or a forward that its specification does not build, and it moves to "
                    "another pipeline rank; add them after deepspeed.initialize, or in the layer's class"
                )
            for attribute, value in values.items():
                setattr(part, attribute, value)
    return None


def _traits(part: nn.Module) -> Traits:
    own = vars(part)
    hooks = sum(len(own.get(kind) or ()) for kind in _HOOKS) + ("forward" in own)
    hooks += sum(
        len(parameter._backward_hooks or ()) for parameter in part._parameters.values() if parameter is not None
    )
    is_torchs = type(part).__module__.startswith("torch.nn.")
    values = {name: own[name] for name in own if is_torchs and name[0] != "_" and isinstance(own[name], (bool, float))}
    return Traits(values, hooks)
