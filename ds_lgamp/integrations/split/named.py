"""What the forwards of a model may read otherwise than from their modules: globals that they name, and attributes of
their classes."""

from collections.abc import Iterator, Sequence
from inspect import unwrap
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn


class Named(NamedTuple):
    """Some of the values in a dictionary."""

    holder: Any
    names: Sequence[str]


def named_globals(model: nn.Module) -> list[Named]:
    """Returns the globals, but functions, classes and modules, that forwards name. Those of torch name none that
    count."""
    found: dict[int, Named] = {}
    for kind in _classes(model):
        forward = unwrap(kind.forward)
        if isinstance(forward, FunctionType):
            held = forward.__globals__
            names = [name for name in dict.fromkeys(_names(forward.__code__)) if _is_state(held.get(name, _names))]
            known = found.get(id(held), Named(held, []))
            found[id(held)] = known._replace(names=[*dict.fromkeys([*known.names, *names])])
    return [each for each in found.values() if each.names]


def class_attributes(model: nn.Module) -> list[Named]:
    """Returns what classes of modules hold, but methods."""
    kinds = {each: None for kind in _classes(model) for each in kind.__mro__ if not _is_torchs(each)}
    named = (Named(vars(kind), [name for name, value in vars(kind).items() if _counts(name, value)]) for kind in kinds)
    return [each for each in named if each.names]


def _classes(model: nn.Module) -> Iterator[type[nn.Module]]:
    return (kind for kind in dict.fromkeys(map(type, model.modules())) if not _is_torchs(kind))


def _is_torchs(kind: type) -> bool:
    return kind is object or kind.__module__.partition(".")[0] == "torch"


def _names(code: CodeType) -> Iterator[str]:
    """Yields the names in code and in functions inside it."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def _is_state(value: Any) -> bool:
    return not callable(value) and not isinstance(value, ModuleType)


def _counts(name: str, value: Any) -> bool:
    descriptors = (property, classmethod, staticmethod)
    return not name.startswith("__") and _is_state(value) and not isinstance(value, descriptors)
