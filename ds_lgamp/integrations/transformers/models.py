"""Models of transformers, perhaps wrapped by peft, as the layers of a pipeline: what they take, what of them cannot be
split, and their settings."""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

from torch import Tensor, nn

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.hosts import replace_attribute
from ds_lgamp.integrations.split.call import Arguments
from ds_lgamp.integrations.split.layers import SplitLayers
from ds_lgamp.integrations.split.outputs import NotInTraining
from ds_lgamp.integrations.split.parts import ByproductRecorder, Original, find_blocks, model_of
from ds_lgamp.integrations.split.state import untouched
from ds_lgamp.integrations.split.survey import survey
from ds_lgamp.integrations.split.trials import given_inputs
from ds_lgamp.integrations.transformers.routers import RouterLogits
from ds_lgamp.runtime.recompute import RandomSource


def is_model(model: Any) -> bool:
    """Returns whether ``model`` is one of transformers, perhaps wrapped by peft."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model_of(model), transformers.PreTrainedModel)


def without_cache(model: Any) -> dict[str, Any]:
    """Returns the arguments that keep the model's forward from caching keys and values."""
    own = model_of(model)
    parameters = signature(own.forward).parameters
    # Some heads, and models of images and text, pass all other arguments on to a model that caches.
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    passed_on = takes_all and hasattr(own.config.get_text_config(), "use_cache")
    return {"use_cache": False} if "use_cache" in parameters or passed_on else {}


def planned_names(model: Any) -> set[str]:
    """Returns the names in the pipeline plan of the model's configuration."""
    config = getattr(model_of(model), "config", None)
    return set(getattr(config, "base_model_pp_plan", None) or ())


def inputs_of(model: Any) -> Mapping[str, Tensor]:
    """Returns arguments that the forward of ``model``, which is one of transformers, takes: its ``dummy_inputs``. Of
    those that transformers gives to every model, one row, also for a decoder beside an encoder, with one choice if the
    model chooses between several."""
    # Here, because importing transformers takes seconds, and only its models need it.
    from transformers import PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES

    inputs = model.dummy_inputs
    if type(model).dummy_inputs is not PreTrainedModel.dummy_inputs:
        return inputs
    # Several rows need a padding token in a head that classifies the last token.
    rows = {name: value[:1] for name, value in inputs.items()}
    if getattr(model.config, "is_encoder_decoder", False):
        rows["decoder_input_ids"] = rows["input_ids"]
    choosing = set(MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES.values())
    if choosing.isdisjoint(each.__name__ for each in type(model).__mro__):
        return rows
    return {name: value[None] for name, value in rows.items()}


ROUTERS = "output_router_logits"
"""The switch for the logits of routers, which a split model can return."""
_COLLECTED = {
    "output_hidden_states": "the hidden states of every block",
    "output_attentions": "the attention weights of every block",
}
"""Switches of transformers, and what they make the model return. It stays on the ranks of the blocks."""
_CACHES = ("cache", "past_key_values", "cache_params")
"""What arguments for a cache are called, the first since release 5.24."""


def refuse_model(model: Any, has_inputs: bool) -> None:
    """Raises ConfigError if the model's configuration asks for what a split model cannot compute.

    Args:
        has_inputs: whether the block gives dummy inputs.
    """
    name = type(model_of(model)).__name__
    taken = getattr(model_of(model), "main_input_name", "input_ids")
    if taken != "input_ids" and not has_inputs:
        raise ConfigError(f"{name} takes {taken}; set {BLOCK}.dummy_inputs to small arguments that it takes")
    for config in _configs(model_of(model).config):
        for key in _COLLECTED:
            # Some are properties.
            if getattr(config, key, False):
                raise ConfigError(_collecting(f"{key} of {name}'s config", key))
        for key, value in vars(config).items():
            if key.endswith("layerdrop") and value:
                raise ConfigError(f"{key} of {name}'s config is {value}; with a {BLOCK} block, set it to 0")
        if getattr(config, "return_dict", True) is False:
            raise ConfigError(_tuple(f"return_dict of {name}'s config"))


def records_routers(config: Any) -> bool:
    """Whether a model's configuration asks for the logits of routers."""
    return any(getattr(each, ROUTERS, False) for each in _configs(config))


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError if a call with these arguments asks for what a split model cannot compute."""
    for name, value in arguments.items():
        if name in _COLLECTED and value:
            raise ConfigError(_collecting(f"the argument {name}", name))
    for name in _CACHES:
        if arguments.get(name) is not None:
            raise ConfigError(f"{name} is given, but a {BLOCK} block keeps no cache between calls; leave it out")
    if arguments.get("return_dict") is False:
        raise ConfigError(_tuple("the argument return_dict"))
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.requires_grad:
            raise ConfigError(
                f"the argument {name} requires gradients, but a {BLOCK} block returns none to the script; detach it"
            )


def _configs(config: Any) -> Iterator[Any]:
    """Yields a configuration and those inside it."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        if (inner := getattr(config, name, None)) is not None:
            yield from _configs(inner)


def _collecting(what: str, name: str) -> str:
    return f"{what} is on, but with a {BLOCK} block {_COLLECTED[name]} stay on other ranks; switch it off"


def _tuple(what: str) -> str:
    return f"{what} is False, but with a {BLOCK} block models return their output by name; leave it out"


Setting = str | int | float | bool | None


class ForwardSettings:
    """The plain values of a configuration that a forward sets; ``config`` has had none so far. Only ranks that run the
    code after the blocks see that."""

    def __init__(self, config: Any) -> None:
        self._config, self._before = config, _plain(config)

    def changed(self) -> dict[str, Setting]:
        """Returns the values by name that were set since this object was made."""
        missing = object()
        return {name: value for name, value in _plain(self._config).items() if self._before.get(name, missing) != value}

    def take(self, changed: Mapping[str, Setting]) -> None:
        """Sets what a forward has set on another rank."""
        for name, value in changed.items():
            setattr(self._config, name, value)


def _plain(config: Any) -> dict[str, Setting]:
    return {
        name: value for name, value in vars(config).items() if not name.startswith("_") and isinstance(value, Setting)
    }


_ATTENTION = "_attn_implementation_internal"
"""The attribute of a configuration that names the attention."""


@contextmanager
def attending_anywhere(model: Any) -> Iterator[None]:
    """Switches the model inside the block to an attention that runs on every device and dtype, and on inputs of any
    size. Flash attention does not, nor does one that DeepSpeed's Ulysses has put into the place of another."""
    configs = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}.values()
    anywhere = ("sdpa", "eager") if _is_own("sdpa") else ("eager",)
    with ExitStack() as undo:
        for config in configs:
            if getattr(config, _ATTENTION, None) not in (None, *anywhere):
                replace_attribute(config, _ATTENTION, anywhere[0] if model._supports_sdpa else "eager", undo)
        yield


def _is_own(name: str) -> bool:
    """Whether an attention of transformers is the one that it came with."""
    # Here, because importing transformers takes seconds, and only its models need it.
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[name].__module__.startswith("transformers.")


logger = logging.getLogger(__name__)


class OwnCheckpointing:
    """The model's own activation checkpointing, which scripts may enable at any time."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[Any] = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self._has_logged = False

    def switch_off(self) -> None:
        """Switches it off. Logs that once."""
        enabled = [module for module in self._modules if module.gradient_checkpointing]
        for module in enabled:
            module.gradient_checkpointing = False
        if enabled and not self._has_logged:
            self._has_logged = True
            logger.warning(
                f"the model's activation checkpointing is switched off: {BLOCK}.recompute decides what is recomputed"
            )


@contextmanager
def whole_to_layers() -> Iterator[None]:
    """Inside the block, transformers' ``is_deepspeed_zero3_enabled`` returns False, because layers get whole weights.

    If it returned True, code such as the fused heads of trl would read the attributes of a ZeRO-3 parameter from a
    weight. In a backward pass the weight is a tensor without them, which autograd makes of a parameter that it saved
    through hooks.
    """
    with ExitStack() as undo:
        module = sys.modules.get("transformers.integrations.deepspeed")
        if module is not None:
            # What the function reads, which others have imported by name.
            replace_attribute(module, "_hf_deepspeed_config_weak_ref", None, undo)
        yield


class ModelLayers(SplitLayers):
    """The layers of a model of transformers, which peft may have wrapped.

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
        recorder = RouterLogits(model) if self._records_routers else ByproductRecorder()
        original = Original(model, blocks, random_sources, settings, recorder)
        with untouched(model) as before, attending_anywhere(model_of(model)), whole_to_layers(), recorder.learning():
            shown = survey(original, ((), {**dummy, **self._without_cache}))
            super().__init__(original, shown, _loss_in if original.only_loss else None, before)

    def arguments(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Arguments:
        self._checkpointing.switch_off()
        given = {**dict(zip(self._names, positional)), **named}
        refuse_arguments(given)
        if not self._records_routers and (given.get(ROUTERS) or records_routers(self._config)):
            raise ConfigError(
                f"{ROUTERS} is on, but was off in the model's config when the engine was made, which decides what "
                f"layers pass on with a {BLOCK} block; set it there before deepspeed.initialize"
            )
        return positional, {**named, **self._without_cache}

    def loss_of(self, output: Any) -> Tensor:
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

    def training_output(self, loss: Tensor) -> Any:
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
