"""Arguments for the small forward that surveys a model."""

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.call import Arguments
from ds_lgamp.integrations.split.parts import model_of

_LABELS = ("label", "labels", "target", "targets", "y")


def given_inputs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that ``dummy_inputs`` of the block describes. Raises ConfigError if it does not."""
    return {name: _value(name, value) for name, value in given.items()}


def _value(name: str, value: Any) -> Any:
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
    """Returns the model's own ``dummy_inputs``. If it has none, token ids for the first parameter of its forward, for
    those without a default, and for labels."""
    model = model_of(model)
    own = getattr(model, "dummy_inputs", None)
    if own is not None:
        return (), dict(own)
    positional: list[Tensor] = []
    named: dict[str, Tensor] = {}
    for number, parameter in enumerate(signature(model.forward).parameters.values()):
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL):
            positional.append(tokens)
        elif parameter.kind is Parameter.VAR_KEYWORD:
            continue
        elif number == 0 or parameter.default is Parameter.empty or parameter.name in _LABELS:
            named[parameter.name] = tokens
    return tuple(positional), named
