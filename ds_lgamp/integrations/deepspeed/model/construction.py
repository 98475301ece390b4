"""Constructs a PipelineModule without memory, by ``ds_lgamp.deferred_init()``, or whole inside ``deepspeed.zero.Init``.

Inside ``ds_lgamp.deferred_init()``, the constructor builds every layer of a LayerSpec on torch's meta device. Such a
layer has names, shapes and types, but no values. ``layer_moves.py`` builds each layer for real on the rank that keeps
it.

``zero.Init`` partitions every parameter at once, over all ranks unless it is given a group. No pipeline can train such
a module. Pipeline ranks build different layers and wait for each other. Code that counts the parameters of layers finds
none. DeepSpeed's own pipeline engine multiplies with the empty parameters. So the module is built whole, as if the
context were not there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.zero import partition_parameters
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.model.module import global_names
from ds_lgamp.integrations.deepspeed.model.recomputation import layer_sources
from ds_lgamp.partition.agreement import raise_everywhere
from ds_lgamp.runtime.recompute import undisturbed

_SEED = "_ds_lgamp_deferred_seed"
"""The attribute that marks a module with deferred layers. Its value seeds them if they have no seeds of their own."""
_WRITES_NOTHING = ("requires_grad_", "retain_grad_")


class DeferredParameter(nn.Parameter):
    """A parameter of a layer that is built later. It has a name, a shape and a type, and goes into optimizers. Writing
    values to it raises ConfigError, because they would be lost."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], arguments: tuple = (), options: dict | None = None
    ) -> Any:
        name = function.__name__
        in_place = name.endswith("_") and not name.endswith("__") and name not in _WRITES_NOTHING
        operator = name.startswith("__i") and hasattr(torch.Tensor, f"{name[3:-2]}_")
        sets_data = name == "__set__" and function.__self__ is torch.Tensor.data
        if in_place or operator or sets_data or name == "__setitem__":
            raise ConfigError(
                "a parameter built inside ds_lgamp.deferred_init() has no values before deepspeed.initialize; load or "
                "change weights after it, with engine.load_checkpoint or engine.module.load_state_dict"
            )
        if name == "__get__" and function.__self__ is torch.Tensor.is_meta:
            # torch's trunc_normal_ and load_state_dict would skip a meta tensor silently or with a warning.
            return False
        # Keeps this class for views of the parameter, such as its data.
        return super(nn.Parameter, cls).__torch_function__(function, types, arguments, options)


@contextmanager
def deferred_init() -> Iterator[None]:
    """Makes every PipelineModule constructed inside the block take no memory for the layers of its LayerSpecs."""
    construct = PipelineModule.__init__

    @wraps(construct)
    def construct_deferred(self: PipelineModule, layers: Any, *arguments: Any, **options: Any) -> None:
        _construct(construct, self, list(layers), arguments, options)

    PipelineModule.__init__ = construct_deferred
    try:
        yield
    finally:
        PipelineModule.__init__ = construct


def _construct(construct: Any, module: PipelineModule, layers: list, arguments: tuple, options: dict) -> None:
    """Runs the constructor. Its steps that take or need memory are replaced on the module and the specifications."""
    # torch's generator draws the seed, so that torch.manual_seed decides it and a second module gets other weights.
    seed = 0 if options.get("seed_layers") else int(torch.randint(2**31, (), device="cpu"))
    replaced = {"to": partial(_move, module), "_synchronize_tied_weights": partial(_synchronize, module)}
    specs = [layer for layer in layers if _can_be_built_later(layer)]
    try:
        for spec in specs:
            spec.build = partial(build_without_memory, spec)
        # nn.Module refuses other ways to set attributes before its constructor has run.
        vars(module).update({_SEED: seed, **replaced})
        construct(module, layers, *arguments, **options)
    finally:
        for spec in specs:
            vars(spec).pop("build", None)
        for name in replaced:
            vars(module).pop(name, None)


def _move(module: PipelineModule, *arguments: Any, **options: Any) -> PipelineModule:
    """Runs ``module.to`` on the children that have memory."""
    with showing(module, children_with_memory(module)):
        return nn.Module.to(module, *arguments, **options)


def _synchronize(module: PipelineModule) -> None:
    """Runs stock's broadcast of tied weights on those that have memory."""
    every = module.tied_comms
    module.tied_comms = {key: tied for key, tied in every.items() if key not in deferred_keys(module)}
    PipelineModule._synchronize_tied_weights(module)
    module.tied_comms = every


def is_deferred(module: PipelineModule) -> bool:
    """Returns whether layers of ``module`` are still to be built."""
    return _SEED in vars(module)


def defers(module: PipelineModule, spec: Any) -> bool:
    """Returns whether the layer of ``spec`` is still to be built."""
    return is_deferred(module) and _can_be_built_later(spec)


def _can_be_built_later(spec: Any) -> bool:
    """Returns whether ``spec`` is a LayerSpec without modules and tensors among its arguments. Those have memory
    already."""
    if not isinstance(spec, LayerSpec):
        return False
    given = tree_leaves((spec.module_args, spec.module_kwargs))
    return not any(isinstance(value, (nn.Module, torch.Tensor)) for value in given)


def deferred_keys(module: PipelineModule) -> set[str]:
    """Returns the keys of the tied modules that are still to be built."""
    return {spec.key for spec in module._layer_specs if isinstance(spec, TiedLayerSpec) and defers(module, spec)}


def deferred_seed(module: PipelineModule) -> int:
    """Returns the seed of the layers of a deferred module. Layer i is built under this number plus i."""
    return int(module.base_seed) if module.seed_layers else vars(module)[_SEED]


def end_deferral(module: PipelineModule) -> None:
    """Removes the mark of a deferred module, once all its layers are built."""
    del vars(module)[_SEED]


def build_without_memory(spec: LayerSpec) -> nn.Module:
    """Returns the layer that ``spec`` describes, on the meta device. Consumes no random numbers.

    If the layer's constructor needs the values of tensors, the layer is built for real and its memory freed at once.
    """
    build = type(spec).build
    with undisturbed(layer_sources(torch.device(get_accelerator().current_device_name()))):
        try:
            with torch.device("meta"):
                layer = build(spec)
        except Exception:
            # A constructor may do anything that needs tensors with data, so any error can come.
            layer = build(spec)
    _drop_memory(layer)
    return layer


def _drop_memory(layer: nn.Module) -> None:
    """Replaces parameters and buffers by ones on the meta device. Shared tensors stay shared."""
    replaced: dict[int, torch.Tensor] = {}
    for tensors, name, tensor in places_of_tensors(layer.modules()):
        if id(tensor) not in replaced:
            replaced[id(tensor)] = _without_memory(tensor)
        tensors[name] = replaced[id(tensor)]


def places_of_tensors(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """Returns the parameters and buffers of ``modules``, without those of their children, each with the dictionary that
    holds it and its name there."""
    dictionaries = [tensors for module in modules for tensors in (module._parameters, module._buffers)]
    return [(held, name, tensor) for held in dictionaries for name, tensor in held.items() if tensor is not None]


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    empty = tensor.detach().to("meta")
    if not isinstance(tensor, nn.Parameter):
        return empty
    parameter = DeferredParameter(empty, tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter


def children_with_memory(module: PipelineModule) -> dict[str, nn.Module]:
    """Returns the children of ``module`` by name, without deferred ones."""
    specs, keys = module._layer_specs, deferred_keys(module)
    children = {
        name: child
        for name, child in module._modules.items()
        if not (name.isdecimal() and defers(module, specs[int(name)]))
    }
    if keys:
        tied = {key: layer for key, layer in module.tied_modules.items() if key not in keys}
        children["tied_modules"] = nn.ModuleDict(tied)
    return children


@contextmanager
def showing(module: nn.Module, children: Mapping[str, nn.Module]) -> Iterator[None]:
    """Gives ``module`` these children, and no others, inside the block."""
    own, module._modules = module._modules, dict(children)
    try:
        yield
    finally:
        module._modules = own


_MARKS = {*partition_parameters.Init._convert_to_deepspeed_param.__code__.co_names, "ds_numel_aligned"}
"""Names that include all attributes that zero.Init sets on a parameter."""


def whole_construction(construct: Callable[..., None]) -> Callable[..., None]:
    """Returns the constructor of PipelineModule with ``zero.Init`` suspended, as ``deepspeed.initialize`` suspends it.

    If ``zero.Init`` partitioned layers before the constructor received them, they get their values back.
    """

    @wraps(construct)
    def construct_whole(self: PipelineModule, layers: Iterable[Any], *arguments: Any, **options: Any) -> None:
        layers = list(layers)
        make_whole(_parameters_in(layers))
        context = partition_parameters.top_level_context
        if context is None or not context.patched:
            return construct(self, layers, *arguments, **options)
        constructor = PipelineModule.__init__
        partition_parameters.shutdown_init_context()
        try:
            construct(self, layers, *arguments, **options)
        finally:
            partition_parameters.restore_init_context()
            # The constructor may be that of ds_lgamp.deferred_init(), which zero.Init does not know.
            PipelineModule.__init__ = constructor

    return construct_whole


def gather_partitioned(module: PipelineModule) -> None:
    """Gathers the parameters of ``module`` that ``zero.Init(module=...)`` has partitioned. Collective.

    Raises ConfigError on all ranks if the ranks that share a parameter are not those that have its layer.
    """
    partitioned = {name: tensor for name, tensor in global_names(module) if _is_partitioned(tensor)}
    raise_everywhere(_complaint(module, partitioned), ConfigError)
    make_whole(partitioned.values())


def make_whole(parameters: Iterable[Any]) -> None:
    """Gathers those of ``parameters`` that are partitioned and removes every mark of zero.Init. Collective over the
    ranks that share them."""
    for parameter in parameters:
        if _is_partitioned(parameter):
            parameter.all_gather()
            parameter.data = parameter.data.clone()
            for name in _MARKS & vars(parameter).keys():
                delattr(parameter, name)


def _is_partitioned(tensor: torch.Tensor) -> bool:
    """Returns whether zero.Init partitioned ``tensor``. Parameters of this package's engine have other marks."""
    return hasattr(tensor, "ds_tensor")


def _parameters_in(layers: list[Any]) -> list[nn.Parameter]:
    """Returns the parameters of the modules among ``layers`` and among the arguments of LayerSpecs. The list is the
    same on every rank."""
    found: dict[int, nn.Parameter] = {}
    for layer in layers:
        given = tree_leaves((getattr(layer, "module_args", ()), getattr(layer, "module_kwargs", {})))
        for module in (layer, *given):
            if isinstance(module, nn.Module):
                found.update((id(parameter), parameter) for parameter in module.parameters())
    return list(found.values())


def _complaint(module: PipelineModule, partitioned: dict[str, Any]) -> str | None:
    if module.num_stages == 1:
        return None
    owners = dist.get_process_group_ranks(module._grid.get_data_parallel_group())
    for name, parameter in partitioned.items():
        ranks = dist.get_process_group_ranks(parameter.ds_process_group)
        if ranks != owners:
            return (
                f"deepspeed.zero.Init partitioned parameter {name} over ranks {ranks}, but its pipeline rank has only "
                f"{owners}; build the PipelineModule inside deepspeed.zero.Init or ds_lgamp.deferred_init()"
            )
    return None
