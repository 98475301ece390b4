"""Calls of a model that pass by its engine."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from ds_lgamp.config import BLOCK, ConfigError

_COMPUTING = ("forward", "generate")
"""The methods of a model that compute with its parameters."""


def refuse_direct_calls(model: Any, is_spread: bool) -> None:
    """Makes calls of ``model`` raise ConfigError that cannot work: all if its layers ``is_spread`` over ranks, else
    those that autograd records, since a backward pass outside of the program would add to its gradients."""
    for name in _COMPUTING:
        if hasattr(model, name):
            setattr(model, name, _refusing(getattr(model, name), name, is_spread))


def _refusing(stock: Callable[..., Any], name: str, is_spread: bool) -> Callable[..., Any]:
    call = "the model" if name == "forward" else f"model.{name}"

    # Trainer looks at the signature of the model's forward.
    @wraps(stock)
    def refusing(*positional: Any, **named: Any) -> Any:
        if is_spread:
            raise ConfigError(
                f"{call} is called directly, but with a {BLOCK} block its layers are on several ranks; call the engine "
                "that deepspeed.initialize or accelerator.prepare returned, on all ranks together"
            )
        if torch.is_grad_enabled():
            raise ConfigError(
                f"{call} is called directly with gradients, which a {BLOCK} block computes in its engine; call the "
                "engine that deepspeed.initialize or accelerator.prepare returned, or use torch.no_grad()"
            )
        return stock(*positional, **named)

    return refusing
