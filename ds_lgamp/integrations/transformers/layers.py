"""A model of transformers as the layers of a pipeline: what precedes the blocks, the blocks, and what follows them."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from torch import Tensor, nn

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.transformers.blocks import find_blocks
from ds_lgamp.integrations.transformers.call import Arguments, Call, Calls, Tree, model_of, without_cache
from ds_lgamp.integrations.transformers.checkpointing import OwnCheckpointing
from ds_lgamp.integrations.transformers.loss_graph import loss_in
from ds_lgamp.integrations.transformers.refusals import refuse_arguments, refuse_model
from ds_lgamp.integrations.transformers.settings import ForwardSettings
from ds_lgamp.integrations.transformers.split import SplitForward
from ds_lgamp.integrations.transformers.survey import survey
from ds_lgamp.runtime.random_state import RandomSource


class Beginning(Tree):
    """What precedes the blocks, such as embeddings. Takes a call, returns hidden states."""

    def __init__(self, modules: Mapping[str, nn.Module], split: SplitForward) -> None:
        super().__init__(modules)
        self._split = split

    def forward(self, call: Call) -> Tensor:
        return self._split.begin(call)


class Block(Tree):
    """A block of the model. Takes and returns hidden states."""

    def __init__(self, path: str, block: nn.Module, index: int, split: SplitForward, calls: Calls) -> None:
        super().__init__({path: block})
        self._index, self._split, self._calls = index, split, calls

    def forward(self, hidden: Tensor) -> Tensor:
        arguments = self._calls.current.block_arguments(self._index, self._split.block_arguments)
        return self._split.run_block(self._index, hidden, arguments)


class End(Tree):
    """What follows the blocks. Takes hidden states, returns the model's output."""

    def __init__(self, modules: Mapping[str, nn.Module], split: SplitForward, calls: Calls) -> None:
        super().__init__(modules)
        self._split, self._calls = split, calls

    def forward(self, hidden: Tensor) -> Any:
        return self._split.finish(self._calls.current, hidden)


class Ends(End):
    """What precedes and what follows the blocks, as one module, because they share parameters. Called, it finishes."""

    def begin(self, call: Call) -> Tensor:
        """Takes a call, returns hidden states."""
        return self._split.begin(call)


class ModelLayers:
    """The layers of a model of transformers.

    Args:
        model: a PreTrainedModel, or one that peft has wrapped.
        random_sources: generators that the model may draw from.
        only_loss: whether only the loss of its output has gradients.

    Raises ConfigError if the model cannot be split.
    """

    def __init__(self, model: nn.Module, random_sources: Sequence[RandomSource], only_loss: bool) -> None:
        refuse_model(model)
        self.settings = ForwardSettings(model_of(model).config)
        blocks = find_blocks(model)
        self._checkpointing = OwnCheckpointing(model)
        self._checkpointing.switch_off()
        shown = survey(model, blocks, random_sources)
        ahead, behind = ({path: model.get_submodule(path) for path in paths} for paths in (shown.ahead, shown.behind))
        self.calls, self.partition_method = Calls(), f"type:^{Block.__name__}$"
        self._blocks = list(blocks.modules)
        self._without_cache = without_cache(model)
        self._names = list(signature(model.forward).parameters)
        shares = shown.read_behind or _share(ahead, behind)
        held = {**ahead, **behind} if shares else behind
        split = SplitForward(model, blocks, ahead, behind, held, shown.returned, random_sources, only_loss)
        own_blocks = [
            Block(f"{blocks.path}.{index}", block, index, split, self.calls)
            for index, block in enumerate(blocks.modules)
        ]
        if shares:
            ends = Ends(held, split, self.calls)
            self.modules: list[nn.Module] = [ends, *own_blocks, ends]
        else:
            self.modules = [Beginning(ahead, split), *own_blocks, End(held, split, self.calls)]

    def arguments(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Arguments:
        """Returns the arguments for a call of the model without a cache of keys and values. Raises ConfigError for
        arguments that a split model cannot take."""
        self._checkpointing.switch_off()
        refuse_arguments({**dict(zip(self._names, positional)), **named})
        return positional, {**named, **self._without_cache}

    def compile(self, **options: Any) -> None:
        """Compiles the blocks with torch.compile's ``options``."""
        for block in self._blocks:
            block.compile(**options)

    @staticmethod
    def first_input(call: Call) -> Call:
        return call

    @staticmethod
    def loss_of(output: Any) -> Tensor:
        """Returns the loss in the model's output. Raises ConfigError if there is none."""
        if not isinstance(output, Mapping):
            raise ConfigError(
                f"the model returned a {type(output).__name__}, whose loss a {BLOCK} block cannot find; return a "
                f"ModelOutput or a dictionary with 'loss' from its forward, or set {BLOCK}.outputs to 'all' if the "
                "script computes the loss"
            )
        loss = loss_in(output)
        if loss is None:
            raise ConfigError(
                f"the model returned no loss; pass labels to the engine, or set {BLOCK}.outputs to 'all' if the script "
                "or a trainer computes the loss (label_smoothing_factor, compute_loss_func, trl)"
            )
        return loss

    @staticmethod
    def training_output(loss: Tensor) -> Any:
        """Returns what the engine returns for a call in training."""
        # Here, because importing transformers takes seconds, and only its models need it.
        from ds_lgamp.integrations.transformers.output import TrainingOutput

        return TrainingOutput(loss=loss)


def _share(ahead: Mapping[str, nn.Module], behind: Mapping[str, nn.Module]) -> bool:
    """Returns whether modules ahead of the blocks share a parameter with modules behind them."""
    first, second = ({id(p) for module in part.values() for p in module.parameters()} for part in (ahead, behind))
    return not first.isdisjoint(second)
