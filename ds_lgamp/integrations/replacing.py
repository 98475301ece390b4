"""Replaces functions of Megatron wherever they were imported, and puts them back."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_replaced: list[tuple[ModuleType, Callable[..., Any]]] = []
"""Modules, and what stood in them."""


def replace_everywhere(stock: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """In every module of Megatron that has ``stock`` under its name, imported from elsewhere or not."""
    name = stock.__name__
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("megatron.") and vars(module).get(name) is stock:
            setattr(module, name, replacement)
            _replaced.append((module, stock))


def restore_all() -> None:
    """Undoes every replacement."""
    while _replaced:
        module, stock = _replaced.pop()
        setattr(module, stock.__name__, stock)
