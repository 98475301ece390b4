"""The layers of a plain model, as its engine knows them, and those of an nn.Sequential."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.transformers.blocks import find_blocks
from ds_lgamp.integrations.transformers.call import Arguments, Call, Calls, is_model
from ds_lgamp.integrations.transformers.layers import ModelLayers
from ds_lgamp.integrations.transformers.settings import ForwardSettings
from ds_lgamp.runtime.random_state import RandomSource


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
    """Stands in for a model whose layers are compiled, and not the model as a whole: nobody calls it as a whole."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self._layers = layers

    def compile(self, *_positional: Any, **options: Any) -> None:
        self._layers.compile(**options)


def layers_of(model: nn.Module, random_sources: Sequence[RandomSource], settings: LgampConfig) -> Layers:
    """Returns the layers of ``model``. Raises ConfigError if it is neither a model of transformers nor an
    nn.Sequential, cannot be split, or returns no loss and should."""
    only_loss = settings.outputs == "loss"
    if isinstance(model, nn.Sequential):
        if only_loss:
            _refuse_without_loss(model)
        return SequentialLayers(model)
    if is_model(model):
        return ModelLayers(model, random_sources, only_loss)
    if hasattr(model, "_orig_mod"):
        raise ConfigError(
            f"deepspeed.initialize got a model that torch.compile has wrapped, which hides its layers from a {BLOCK} "
            "block; pass the model itself, and call engine.compile(), or set torch_compile=True in TrainingArguments"
        )
    raise ConfigError(
        f"deepspeed.initialize got a {type(model).__name__}, which a {BLOCK} block cannot split into layers; list its "
        "layers in a PipelineModule or an nn.Sequential"
    )


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


def needed_to_split(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters whose values :func:`layers_of` reads: of blocks, only those of the first."""
    blocks = list(find_blocks(model).modules) if is_model(model) else []
    others = {id(parameter) for block in blocks[1:] for parameter in block.parameters()}
    return (parameter for parameter in model.parameters() if id(parameter) not in others)
