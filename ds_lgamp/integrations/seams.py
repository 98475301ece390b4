"""Whether an installed host has the places that an integration builds on."""

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def missing_names(table: Mapping[str, Sequence[str]]) -> list[str]:
    """What modules and classes lack of the names that ``table`` gives for them, by last part of the path."""
    return [label(owner, name) for owner, names in table.items() for name in names if not hasattr(resolve(owner), name)]


def missing_parameters(table: Mapping[str, Sequence[str]]) -> list[str]:
    """The functions of ``table``, by path, whose parameters are others than it gives."""
    missing = []
    for path, names in table.items():
        function = resolve(path)
        if function is None:
            missing.append(path)
        elif tuple(inspect.signature(function).parameters) != tuple(names):
            missing.append(f"the parameters of {path.rpartition('.')[2]}")
    return missing


def missing_lookups(table: Mapping[str, Sequence[str]]) -> list[str]:
    """What the functions of ``table``, by path, do not look up by the names it gives when they are called."""
    return [
        lookup_label(name, path)
        for path, names in table.items()
        if (function := resolve(path)) is not None
        for name in names
        if name not in _names_in(inspect.unwrap(function).__code__)
    ]


def resolve(path: str) -> Any:
    """The module, class or function at ``path``; None if there is none."""
    try:
        return importlib.import_module(path)
    except ImportError:
        module, _, name = path.rpartition(".")
        return getattr(resolve(module), name, None) if module else None


def lookup_label(name: str, path: str) -> str:
    return f"the lookup of {name} in {path}"


def label(owner: str, name: str) -> str:
    last = owner.rpartition(".")[2]
    return f"{last if last[0].isupper() else owner}.{name}"


def _names_in(code: Any) -> Iterator[str]:
    """Every global and attribute that a function mentions, functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            yield from _names_in(constant)
