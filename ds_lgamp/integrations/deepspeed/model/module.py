"""Moves the built layers of a PipelineModule into chunks instead of stages, each chunk on its pipeline rank.

Layers move with their values and are never initialised anew, because users load weights before
``deepspeed.initialize``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from ds_lgamp.checkpoint.safetensors_files import without_layer
from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.model.deferred_init import build_without_memory, deferred_keys, defers
from ds_lgamp.integrations.deepspeed.model.first_values import share_values
from ds_lgamp.integrations.deepspeed.model.layout import Layout
from ds_lgamp.integrations.deepspeed.model.random_sources import layer_sources
from ds_lgamp.integrations.deepspeed.model.traits import Traits, adopt_traits, traits_of
from ds_lgamp.partition.agreement import everyone, raise_everywhere
from ds_lgamp.partition.memory import bytes_of
from ds_lgamp.runtime.random_state import undisturbed

TIED_MODULES = "tied_modules."
"""How global names in tied modules begin."""
NAMES_OF_MODEL = "_ds_lgamp_names_of_model"
"""The attribute of a module whose tensors have their names in a script's model inside its layers."""
BESIDE = "beside"
"""What global names begin with, in place of a layer, of buffers that are in none. Every rank has them."""


BeforeLayer = Callable[[int, int], None]
"""Called with (layer, micro-batch) ahead of the layer."""


class TensorInfo(NamedTuple):
    """A parameter or buffer of a built layer, as its pipeline rank describes it to others."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    is_parameter: bool


class PlacedModule(PipelineModule):
    """A PipelineModule with chunks in the place of stages. :func:`place_layers` mixes it into the class of a module.

    Between two batches, ``parameters()`` have the values of the last step. Reading them may wait for a gather. At
    stage 3 they have no elements; ``ds_shape`` and ``ds_numel`` give their full shape and size. If gathers are
    deferred, they have old values. Reading raises an error in both cases. Inside
    ``deepspeed.zero.GatheredParameters`` they are complete and current.
    """

    layout: Layout
    chunk_functions: dict[int, list[Callable]]
    """The layers of every chunk of this rank, as functions."""
    beside_layers: Sequence[tuple[str, nn.Module]] = ()
    """The modules of a model that are in no layer, such as the one that contains all, by name behind :data:`BESIDE`."""
    other_names: Mapping[str, str] = MappingProxyType({})
    """More names that a model has for a parameter, each with the one inside its layer."""
    before_layer: BeforeLayer | None = None
    """Called ahead of every layer, before its seed; None if nothing is."""

    full_parameters: Callable[[], AbstractContextManager[None]]
    """Keeps this rank's parameters complete and current inside a block. All data-parallel ranks enter it together."""
    adopt_parameters: Callable[[], None]
    """Inside such a block, makes training go on with the values that were written to the parameters."""

    def stage_owner(self, layer_idx: int) -> int:
        return self.layout.owner(layer_idx)

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        return super().ckpt_layer_path(ckpt_dir, self._own_layers[local_layer_idx])

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        return super().ckpt_layer_path_list(ckpt_dir, self._own_layers[local_layer_idx])

    @property
    def _own_layers(self) -> list[int]:
        """The layer of each of ``forward_funcs``."""
        return [layer for chunk in self.chunk_functions for layer in self.layout.layers(chunk)]

    def save_state_dict(self, *arguments: Any, **options: Any) -> None:
        """Writes a file for each layer, as stock's module does. All ranks call it together."""
        with self.full_parameters():
            super().save_state_dict(*arguments, **options)

    def load_state_dir(self, *arguments: Any, **options: Any) -> None:
        """Loads such files, of any layout. All ranks call it together."""
        with self.full_parameters():
            super().load_state_dir(*arguments, **options)
            self.adopt_parameters()

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compiles the layers, where their chunks call them."""
        super().compile(*arguments, **options)
        compiled = iter(self.forward_funcs)
        for functions in self.chunk_functions.values():
            functions[:] = [next(compiled) for _ in functions]

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Returns a copy of the complete, current state of this rank's layers. All data-parallel ranks call it
        together, because sharded parameters are gathered first."""
        with self.full_parameters():
            state = super().state_dict(*arguments, **options)
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.clone()
            return state

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Loads the state of this rank's layers, also during training. All data-parallel ranks call it together, with
        the same state."""
        with self.full_parameters():
            result = super().load_state_dict(*arguments, **options)
            self.adopt_parameters()
            return result


def global_names(module: PipelineModule) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters and buffers of the built layers by global name, which is the same in every layout. A global
    name is the layer's index or tied key, then the name inside the layer."""
    for prefix, layer in built_layers(module).items():
        for name, tensor in tensors_of(layer):
            yield f"{prefix}.{name}", tensor


def place_layers(module: PipelineModule, layout: Layout) -> None:
    """Moves every built layer to the pipeline rank of its chunk and makes ``module`` a :class:`PlacedModule`.

    Collective over all ranks. ``module`` stays the same object. The move consumes no random numbers. Deferred layers
    stay without memory. Raises ConfigError if a layer has other parameters, buffers or hooks than its specification
    builds.
    """
    previous_owner = [module.stage_owner(layer) for layer in range(module._num_layers)]
    infos, traits, stayed = announced_tensors(module), announced_traits(module), set(built_layers(module))
    device = torch.device(get_accelerator().device_name(module.local_rank))
    sources = layer_sources(device)
    with undisturbed(sources):
        built = {
            layer: _obtain(module, layer, previous_owner[layer], layout.owner(layer), infos, device)
            for layer in range(module._num_layers)
        }
    module.__class__ = type(type(module).__name__, (PlacedModule, type(module)), {})
    module.layout = layout
    _register(module, built)
    arrived = {prefix: layer for prefix, layer in built_layers(module).items() if prefix not in stayed}
    raise_everywhere(adopt_traits(arrived, traits), ConfigError)
    module.tied_comms = module._index_tied_modules()
    for layer in module.tied_modules.values():
        for parameter in layer.parameters():
            _forget_collectives(parameter)
    for key in module.tied_comms:
        if key not in deferred_keys(module):
            share_tied_values(module, key, module.tied_modules[key])


def _forget_collectives(parameter: nn.Parameter) -> None:
    """Drops the autograd hook that would warn, in every first backward pass, of the broadcast of a tied parameter by
    stock's module. Assigning the hooks that Python has added drops all others."""
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


def function_of(spec: Any, layer: nn.Module) -> Callable:
    """Returns what a pipeline calls for ``spec``, once its ``layer`` is built."""
    applies = isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None
    return partial(spec.forward_fn, layer) if applies else layer


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


def announced_tensors(module: PipelineModule) -> dict[str, TensorInfo]:
    """Returns the parameters and buffers that all pipeline ranks have built, by global name. Collective."""
    own = {
        name: TensorInfo(tensor.shape, tensor.dtype, tensor.requires_grad, isinstance(tensor, nn.Parameter))
        for name, tensor in global_names(module)
    }
    return {name: info for rank in over_pipeline(module, own) for name, info in rank.items()}


def announced_traits(module: PipelineModule) -> dict[str, Traits]:
    """Returns what the built layers of all pipeline ranks have beside tensors, by the global names of their parts.
    Collective."""
    own = {name: each for prefix, layer in built_layers(module).items() for name, each in traits_of(layer, prefix)}
    return {name: each for rank in over_pipeline(module, own) for name, each in rank.items()}


def over_pipeline(module: PipelineModule, own: Any) -> list[Any]:
    """Returns ``own`` of every pipeline rank. Collective."""
    return everyone(own, module._grid.get_pipe_parallel_group())


def over_data(module: PipelineModule, own: Any) -> list[Any]:
    """Returns ``own`` of every data-parallel rank. Collective."""
    return everyone(own, module._grid.get_data_parallel_group())


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


def built_layers(module: PipelineModule) -> dict[str, nn.Module]:
    """Returns the layers with state that this rank holds, by the prefix of their global names."""
    layers = {f"{TIED_MODULES}{key}": layer for key, layer in module.tied_modules.items()}
    for layer in range(module._num_layers):
        if str(layer) in module._modules:
            layers[str(layer)] = module._modules[str(layer)]
    return layers


def shown_name(module: PipelineModule, name: str) -> str:
    """Returns what sentences call the tensor of the global ``name``: its name in the model of the script, which may
    have no layers."""
    return without_layer(name) if getattr(module, NAMES_OF_MODEL, False) else name


def prefix_of(layer: int, spec: Any) -> str:
    return f"{TIED_MODULES}{spec.key}" if isinstance(spec, TiedLayerSpec) else str(layer)


def layer_prefix(name: str) -> str:
    """Returns the part of a global name that says which layer or tied module has the parameter or buffer."""
    return ".".join(name.split(".")[: 2 if name.startswith(TIED_MODULES) else 1])


def persistent_buffers(module: PlacedModule) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the buffers of this rank that belong to the state of the model, by global name."""
    layers = built_layers(module).items()
    inside = chain.from_iterable(layer.named_modules(prefix=prefix) for prefix, layer in layers)
    for path, part in chain(inside, module.beside_layers):
        for name, tensor in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}", tensor


def with_extra_state(module: PipelineModule) -> Iterator[tuple[str, nn.Module]]:
    """Yields the parts of this rank's layers that have an extra state, by its global name."""
    for prefix, layer in built_layers(module).items():
        for path, part in layer.named_modules(prefix=prefix):
            if type(part).get_extra_state is not nn.Module.get_extra_state:
                yield f"{path}.{_EXTRA_STATE_KEY_SUFFIX}", part


def empty_extra_states(module: PipelineModule) -> list[str]:
    """Returns the global names of the empty extra states of this rank's layers. Megatron-core's linear layers have such
    entries and raise an error if a state lacks them."""
    return [name for name, part in with_extra_state(module) if part.get_extra_state() is None]


def tensors_of(layer: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*layer.named_parameters(), *layer.named_buffers()]
