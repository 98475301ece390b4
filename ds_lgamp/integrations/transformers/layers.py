"""A model of transformers as the layers of a pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

from torch import Tensor, nn

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.split.call import Arguments
from ds_lgamp.integrations.split.layers import SplitLayers
from ds_lgamp.integrations.split.outputs import NotInTraining
from ds_lgamp.integrations.split.parts import NoRecorder, Original, find_blocks, model_of
from ds_lgamp.integrations.split.state import untouched
from ds_lgamp.integrations.split.survey import survey
from ds_lgamp.integrations.split.trial_arguments import given_inputs
from ds_lgamp.integrations.transformers.models import (
    ROUTERS,
    ForwardSettings,
    OwnCheckpointing,
    attending_anywhere,
    inputs_of,
    planned_names,
    records_routers,
    refuse_arguments,
    refuse_model,
    whole_to_layers,
    without_cache,
)
from ds_lgamp.integrations.transformers.routers import RouterLogits
from ds_lgamp.runtime.recompute import RandomSource


class ModelLayers(SplitLayers):
    """The layers of a model of transformers.

    Args:
        model: a PreTrainedModel, or one that peft has wrapped.
        random_sources: generators that the model may draw from.
        settings: the block.

    Raises ConfigError if the model cannot be split.
    """

    def __init__(self, model: nn.Module, random_sources: Sequence[RandomSource], settings: LgampConfig) -> None:
        refuse_model(model, has_inputs=settings.dummy_inputs is not None)
        self.settings = ForwardSettings(model_of(model).config)
        self._checkpointing = OwnCheckpointing(model)
        self._checkpointing.switch_off()
        self._without_cache = without_cache(model)
        self._names = list(signature(model.forward).parameters)
        self._config, self._records_routers = model_of(model).config, records_routers(model_of(model).config)
        given = settings.dummy_inputs
        dummy = inputs_of(model_of(model)) if given is None else given_inputs(given)
        blocks = find_blocks(model, settings.blocks, planned_names(model))
        recorder = RouterLogits(model) if self._records_routers else NoRecorder()
        original = Original(model, blocks, random_sources, settings, recorder)
        with untouched(model) as before, attending_anywhere(model_of(model)), whole_to_layers(), recorder.learning():
            shown = survey(original, ((), {**dummy, **self._without_cache}))
            super().__init__(original, shown, _loss_in if original.only_loss else None, before)

    def arguments(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Arguments:
        """Returns the arguments for a call of the model without a cache of keys and values. Raises ConfigError for
        arguments that a split model cannot take."""
        self._checkpointing.switch_off()
        given = {**dict(zip(self._names, positional)), **named}
        refuse_arguments(given)
        if not self._records_routers and (given.get(ROUTERS) or records_routers(self._config)):
            raise ConfigError(
                f"{ROUTERS} is on, but was off in the model's config when the engine was made, which decides what "
                f"layers pass on with a {BLOCK} block; set it there before deepspeed.initialize"
            )
        return positional, {**named, **self._without_cache}

    @staticmethod
    def loss_of(output: Any) -> Tensor:
        """Returns the loss in the model's output. Raises ConfigError if there is none."""
        if not isinstance(output, Mapping):
            raise ConfigError(
                f"the model returned a {type(output).__name__}, whose loss a {BLOCK} block cannot find; return a "
                f"ModelOutput or a dictionary with 'loss' from its forward, or set {BLOCK}.outputs to 'all' if the "
                "script computes the loss"
            )
        loss = _loss_in(output)
        if loss is None:
            raise ConfigError(
                f"the model returned no loss; pass labels to the engine, or set {BLOCK}.outputs to 'all' if the script "
                "or a trainer computes the loss (label_smoothing_factor, compute_loss_func, trl)"
            )
        return loss

    @staticmethod
    def training_output(loss: Tensor) -> Any:
        """Returns what the engine returns for a call in training."""
        return _training_output()(loss=loss)


@cache
def _training_output() -> Any:
    """Returns the class of outputs in training."""
    # Here, because importing transformers takes seconds, and only its models need it.
    from transformers.utils import ModelOutput

    @dataclass
    class TrainingOutput(ModelOutput):
        """The loss of a micro-batch. Everything else of a model's output stays on the rank that computed it."""

        loss: Tensor | None = None

        def __getattr__(self, name: str) -> Any:
            raise NotInTraining(f"'loss', not '{name}'")

        def __getitem__(self, key: Any) -> Any:
            if isinstance(key, str) and key not in self:
                raise NotInTraining(f"'loss', not '{key}'")
            return super().__getitem__(key)

        def get(self, key: Any, *default: Any) -> Any:
            """As a dictionary's. Raises NotInTraining for a missing key if the caller expects it, and gives no
            default."""
            return super().get(key, *default) if default else self[key]

    return TrainingOutput


def _loss_in(output: Any) -> Any:
    """Returns the loss in a model's output; None if there is none."""
    return output.get("loss") if isinstance(output, Mapping) else None
