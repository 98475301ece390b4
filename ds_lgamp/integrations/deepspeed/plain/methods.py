"""Replaces methods of one model, not of its copies."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, ismethod, signature
from types import MethodType
from typing import Any


def replace_method(model: Any, name: str, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Lets ``model`` have what ``replacement`` returns for the method ``name`` that it has.

    A copy of the model (``copy.deepcopy``), such as an average of its weights or a frozen reference, has the method as
    it was. So the replacement is a bound method: Python binds that of a copy to the copy.
    """
    stock = getattr(model, name)
    own, new = stock.__func__ if ismethod(stock) else getattr(type(model), name, None), replacement(stock)
    if own is None:
        setattr(model, name, new)
        return

    @wraps(own)
    def method(self: Any, *positional: Any, **named: Any) -> Any:
        return new(*positional, **named) if self is model else own(self, *positional, **named)

    # The Trainer looks at the signature of a model's forward.
    shown = signature(stock)
    itself = Parameter("self", Parameter.POSITIONAL_ONLY)
    method.__signature__ = shown.replace(parameters=[itself, *shown.parameters.values()])  # type: ignore[attr-defined]
    setattr(model, name, MethodType(method, model))
