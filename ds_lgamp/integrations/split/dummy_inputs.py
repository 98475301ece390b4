"""Arguments for the small forward that surveys a model."""

from collections.abc import Mapping
from contextlib import suppress
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.call import Arguments
from ds_lgamp.integrations.split.parts import model_of

_TENSOR = {"shape", "dtype"}
"""The keys of an object that describes a tensor."""
_LABELS = ("label", "labels", "target", "targets", "y")


def given_inputs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that ``dummy_inputs`` of the block describes. Raises ConfigError if it does not."""
    return {name: _value(name, value) for name, value in given.items()}


def _value(name: str, value: Any) -> Any:
    """Returns the value of an argument: a tensor for nested lists of numbers and for an object with a shape, a
    dictionary for any other object, a list for one of objects or texts."""
    if isinstance(value, Mapping) and _TENSOR.isdisjoint(value):
        return {key: _value(f"{name}.{key}", each) for key, each in value.items()}
    if isinstance(value, list) and any(isinstance(each, Mapping | str) for each in value):
        return [_value(f"{name}.{place}", each) for place, each in enumerate(value)]
    try:
        if isinstance(value, list):
            return torch.tensor(value)
        if isinstance(value, Mapping):
            shape, dtype = value["shape"], getattr(torch, value.get("dtype", "float32"))
            return torch.zeros(shape, dtype=dtype)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"{BLOCK}.dummy_inputs.{name} is {value!r}, which makes no tensor; give nested lists of numbers, or an "
            'object such as {"shape": [1, 3, 32, 32], "dtype": "float32"}'
        ) from None
    return value


def inputs_of(model: nn.Module) -> Arguments:
    """Returns the model's own ``dummy_inputs``. If it has none, what it makes of a text by its tokenizer, as models of
    sentence-transformers do; else token ids for the first parameter of its forward, for those without a default, and
    for labels."""
    model = model_of(model)
    own = getattr(model, "dummy_inputs", None)
    if own is not None:
        return (), dict(own)
    if (features := _tokenized(model)) is not None:
        return (features,), {}
    positional: list[Tensor] = []
    named: dict[str, Tensor] = {}
    parameters = list(signature(model.forward).parameters.values())
    takes_any = any(each.kind is Parameter.VAR_POSITIONAL for each in parameters)
    for number, parameter in enumerate(parameters):
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL):
            positional.append(tokens)
        elif takes_any and parameter.kind is Parameter.POSITIONAL_OR_KEYWORD:
            # What follows by position takes its place otherwise.
            positional.append(tokens)
        elif parameter.kind is Parameter.VAR_KEYWORD:
            continue
        elif number == 0 or parameter.default is Parameter.empty or parameter.name in _LABELS:
            named[parameter.name] = tokens
    return tuple(positional), named


def _tokenized(model: Any) -> Mapping[str, Any] | None:
    """Returns what the model's own method makes of a list of texts; None if it has no tokenizer and no such method."""
    if getattr(model, "tokenizer", None) is None:
        return None
    for name in ("preprocess", "tokenize"):
        with suppress(Exception):
            # It may mean something else by this name.
            features = getattr(model, name)(["a text"])
            if isinstance(features, Mapping) and any(isinstance(each, Tensor) for each in features.values()):
                return features
    return None
