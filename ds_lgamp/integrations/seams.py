"""Checks whether an installed host has the names and parameters that an integration builds on."""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any


def missing_names(table: Mapping[str, Sequence[str]]) -> list[str]:
    """The seams of ``table`` that the host lacks, as :func:`label` writes them.

    Args:
        table: the names that must exist in each module or class, by its path.
    """
    return [label(owner, name) for owner, names in table.items() for name in names if not hasattr(resolve(owner), name)]


def missing_parameters(table: Mapping[str, Sequence[str]], optional_rest: bool = False) -> list[str]:
    """The functions of ``table`` that the host lacks or that have other parameters.

    Args:
        table: the parameters of each function, in order, by its path.
        optional_rest: whether a function may have more parameters behind these, if they have defaults.
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


def label(owner: str, name: str) -> str:
    """Returns the name of a seam in messages: a class is written without its module."""
    last = owner.rpartition(".")[2]
    return f"{last if last[0].isupper() else owner}.{name}"
