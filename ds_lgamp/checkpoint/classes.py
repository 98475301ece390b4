"""Stores objects of user classes as names and data: enums, dataclasses and named tuples.

The file names a class. Loading looks the class up among the modules that are already imported and calls none of its
code: it looks members of enums up and writes attributes of dataclasses without ``__init__``.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum, Flag
from functools import reduce
from operator import or_
from types import MemberDescriptorType, ModuleType
from typing import Any


class Record:
    """Replaces an enum member or a dataclass object whose class is not imported or has changed.

    The fields are attributes; an enum has one field, the ``names`` of its members. Saving a record saves the original
    value. Pickling it makes an ``argparse.Namespace``.
    """

    __slots__ = ("class_name", "fields", "tag")

    def __init__(self, tag: str, class_name: str, fields: Mapping[str, Any]) -> None:
        self.tag, self.class_name, self.fields = tag, class_name, dict(fields)

    def __getattr__(self, name: str) -> Any:
        if name in self.fields and not name.startswith("__"):
            return self.fields[name]
        raise AttributeError(f"a record of {self.class_name} has no attribute '{name}'")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and self._all() == other._all()

    def __hash__(self) -> int:
        return hash(self.class_name)

    def __repr__(self) -> str:
        return f"Record{self._all()!r}"

    def _all(self) -> tuple[Any, ...]:
        return self.tag, self.class_name, self.fields

    def __reduce__(self) -> Any:
        return Namespace, (), self.fields


def name_of(kind: type) -> str:
    """The name under which :func:`find` looks up ``kind``."""
    return f"{kind.__module__}:{kind.__qualname__}"


def find(name: str) -> type | None:
    """Returns the class of that name, or None if its module is not imported.

    Runs no code of the module, not even its ``__getattr__``.
    """
    module_name, _, path = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in path.split("."):
        # Checks the type, because a proxy object may run code when asked for its class.
        if issubclass(type(found), ModuleType):
            names = object.__getattribute__(found, "__dict__")
        elif issubclass(type(found), type):
            names = type.__getattribute__(found, "__dict__")
        else:
            return None
        found = names.get(part)
    return found if issubclass(type(found), type) else None


def complaint_about(kind: type) -> str | None:
    """Says why an object of the enum or dataclass ``kind`` could not be loaded again; None if it could."""
    if find(name_of(kind)) is not kind:
        return "which cannot be found by its name; define it at the top of a module"
    if not issubclass(kind, Enum) and not _is_plain(kind):
        return "a dataclass that has __call__ or __del__ or extends a built-in type; save its fields instead"
    return None


def members_of(value: Enum) -> list[str] | None:
    """Returns the names of the members that make up ``value``; None if it has bits that belong to no member.

    A named value has one name. An unnamed Flag has the names of its parts.
    """
    kind, bits = type(value), value._value_
    if value._name_ in kind.__members__:
        return [value._name_]
    parts = {name: part._value_ for name, part in kind.__members__.items()}
    names = [name for name, part in parts.items() if part and part & bits == part]
    return names if _member(kind, names) == value else None


def restored_member(class_name: str, names: list[str]) -> Enum | None:
    """Returns the enum value that has these names; None if the enum is not imported or has changed."""
    kind = find(class_name)
    return _member(kind, names) if kind is not None and issubclass(kind, Enum) else None


def _member(kind: type[Enum], names: list[str]) -> Any:
    members = kind.__members__
    if any(name not in members for name in names) or (len(names) != 1 and not issubclass(kind, Flag)):
        return None
    return reduce(or_, (members[name] for name in names)) if names else kind(0)


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of ``value`` from ``__dict__`` and slots, by name."""
    slots = {name: slot for name, slot in _slots(type(value)) if hasattr(value, name)}
    return {**{name: slot.__get__(value) for name, slot in slots.items()}, **getattr(value, "__dict__", {})}


def restored_object(class_name: str, attributes: Mapping[str, Any]) -> Any:
    """Makes an object of the dataclass with these attributes; None if the dataclass is not imported or has changed."""
    kind = find(class_name)
    if kind is None or not is_dataclass(kind) or not _is_plain(kind):
        return None
    made = object.__new__(kind)
    slots = dict(_slots(kind))
    own = object.__getattribute__(made, "__dict__") if kind.__dictoffset__ else None
    for name, value in attributes.items():
        if name in slots:
            slots[name].__set__(made, value)
        elif own is not None:
            own[name] = value
        else:
            return None
    return made


def restored_tuple(class_name: str, fields: list[str], values: list[Any]) -> tuple[Any, ...]:
    """Makes a named tuple of that class. Returns a plain tuple if the class is not imported or has changed."""
    kind = find(class_name)
    if kind is not None and is_named_tuple(kind) and list(kind._fields) == fields:  # type: ignore[attr-defined]
        return tuple.__new__(kind, values)
    return tuple(values)


def is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple) and not _acts(kind)


def _is_plain(kind: type) -> bool:
    """Whether an object of ``kind`` is its attributes only and runs no code by itself."""
    if _acts(kind):
        return False
    try:
        object.__new__(kind)
    except TypeError:
        return False
    return True


def _acts(kind: type) -> bool:
    """Whether ``kind`` has code that runs when an object is discarded or called in place of a function."""
    return any(name in vars(base) for base in kind.__mro__ for name in ("__call__", "__del__"))


def _slots(kind: type) -> Iterator[tuple[str, Any]]:
    for base in reversed(kind.__mro__):
        yield from ((name, slot) for name, slot in vars(base).items() if isinstance(slot, MemberDescriptorType))
