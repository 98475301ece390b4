"""Moves the built layers of a PipelineModule to the pipeline ranks of their chunks, and builds there the layers that
:func:`ds_lgamp.deferred_init` left without memory.

Built layers move with their values and are never initialised anew, because users load weights before
``deepspeed.initialize``. With a layer moves what it has beside tensors that users may have changed: a rate of dropout,
a hook.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import utils as deepspeed_utils
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.model.construction import (
    build_without_memory,
    deferred_keys,
    deferred_seed,
    defers,
    end_deferral,
    showing,
)
from ds_lgamp.integrations.deepspeed.model.module import (
    TIED_MODULES,
    Layout,
    PlacedModule,
    TensorInfo,
    announced_tensors,
    built_layers,
    function_of,
    layer_prefix,
    over_pipeline,
    parts_in,
    prefix_of,
    tensors_of,
)
from ds_lgamp.integrations.deepspeed.model.recomputation import layer_sources
from ds_lgamp.integrations.deepspeed.model.shared_tensors import share_values
from ds_lgamp.partition.agreement import raise_everywhere
from ds_lgamp.partition.memory import bytes_of, write
from ds_lgamp.partition.policy import UnitParameter
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

    They arrive in the memory that the layer has, since a buffer may be a view of another one, also outside the layer. A
    layer without memory receives no tensors.
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
            if (tensor.shape, tensor.dtype) != (info.shape, info.dtype):
                tensor.data = torch.empty(info.shape, dtype=info.dtype, device=tensor.device)
            arriving.append(tensor.data)
        if isinstance(tensor, nn.Parameter):
            tensor.requires_grad_(info.requires_grad)
    whole = [tensor.contiguous() for tensor in arriving]
    transfer(dist.irecv, module, source, whole)
    for tensor, values in zip(arriving, whole):
        if values is not tensor:
            write(tensor, values)
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
    return {name: _traits(part) for name, part in parts_in(layers)}


def adopt_traits(layers: Mapping[str, nn.Module], traits: Mapping[str, Traits]) -> str | None:
    """Gives layers, which were built anew, the ``traits`` of those whose places they take.

    Returns a complaint if one of the layers before had other hooks, which cannot move; else None.
    """
    for name, part in parts_in(layers):
        values, hooks = traits.get(name) or _traits(part)
        if hooks != _traits(part).hooks:
            return (
                f"layer {name} has hooks or a forward that its specification does not build, and it moves to another "
                "pipeline rank; add them after deepspeed.initialize, or in the layer's class"
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
