"""Replaces parts of a host. Closing the ``ExitStack`` that every function takes puts all of them back together."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any


def replace_attribute(owner: Any, name: str, value: Any, undo: ExitStack) -> None:
    """Sets the attribute ``name`` of a module or class to ``value`` until ``undo`` is closed."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def replace_everywhere(host: str, stock: Callable[..., Any], replacement: Callable[..., Any], undo: ExitStack) -> None:
    """Replaces a function in every module of the package ``host`` that has it under its own name."""
    name = stock.__name__
    for path, module in list(sys.modules.items()):
        if module is not None and path.startswith(f"{host}.") and vars(module).get(name) is stock:
            replace_attribute(module, name, replacement, undo)


def standing_in(stock: Any, instantiate: Callable[..., Any]) -> type:
    """A class to put in the place of the class ``stock``. Instantiating it calls ``instantiate(stock, ...)``."""
    names = {name: getattr(stock, name) for name in ("__module__", "__qualname__", "__doc__")}
    return _StandIn(
        stock.__name__, (stock,), {**names, "_stands_for": stock, "_instantiate": staticmethod(instantiate)}
    )


class _StandIn(type):
    """The metaclass of stand-ins. ``isinstance``, ``issubclass`` and changes of attributes reach the class that a
    stand-in stands for; a user's subclass of a stand-in is an ordinary class."""

    def __call__(cls, *positional: Any, **arguments: Any) -> Any:
        own = vars(cls)
        if "_stands_for" not in own:
            return super().__call__(*positional, **arguments)
        return own["_instantiate"](own["_stands_for"], *positional, **arguments)

    def __instancecheck__(cls, instance: Any) -> bool:
        stands_for = vars(cls).get("_stands_for")
        return isinstance(instance, stands_for) if stands_for else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        stands_for = vars(cls).get("_stands_for")
        return issubclass(subclass, stands_for) if stands_for else super().__subclasscheck__(subclass)

    def __setattr__(cls, name: str, value: Any) -> None:
        stands_for = vars(cls).get("_stands_for")
        setattr(stands_for, name, value) if stands_for else super().__setattr__(name, value)

    def __delattr__(cls, name: str) -> None:
        stands_for = vars(cls).get("_stands_for")
        delattr(stands_for, name) if stands_for else super().__delattr__(name)
