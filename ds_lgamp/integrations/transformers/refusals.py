"""Refuses what a split model cannot compute: settings of the model, and arguments of a call."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.parts import model_of

_COLLECTED = {
    "output_hidden_states": "the hidden states of every block",
    "output_attentions": "the attention weights of every block",
    "output_router_logits": "the router logits of every block, which its auxiliary loss needs,",
}
"""Switches of transformers, and what they make the model return. It stays on the ranks of the blocks."""


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


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError if a call with these arguments asks for what a split model cannot compute."""
    for name, value in arguments.items():
        if name in _COLLECTED and value:
            raise ConfigError(_collecting(f"the argument {name}", name))
    if arguments.get("past_key_values") is not None:
        raise ConfigError(f"past_key_values is given, but a {BLOCK} block keeps no cache between calls; leave it out")
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
