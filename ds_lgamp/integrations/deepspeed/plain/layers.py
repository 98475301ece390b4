"""The layers of a plain model, as its engine knows them, and those of an nn.Sequential."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

from torch import Tensor, nn

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.split.call import Arguments, Call, Calls
from ds_lgamp.integrations.split.layers import OwnModelLayers
from ds_lgamp.integrations.split.parts import find_blocks
from ds_lgamp.integrations.transformers.layers import ModelLayers
from ds_lgamp.integrations.transformers.models import ForwardSettings, is_model, planned_names
from ds_lgamp.runtime.recompute import RandomSource


class Layers(Protocol):
    """A model as layers."""

    @property
    def calls(self) -> Calls:
        """The calls of the batch."""
        ...

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The layers in their order. Only the first and the last may be the same module: then they share parameters."""
        ...

    @property
    def partition_method(self) -> str:
        """How the layers are cut into parts of equal weight, in the words of PipelineModule."""
        ...

    @property
    def settings(self) -> ForwardSettings | None:
        """What a forward sets in the model's configuration; None if the model has none."""
        ...

    def arguments(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Arguments:
        """Returns the arguments with which the model is called if the script passes these. Raises ConfigError if the
        model does not take them."""
        ...

    def first_input(self, call: Call) -> Any:
        """Returns what the first layer takes."""
        ...

    def loss_of(self, output: Any) -> Tensor:
        """Returns the loss in what the last layer returned. Raises ConfigError if there is none."""
        ...

    def training_output(self, loss: Tensor) -> Any:
        """Returns what the engine returns for a call in training."""
        ...

    def compile(self, **options: Any) -> None:
        """Compiles what the layers compute with torch.compile's ``options``."""
        ...


class SequentialLayers:
    """The layers of an nn.Sequential."""

    settings = None

    def __init__(self, model: nn.Sequential) -> None:
        self.calls, self.modules, self.partition_method = Calls(), list(model), "uniform"

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

    def training_output(self, loss: Tensor) -> Tensor:
        return loss

    def compile(self, **options: Any) -> None:
        for module in self.modules:
            module.compile(**options)


class Compiled(nn.Module):
    """Stands in for a model whose layers are compiled. The model as a whole is not, because the engine never calls
    it."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self._layers = layers

    def compile(self, *_positional: Any, **options: Any) -> None:
        self._layers.compile(**options)


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
    """Yields the parameters whose values :func:`layers_of` reads: of blocks, only those of the first of every kind."""
    if _is_sequence(model):
        return model.parameters()
    blocks = find_blocks(model, settings.blocks, planned_names(model))
    needed = {id(parameter) for block in blocks.kinds for parameter in block.parameters()}
    others = {id(parameter) for block in blocks.named.values() for parameter in block.parameters()} - needed
    return (parameter for parameter in model.parameters() if id(parameter) not in others)
