"""Objects in a forged client state come back without their code, or as plain records."""

import json
import pickle
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, EnumMeta
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from ds_lgamp.checkpoint.classes import Record
from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.values import encode
from ds_lgamp.checkpoint.whole import read_whole
from testing.checkpoints import forge_index
from tests.checkpoint.forging import Attack, forge_text, of_weight, refused

RAN: list[str] = []
"""The methods of the classes below that ran."""


def note(name: str) -> Callable[..., Any]:
    return lambda *_, **__: RAN.append(name)


@dataclass(init=False)
class Busy:
    """A user's dataclass that notes every use of itself. The classes below cover calling and discarding."""

    value: Any
    __init__ = note("init")
    __post_init__ = note("post_init")
    __setattr__ = note("setattr")
    __setstate__ = note("setstate")
    __getattr__ = note("getattr")
    __new__ = note("new")
    hidden = property(note("get"), note("set"))


@dataclass
class Callable_:
    value: Any
    __call__ = note("call")


@dataclass
class Discarded:
    value: Any
    __del__ = note("del")


class Meta(EnumMeta):
    __call__ = note("lookup")
    __getitem__ = note("lookup")


class Careful(Enum, metaclass=Meta):
    ONE = 1


class Ordinary:
    """Not a dataclass."""

    __init__ = note("init")
    __setstate__ = note("setstate")


class Pair(NamedTuple):
    one: Any
    two: Any


class MadePair(Pair):
    __new__ = note("new")


class CalledPair(Pair):
    __call__ = note("call")


def named(kind):
    return f"{__name__}:{kind.__qualname__}"


def client_state_of(checkpoint, value):
    forge_text(checkpoint, json.dumps({"random": {}, "client_state": {"value": value}}).encode())
    return read_whole(checkpoint).client_state["value"]


@pytest.fixture
def nothing_ran():
    RAN.clear()
    yield
    assert not RAN


def test_a_dataclass_comes_back_without_its_code(checkpoint, nothing_ran):
    attributes = {"value": 1, "hidden": 2, "__class__": 3, "__init__": 4}
    made = client_state_of(checkpoint, {"type": "dataclass", "class": named(Busy), "value": attributes})
    assert object.__getattribute__(made, "__dict__") == attributes and type(made) is Busy


@pytest.mark.parametrize(
    "name",
    [
        *map(named, (Ordinary, Callable_, Discarded, Attack, Careful, Pair, Meta)),
        *("builtins:exec", "builtins:type", "subprocess:Popen", "os:system", "sys:modules", "os:path.join"),
        *("torch:nn.Linear", "torch:load", "", ":", "torch", "torch:", "torch:nn.", "a.b:c.d", "..:.", "__main__:"),
        f"{__name__}:test_a_dataclass_comes_back_without_its_code.__globals__.Busy",
        f"{__name__}:Busy.__init__",
        f"{__name__}:Busy.value",
    ],
)
def test_no_other_class_is_made(checkpoint, marker, nothing_ran, name):
    fields = {"value": str(marker), "args": ["touch", str(marker)], "marker": str(marker)}
    made = client_state_of(checkpoint, {"type": "dataclass", "class": name, "value": fields})
    assert made == Record("dataclass", name, fields) and made.args == ["touch", str(marker)]


@pytest.mark.parametrize(
    ("name", "names"),
    [
        (named(Careful), ["TWO"]),
        (named(Careful), ["ONE", "ONE"]),
        (named(Careful), []),
        (named(Careful), ["__class__"]),
        (named(Busy), ["value"]),
        (named(Meta), ["ONE"]),
        ("builtins:dict", ["ONE"]),
        ("enum:Enum", ["ONE"]),
    ],
)
def test_no_other_member_is_found(checkpoint, nothing_ran, name, names):
    made = client_state_of(checkpoint, {"type": "enum", "class": name, "value": {"names": names}})
    assert made == Record("enum", name, {"names": names})


def test_a_member_comes_back_without_a_lookup_of_its_own(checkpoint, nothing_ran):
    written = {"type": "enum", "class": named(Careful), "value": {"names": ["ONE"]}}
    assert client_state_of(checkpoint, written) is Careful.ONE


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (named(CalledPair), ["one", "two"]),
        (named(Pair), ["one", "three"]),
        (named(Busy), ["value"]),
        ("builtins:tuple", []),
        ("builtins:list", []),
    ],
)
def test_no_other_tuple_is_made(checkpoint, nothing_ran, name, fields):
    made = client_state_of(checkpoint, {"type": "named_tuple", "class": name, "fields": fields, "value": [1, 2]})
    assert made == (1, 2) and type(made) is tuple


def test_a_named_tuple_comes_back_without_its_code(checkpoint, nothing_ran):
    written = {"type": "named_tuple", "class": named(MadePair), "fields": ["one", "two"], "value": [1, 2]}
    made = client_state_of(checkpoint, written)
    assert tuple(made) == (1, 2) and type(made) is MadePair


def test_no_module_is_imported(checkpoint, marker, tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    for tag, value in (("dataclass", {"a": 1}), ("enum", {"names": ["a"]})):
        made = client_state_of(checkpoint, {"type": tag, "class": "evil:Settings", "value": value})
        assert made == Record(tag, "evil:Settings", value)
    assert "evil" not in sys.modules


class Lazy(ModuleType):
    """Imports a name when it is asked for, as some libraries do."""

    __getattribute__ = note("import")


def test_a_module_is_not_asked_to_import_more(checkpoint, monkeypatch, nothing_ran):
    lazy = Lazy("lazy")
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    monkeypatch.setattr(torch, "__getattr__", note("import"), raising=False)
    client_state_of(checkpoint, {"type": "dataclass", "class": "lazy:Settings", "value": {}})
    for where in ("dtype", "tensor"):
        with pytest.raises(CheckpointError, match="which this torch does not have"):
            dtype = {"value": "_inductor"} if where == "dtype" else {"dtype": "_inductor", "shape": [0], "data": ""}
            client_state_of(checkpoint, {"type": where, **dtype})
    forge_index(checkpoint, of_weight(dtype="_inductor"))
    refused(checkpoint, "'_inductor' is not a data type of this torch")


def test_what_is_not_imported_travels_on(checkpoint, tmp_path):
    """A program that does not know the classes passes their records on. The command line is such a program."""
    written = {
        "settings": {"type": "dataclass", "class": "absent:Settings", "value": {"rate": 0.5, "fields": [1]}},
        "colours": {"type": "set", "value": [{"type": "enum", "class": "absent:Colour", "value": {"names": ["RED"]}}]},
    }
    client_state = client_state_of(checkpoint, written)
    assert client_state["settings"].rate == 0.5 and client_state["settings"].fields == {"rate": 0.5, "fields": [1]}
    with pytest.raises(AttributeError, match="a record of absent:Settings has no attribute 'other'"):
        _ = client_state["settings"].other
    assert encode(client_state) == written
    assert pickle.loads(pickle.dumps(client_state["settings"])) == Namespace(rate=0.5, fields=[1])
