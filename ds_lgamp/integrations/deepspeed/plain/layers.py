"""A plain model as layers, which its engine knows, and its layers as a PipelineModule."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.deepspeed.model.experts import with_groups
from ds_lgamp.integrations.deepspeed.model.module import BESIDE, NAMES_OF_MODEL, PlacedModule
from ds_lgamp.integrations.deepspeed.model.recomputation import layer_sources
from ds_lgamp.integrations.split.call import Arguments, BatchCalls, Call
from ds_lgamp.integrations.split.layers import End, Layers, OwnModelLayers
from ds_lgamp.integrations.split.parts import Tree, find_blocks
from ds_lgamp.integrations.transformers.models import ModelLayers, is_model, planned_names
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
        settings.refuse_split("an nn.Sequential")
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
