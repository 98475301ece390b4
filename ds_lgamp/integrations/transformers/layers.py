"""A model of transformers as the layers of a pipeline."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from torch import Tensor, nn

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.split.blocks import find_blocks
from ds_lgamp.integrations.split.call import Arguments
from ds_lgamp.integrations.split.checks import check_parts
from ds_lgamp.integrations.split.dummy_inputs import given_inputs
from ds_lgamp.integrations.split.layers import SplitLayers
from ds_lgamp.integrations.split.parts import model_of
from ds_lgamp.integrations.split.snapshot import untouched
from ds_lgamp.integrations.split.survey import evaluating, survey
from ds_lgamp.integrations.transformers.attention import attending_anywhere
from ds_lgamp.integrations.transformers.checkpointing import OwnCheckpointing
from ds_lgamp.integrations.transformers.dummy_inputs import inputs_of
from ds_lgamp.integrations.transformers.models import planned_names, without_cache
from ds_lgamp.integrations.transformers.refusals import refuse_arguments, refuse_model
from ds_lgamp.integrations.transformers.settings import ForwardSettings
from ds_lgamp.integrations.transformers.sharding import whole_to_layers
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
        given = settings.dummy_inputs
        dummy = inputs_of(model_of(model)) if given is None else given_inputs(given)
        blocks, only_loss = find_blocks(model, settings.blocks, planned_names(model)), settings.outputs == "loss"
        with untouched(model) as before, attending_anywhere(model_of(model)), whole_to_layers():
            shown = survey(model, blocks, ((), {**dummy, **self._without_cache}), random_sources, only_loss)
            super().__init__(model, blocks, shown, random_sources, _loss_in if only_loss else None, settings)
            with evaluating(model, blocks):
                check_parts(self._split, shown, random_sources, (settings.pipeline_ranks or 1) > 1)
            self.compare(model, blocks, shown, random_sources, settings, before)

    def arguments(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Arguments:
        """Returns the arguments for a call of the model without a cache of keys and values. Raises ConfigError for
        arguments that a split model cannot take."""
        self._checkpointing.switch_off()
        refuse_arguments({**dict(zip(self._names, positional)), **named})
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
        # Here, because importing transformers takes seconds, and only its models need it.
        from ds_lgamp.integrations.transformers.output import TrainingOutput

        return TrainingOutput(loss=loss)


def _loss_in(output: Any) -> Any:
    """Returns the loss in a model's output; None if there is none."""
    return output.get("loss") if isinstance(output, Mapping) else None
