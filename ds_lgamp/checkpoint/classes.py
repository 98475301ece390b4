"""Objects of the user's own classes as names and data: enums, dataclasses and named tuples.

A file names a class. It is looked up among the modules that are imported already, and nothing of it is called: members
of enums are looked up, attributes of dataclasses are written without ``__init__``.
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
    """What an enum member or a dataclass object comes back as where its class is not imported or has changed.

    The fields, of an enum the ``names`` of its members, are attributes. A record is saved as what it stands for, and
    pickled as an ``argparse.Namespace``.
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
    """Where :func:`find` looks for ``kind``."""
    return f"{kind.__module__}:{kind.__qualname__}"


def find(name: str) -> type | None:
    """The class of that name if its module is imported; runs no code of the module, not even its ``__getattr__``."""
    module_name, _, path = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in path.split("."):
        # By type: what stands in for another object may do something when it is asked for its class.
        if issubclass(type(found), ModuleType):
            names = object.__getattribute__(found, "__dict__")
        elif issubclass(type(found), type):
            names = type.__getattribute__(found, "__dict__")
        else:
            return None
        found = names.get(part)
    return found if issubclass(type(found), type) else None


def complaint_about(kind: type) -> str | None:
    """Why an object of the enum or dataclass ``kind`` would not come back; None if it would."""
    if find(name_of(kind)) is not kind:
        return "which cannot be found by its name; define it at the top of a module"
    if not issubclass(kind, Enum) and not _is_plain(kind):
        return "a dataclass that has __call__ or __del__ or extends a built-in type; save its fields instead"
    return None


def members_of(value: Enum) -> list[str] | None:
    """The names that make up ``value``: its own or, of a Flag, those of its parts. None if it has other bits, too."""
    kind, bits = type(value), value._value_
    if value._name_ in kind.__members__:
        return [value._name_]
    parts = {name: part._value_ for name, part in kind.__members__.items()}
    names = [name for name, part in parts.items() if part and part & bits == part]
    return names if _member(kind, names) == value else None


def restored_member(class_name: str, names: list[str]) -> Enum | None:
    """The value of the enum that has these names; None if it is not imported or has changed."""
    kind = find(class_name)
    return _member(kind, names) if kind is not None and issubclass(kind, Enum) else None


def _member(kind: type[Enum], names: list[str]) -> Any:
    members = kind.__members__
    if any(name not in members for name in names) or (len(names) != 1 and not issubclass(kind, Flag)):
        return None
    return reduce(or_, (members[name] for name in names)) if names else kind(0)


def attributes_of(value: Any) -> dict[str, Any]:
    """What an object holds, in ``__dict__`` and in slots."""
    slots = {name: slot for name, slot in _slots(type(value)) if hasattr(value, name)}
    return {**{name: slot.__get__(value) for name, slot in slots.items()}, **getattr(value, "__dict__", {})}


def restored_object(class_name: str, attributes: Mapping[str, Any]) -> Any:
    """An object of the dataclass with these attributes; None if it is not imported or has changed."""
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
    """The named tuple of that class, or a plain one where that is not imported or has changed."""
    kind = find(class_name)
    if kind is not None and is_named_tuple(kind) and list(kind._fields) == fields:  # type: ignore[attr-defined]
        return tuple.__new__(kind, values)
    return tuple(values)


def is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple) and not _acts(kind)


def _is_plain(kind: type) -> bool:
    """Whether attributes are all that an object of ``kind`` is made of, and it does nothing by itself."""
    if _acts(kind):
        return False
    try:
        object.__new__(kind)
    except TypeError:
        return False
    return True


def _acts(kind: type) -> bool:
    """Whether code of ``kind`` would run when an object of it is discarded, or called in the place of a function."""
    return any(name in vars(base) for base in kind.__mro__ for name in ("__call__", "__del__"))


def _slots(kind: type) -> Iterator[tuple[str, Any]]:
    for base in reversed(kind.__mro__):
        yield from ((name, slot) for name, slot in vars(base).items() if isinstance(slot, MemberDescriptorType))
