"""A plain model as layers, which its engine knows, and its layers as a PipelineModule; and what calls of the model do
while these are on many ranks.

Calls that pass by its engine evaluate, as transformers' Trainer needs. Guards are around the parameters of layers that
other pipeline ranks hold.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, ismethod, signature
from types import MethodType
from typing import Any, NoReturn, Protocol, TypeGuard

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.deepspeed.model.experts import with_groups
from ds_lgamp.integrations.deepspeed.model.module import BESIDE, NAMES_OF_MODEL, PlacedModule
from ds_lgamp.integrations.deepspeed.model.recomputation import layer_sources
from ds_lgamp.integrations.program_spec import refuse_split
from ds_lgamp.integrations.split.call import Arguments, BatchCalls, Call
from ds_lgamp.integrations.split.layers import End, Layers, OwnModelLayers
from ds_lgamp.integrations.split.parts import Tree, find_blocks
from ds_lgamp.integrations.transformers.models import ModelLayers, is_model, planned_names
from ds_lgamp.partition.guard import Guards, NotGatheredError
from ds_lgamp.partition.quantised import free_constants
from ds_lgamp.runtime.recompute import RandomSource


class SequentialLayers(Layers):
    """The layers of an nn.Sequential."""

    def __init__(self, model: nn.Sequential) -> None:
        self.calls, self.modules, self.partition_method = BatchCalls(), list(model), "uniform"

    def arguments(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Arguments:
        if named:
            raise ConfigError(f"engine(...) got {', '.join(named)}, but an nn.Sequential takes no named arguments")
        return positional, {}

    def first_input(self, call: Call) -> Any:
        return call.positional[0] if len(call.positional) == 1 else call.positional

    def loss_of(self, output: Any) -> Tensor:
        if not isinstance(output, Tensor) or output.numel() != 1:
            raise ConfigError(
                f"the last module of the nn.Sequential returned no loss of one element; set {BLOCK}.outputs to 'all' "
                "if the script computes the loss, or append a module that does, and pass labels through the modules"
            )
        return output

    @property
    def compiled(self) -> Iterable[nn.Module]:
        return self.modules


def layers_of(model: nn.Module, random_sources: Sequence[RandomSource], settings: LgampConfig) -> Layers:
    """Returns the layers of ``model``. Raises ConfigError if it has no values, cannot be split, or returns no loss and
    should."""
    _refuse_meta(model)
    if _is_sequence(model):
        refuse_split(settings, "an nn.Sequential")
        if settings.outputs == "loss":
            _refuse_without_loss(model)
        return SequentialLayers(model)
    try:
        return (ModelLayers if is_model(model) else OwnModelLayers)(model, random_sources, settings)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{type(model).__name__} cannot be split, because its forward fails with {type(error).__name__} where its "
            f"blocks do not compute: {error}; let what precedes the blocks take any numbers, in modules outside the "
            f"blocks, set {BLOCK}.dummy_inputs to arguments such as the script's, or remove the {BLOCK} block"
        ) from error


def _refuse_meta(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ConfigError(
                f"parameter {name} is on the meta device and has no values; load them before deepspeed.initialize, or "
                "make the model inside deepspeed.zero.Init in place of OnDevice or torch.device"
            )


def _is_sequence(model: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether ``model`` is an nn.Sequential, and no subclass that computes something else."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def _refuse_without_loss(model: nn.Sequential) -> None:
    """Raises ConfigError if ``model`` cannot return the loss."""
    last: nn.Module = model
    while isinstance(last, nn.Sequential) and len(last):
        last = last[-1]
    if type(last).__module__.startswith("torch.nn.") and not isinstance(last, nn.modules.loss._Loss):
        raise ConfigError(
            f"the last module of the nn.Sequential is {type(last).__name__}, which returns no loss; set "
            f"{BLOCK}.outputs to 'all' if the script computes the loss, or append a module that does"
        )


def needed_to_split(model: nn.Module, settings: LgampConfig) -> Iterator[nn.Parameter]:
    """Yields the parameters whose values :func:`layers_of` reads: of blocks, only those of the first of every kind.
    Raises ConfigError if one has no shape yet."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(
                f"parameter {name} of a lazy module has no shape yet; call the model once before its optimizer is made"
            )
    if _is_sequence(model):
        return model.parameters()
    blocks = find_blocks(model, settings.blocks, planned_names(model))
    needed = {id(parameter) for block in blocks.kinds for parameter in block.parameters()}
    others = {id(parameter) for block in blocks.named.values() for parameter in block.parameters()} - needed
    return (parameter for parameter in model.parameters() if id(parameter) not in others)


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


def in_pipelines(split: nn.Module, model: nn.Module, settings: LgampConfig) -> tuple[Layers, PipelineModule]:
    """Returns the layers of the ``model``, which is split as ``split``, and a PipelineModule of them. Collective over
    all ranks; raises ConfigError where :func:`layers_of` does or the ranks do not fit."""
    with with_groups(model):
        layers = layers_of(split, layer_sources(next(model.parameters()).device), settings)
    return layers, _pipeline_module(layers, _topology_of(layers, settings))


def _topology_of(layers: Layers, settings: LgampConfig) -> PipeDataParallelTopology:
    """Returns the places of all ranks in pipelines. Raises ConfigError if there are too few layers or ranks for
    ``settings.pipeline_ranks``, or if data-parallel ranks shall have different numbers of micro-batches."""
    if settings.data_rank_speeds is not None:
        raise ConfigError(
            f"{BLOCK}.data_rank_speeds is {settings.data_rank_speeds}, but a script that calls engine(...) gives every "
            "rank as many micro-batches; remove it, or make the model a PipelineModule"
        )
    world, ranks, number = dist.get_world_size(), settings.pipeline_ranks or 1, len(layers.modules)
    if world % ranks:
        raise ConfigError(
            f"{BLOCK}.pipeline_ranks is {ranks}, which does not divide the {world} ranks; use a divisor of {world}"
        )
    if ranks > number:
        raise ConfigError(f"{BLOCK}.pipeline_ranks is {ranks}, but the model has {number} layers; use at most as many")
    return PipeDataParallelTopology(num_pp=ranks, num_dp=world // ranks)


def _pipeline_module(layers: Layers, topology: PipeDataParallelTopology) -> PipelineModule:
    specs: list[Any] = list(layers.modules)
    if isinstance(ends := specs[0], End):
        specs[0] = TiedLayerSpec(_ENDS, SharedBeginning, ends, tied_weight_attr=[])
        specs[-1] = TiedLayerSpec(_ENDS, SharedEnd, ends, tied_weight_attr=[])
    module = PipelineModule(specs, topology=topology, partition_method=layers.partition_method)
    setattr(module, NAMES_OF_MODEL, any(isinstance(layer, Tree) for layer in layers.modules))
    module.before_layer = layers.calls.before_layer
    return module


def tell_of_model(module: PlacedModule, model: nn.Module, layers: Layers) -> None:
    """Gives ``module`` what ``model`` has besides its ``layers``: more names of parameters, such as those of tied ones,
    and modules in no layer."""
    trees = (layer for layer in layers.modules if isinstance(layer, Tree))
    inside = {id(parameter): name for tree in trees for name, parameter in tree.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    module.other_names = {name: inside[id(each)] for name, each in named if inside.get(id(each), name) != name}
    in_layers = {id(part) for layer in layers.modules for part in layer.modules()}
    module.beside_layers = [
        (f"{BESIDE}.{path}".rstrip("."), part) for path, part in model.named_modules() if id(part) not in in_layers
    ]


def release(module: nn.Module, own: Collection[int]) -> None:
    """Frees the parameters of ``module`` that are not in ``own``, which holds ids, and their constants."""
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            if id(parameter) not in own:
                free_constants(part)
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


class Elsewhere:
    """Guards the released parameters of ``model``, all but those whose ids are ``own``: functions that need their
    values raise NotGatheredError."""

    def __init__(self, model: nn.Module, own: Collection[int]) -> None:
        released = [(name, each) for name, each in model.named_parameters() if id(each) not in own]
        self._names = {id(parameter): name for name, parameter in released}
        self._guards = Guards((parameter for _, parameter in released), self._refuse)
        self._guards.put()

    @contextmanager
    def unguarded(self) -> Iterator[None]:
        """Inside the block they are parameters without elements."""
        self._guards.lift()
        try:
            yield
        finally:
            self._guards.put()

    def _refuse(self, parameter: Tensor | None) -> NoReturn:
        name = self._names.get(id(parameter), "of the model")
        raise NotGatheredError(
            f"parameter {name} belongs to a layer on another pipeline rank and has no elements on this rank; leave out "
            "parameters without ds_id, or call model.state_dict() on all ranks, which gives rank 0 all values"
        )


class Guide(Protocol):
    """An engine, as far as calls of its model are concerned."""

    has_whole_model: bool
    """Whether modules of the model have all their values for now, on this rank alone."""

    def note_reading(self) -> None:
        """Called when the script evaluates the model by itself."""

    def __call__(self, *positional: Any, **named: Any) -> Any: ...


def evaluate_direct_calls(engine: Guide, model: Any, is_spread: bool) -> Callable[[], None]:
    """Lets the ``engine`` evaluate when ``model`` is called and its layers are ``is_spread`` over ranks.

    Calls that train raise ConfigError: their backward pass would not be a part of the program. See :func:`guide_calls`.
    """
    evaluate = _without_hooks(engine, model) if is_spread else model.forward

    def compute(*positional: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and model.training:
            raise ConfigError(
                f"the model is called directly in training, but with a {BLOCK} block the engine that "
                "deepspeed.initialize or accelerator.prepare returned trains it; call that, or switch the model to "
                "evaluation"
            )
        engine.note_reading()
        return evaluate(*positional, **named)

    return guide_calls(engine, model, compute, is_spread)


def guide_calls(engine: Guide, model: Any, compute: Callable[..., Any], is_spread: bool) -> Callable[[], None]:
    """Lets ``compute`` do what calls of ``model`` do, unless it has all its values for now.

    ``generate`` of a model that is spread raises ConfigError, because the engine keeps no keys and values. Returns a
    function that raises ConfigError if the model has another ``forward`` by then.
    """

    def guided_to(other: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return lambda stock: (
            lambda *positional, **named: (stock if engine.has_whole_model else other)(*positional, **named)
        )

    replace_method(model, "forward", guided_to(compute))
    if is_spread and hasattr(model, "generate"):
        replace_method(model, "generate", guided_to(_refuse_generate))
    guided = model.forward

    def check() -> None:
        if model.forward is not guided:
            raise ConfigError(
                f"the forward of the {type(model).__name__} was replaced after deepspeed.initialize, but with a "
                f"{BLOCK} block the engine computes the one that it had; replace it earlier, or set {BLOCK}.model to "
                "the model inside that it calls"
            )

    return check


def _without_hooks(engine: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """Returns what calls the engine for a call of ``model``, which runs its hooks around that. The engine must not run
    them again."""

    def evaluate(*positional: Any, **named: Any) -> Any:
        own = model._forward_pre_hooks, model._forward_hooks
        model._forward_pre_hooks, model._forward_hooks = OrderedDict(), OrderedDict()
        try:
            return engine(*positional, **named)
        finally:
            model._forward_pre_hooks, model._forward_hooks = own

    return evaluate


def _refuse_generate(*positional: Any, **named: Any) -> Any:
    raise ConfigError(
        f"model.generate is called, but with a {BLOCK} block the weights of the model are spread over several ranks; "
        "save the model with save_pretrained, and generate with the model that from_pretrained loads"
    )


def replace_method(model: Any, name: str, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Lets ``model`` have what ``replacement`` returns for the method ``name`` that it has.

    A copy of the model (``copy.deepcopy``), such as an average of its weights or a frozen reference, has the method as
    it was. So the replacement is a bound method: Python binds that of a copy to the copy.
    """
    stock = getattr(model, name)
    own, new = stock.__func__ if ismethod(stock) else getattr(type(model), name, None), replacement(stock)
    if own is None:
        setattr(model, name, new)
        return

    @wraps(own)
    def method(self: Any, *positional: Any, **named: Any) -> Any:
        return new(*positional, **named) if self is model else own(self, *positional, **named)

    # The Trainer looks at the signature of a model's forward.
    shown = signature(stock)
    itself = Parameter("self", Parameter.POSITIONAL_ONLY)
    method.__signature__ = shown.replace(parameters=[itself, *shown.parameters.values()])  # type: ignore[attr-defined]
    setattr(model, name, MethodType(method, model))
