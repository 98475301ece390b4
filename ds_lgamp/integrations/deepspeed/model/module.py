"""A PipelineModule with chunks in the place of stages: how layers form chunks, and how tensors are called."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from ds_lgamp.checkpoint.whole import without_layer
from ds_lgamp.config import LgampConfig
from ds_lgamp.integrations.deepspeed.model.recomputation import BeforeLayer, layer_sources
from ds_lgamp.integrations.program_spec import chunk_bounds, place
from ds_lgamp.partition.agreement import everyone
from ds_lgamp.partition.quantised import constants, is_packed, own_constants, way_of_packing
from ds_lgamp.runtime.compiled import Compiler
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
        weights = [] if settings.fixed_chunks_per_rank is None else layer_weights(module, partition_method)
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


TIED_MODULES = "tied_modules."
"""How global names in tied modules begin."""
NAMES_OF_MODEL = "_ds_lgamp_names_of_model"
"""The attribute of a module whose tensors have their names in a script's model inside its layers."""
BESIDE = "beside"
"""What global names begin with, in place of a layer, of buffers that are in none. Every rank has them."""


class TensorInfo(NamedTuple):
    """A parameter or buffer of a built layer, as its pipeline rank describes it to other ranks."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    is_parameter: bool
    packed: bool
    """Whether it is a parameter of bytes, whatever its dtype."""


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
    """The modules of a model that are in no layer, such as the one that contains all, by name after :data:`BESIDE`."""
    other_names: Mapping[str, str] = MappingProxyType({})
    """More names that a model has for a parameter, each with the one inside its layer."""
    before_layer: BeforeLayer | None = None
    """Called before every layer, and before the layer is seeded; None if nothing is."""

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

    def compile(self, **options: Any) -> None:
        """Compiles the layers, where their chunks call them, with torch.compile's ``options``."""
        compiler = Compiler(options)
        for functions in self.chunk_functions.values():
            functions[:] = map(compiler, functions)
        self.forward_funcs[:] = [function for functions in self.chunk_functions.values() for function in functions]

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


def function_of(spec: Any, layer: nn.Module) -> Callable:
    """Returns what a pipeline calls for ``spec``, once its ``layer`` is built."""
    applies = isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None
    return partial(spec.forward_fn, layer) if applies else layer


Tensors = Mapping[str, TensorInfo]
"""Parameters and buffers by their global names."""


def announced_tensors(module: PipelineModule) -> dict[str, TensorInfo]:
    """Returns the parameters and buffers that all pipeline ranks have built, by global name. Collective."""
    own = {
        name: TensorInfo(
            tensor.shape,
            tensor.dtype,
            tensor.requires_grad,
            isinstance(tensor, nn.Parameter),
            isinstance(tensor, nn.Parameter) and is_packed(tensor),
        )
        for name, tensor in global_names(module)
    }
    return {name: info for rank in over_pipeline(module, own) for name, info in rank.items()}


def over_pipeline(module: PipelineModule, own: Any) -> list[Any]:
    """Returns ``own`` of every pipeline rank. Collective."""
    return everyone(own, module._grid.get_pipe_parallel_group())


def over_data(module: PipelineModule, own: Any) -> list[Any]:
    """Returns ``own`` of every data-parallel rank. Collective."""
    return everyone(own, module._grid.get_data_parallel_group())


def built_layers(module: PipelineModule) -> dict[str, nn.Module]:
    """Returns the layers with state that this rank holds, by the prefix of their global names."""
    layers = {f"{TIED_MODULES}{key}": layer for key, layer in module.tied_modules.items()}
    for layer in range(module._num_layers):
        if str(layer) in module._modules:
            layers[str(layer)] = module._modules[str(layer)]
    return layers


def parts_in(layers: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields ``layers``, which are given by the prefix of their global names, and the modules in them."""
    return chain.from_iterable(layer.named_modules(prefix=prefix) for prefix, layer in layers.items())


def tied_users(module: PipelineModule) -> dict[str, list[int]]:
    """Returns the layers that use each tied module, by its key."""
    users: dict[str, list[int]] = {}
    for layer, spec in enumerate(module._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            users.setdefault(spec.key, []).append(layer)
    return users


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
    """Yields the buffers of this rank that belong to the state of the model, by global name. Constants of quantised
    weights count as buffers."""
    for path, part in chain(parts_in(built_layers(module)), module.beside_layers):
        for name, tensor in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}", tensor
        for name, tensor in chain(own_constants(part), way_of_packing(part)):
            yield f"{path}.{name}", tensor


def with_extra_state(module: PipelineModule) -> Iterator[tuple[str, nn.Module]]:
    """Yields the parts of this rank's layers that have an extra state, by its global name."""
    for path, part in parts_in(built_layers(module)):
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield f"{path}.{_EXTRA_STATE_KEY_SUFFIX}", part


def empty_extra_states(module: PipelineModule) -> list[str]:
    """Returns the global names of the empty extra states of this rank's layers. Megatron-core's linear layers have such
    entries and raise an error if a state lacks them."""
    return [name for name, part in with_extra_state(module) if part.get_extra_state() is None]


def tensors_of(layer: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns the parameters and buffers of ``layer``, and the constants of its quantised weights."""
    return [*layer.named_parameters(), *layer.named_buffers(), *constants(layer)]
