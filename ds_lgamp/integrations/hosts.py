"""Checks that an installed host has what an integration builds on, and replaces parts of it.

Every function that replaces something takes an ``ExitStack``. Closing it puts back what was replaced.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any


def missing_names(table: Mapping[str, Sequence[str]]) -> list[str]:
    """The seams of ``table`` that the host lacks, as :func:`seam_label` writes them.

    Args:
        table: the names that must exist in each module or class, by its path.
    """
    return [
        seam_label(owner, name) for owner, names in table.items() for name in names if not hasattr(resolve(owner), name)
    ]


def missing_parameters(table: Mapping[str, Sequence[str]], optional_rest: bool = False) -> list[str]:
    """The functions of ``table`` that the host lacks or that have other parameters.

    Args:
        table: the parameters of each function, in order, by its path.
        optional_rest: whether a function may have more parameters after these, if they have defaults.
    """
    missing = []
    for path, names in table.items():
        function = resolve(path)
        if function is None:
            missing.append(path)
        elif not _takes(function, tuple(names), optional_rest):
            missing.append(f"the parameters of {path.rpartition('.')[2]}")
    return missing


def _takes(function: Any, names: tuple[str, ...], optional_rest: bool) -> bool:
    parameters = list(inspect.signature(function).parameters.values())
    own, rest = parameters[: len(names)], parameters[len(names) :]
    may_follow = optional_rest and all(parameter.default is not parameter.empty for parameter in rest)
    return tuple(parameter.name for parameter in own) == names and (not rest or may_follow)


def resolve(path: str) -> Any:
    """The module, class or function at ``path``; None if there is none."""
    try:
        return importlib.import_module(path)
    except ImportError:
        module, _, name = path.rpartition(".")
        return getattr(resolve(module), name, None) if module else None


def seam_label(owner: str, name: str) -> str:
    """Returns the name of a seam in messages: a class is written without its module."""
    last = owner.rpartition(".")[2]
    return f"{last if last[0].isupper() else owner}.{name}"


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
