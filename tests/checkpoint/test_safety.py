"""A forged checkpoint with correct checksums is refused in one sentence, and its code does not run."""

import io
import json
import pickle
import struct
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, EnumMeta
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from ds_lgamp.checkpoint.classes import Record
from ds_lgamp.checkpoint.errors import CheckpointError
from ds_lgamp.checkpoint.safetensors_files import read_safetensors
from ds_lgamp.checkpoint.values import encode
from ds_lgamp.checkpoint.verify import verify
from ds_lgamp.checkpoint.whole import read_whole
from testing.checkpoints import (
    content,
    example,
    forge_index,
    forge_item,
    forge_metadata,
    forge_state,
    inside,
    items_file,
    tensors_folder,
    written,
)

WEIGHT = "parameters/0.weight"


class Attack:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self):
        return exec, (f"open({self.marker!r}, 'w').close()",)


@pytest.fixture
def marker(tmp_path):
    """Returns the path of a file that the attack would write. Checks at the end that it does not exist."""
    path = tmp_path / "marker"
    yield path
    assert not path.exists()


@pytest.fixture
def checkpoint(tmp_path):
    return written(tmp_path / "run" / "tag")


def refused(checkpoint, words):
    for read in (read_whole, verify):
        with pytest.raises(CheckpointError) as error:
            read(checkpoint)
        said = str(error.value)
        assert words in said and "do not trust this checkpoint" in said and "\n" not in said


def saved(content, pickled=False):
    data = io.BytesIO()
    pickle.dump(content, data) if pickled else torch.save(content, data)
    return data.getvalue()


def test_the_attack_of_these_tests_is_one(tmp_path):
    pickle.loads(pickle.dumps(Attack(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


def test_code_in_the_index_of_dcp_does_not_run(checkpoint, marker):
    """Only other programs read this index, so the checkpoint still loads unchanged."""
    forge_metadata(checkpoint, pickle.dumps(Attack(marker)))
    verify(checkpoint)
    assert content(read_whole(checkpoint)) == content(example())


def test_bytes_in_the_index_of_dcp_are_not_unpickled(checkpoint, marker):
    """The forged index makes the weight a pickled object, which DCP's own reader would unpickle."""
    metadata = FileSystemReader(tensors_folder(checkpoint)).read_metadata()
    metadata.state_dict_metadata[WEIGHT] = BytesStorageMetadata()
    forge_metadata(checkpoint, pickle.dumps(metadata))
    forge_item(checkpoint, WEIGHT, saved(Attack(marker)))
    refused(checkpoint, f"{items_file(checkpoint)} holds no tensor for {WEIGHT}")


@pytest.mark.parametrize("pickled", [False, True])
def test_code_in_the_place_of_a_tensor_does_not_run(checkpoint, marker, pickled):
    forge_item(checkpoint, WEIGHT, saved(Attack(marker), pickled))
    refused(checkpoint, f"{items_file(checkpoint)} holds no tensor for {WEIGHT}")


def test_code_beside_the_numbers_of_a_tensor_does_not_run(checkpoint, marker):
    """Only the numbers are read."""
    forge_item(checkpoint, WEIGHT, saved([torch.ones(3, 4, 5), Attack(marker)]))
    assert read_whole(checkpoint).parameters["0.weight"].eq(1).all()


@pytest.mark.parametrize(
    "item",
    [
        torch.zeros(3, 4, 5).double(),
        torch.zeros(3, 4),
        torch.zeros(3, 4, 6),
        torch.ones(3, 4, 5).to_sparse(),
        torch.zeros(3, 4, 5, device="meta"),
        "text",
    ],
    ids=["type", "dimensions", "shape", "sparse", "meta", "text"],
)
def test_another_item_in_the_place_of_a_tensor_is_refused(checkpoint, item):
    forge_item(checkpoint, WEIGHT, saved(item))
    refused(checkpoint, f"for {WEIGHT}")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04",
        bytes(1000),
        b"archive/data/0" + bytes(240) + b"PK",
        b"\xff\xffarchive/data/0" + bytes(1000),
        b"\0\0archive/data/0" + bytes(239) + b"PK",
        saved(torch.zeros(3, 4, 5), pickled=True),
    ],
    ids=lambda data: repr(data[:20]),
)
def test_bytes_in_the_place_of_a_tensor_are_refused(checkpoint, data):
    forge_item(checkpoint, WEIGHT, data)
    refused(checkpoint, f"holds no tensor for {WEIGHT}")


def of_weight(**changes):
    return lambda index: index["tensors"][WEIGHT].update(changes)


def part_of_weight(position, value):
    def change(index):
        index["tensors"][WEIGHT]["parts"][0][position] = value

    return change


def overlapping_halves(index):
    """Lists columns 0 and 1 of 4 twice and the others not at all."""
    _, _, *rest = index["tensors"][WEIGHT]["parts"][0]
    index["tensors"][WEIGHT]["parts"] = [[[0, column, 0], [3, 2, 5], *rest] for column in (0, 0)]


def without(key):
    return lambda content: {name: value for name, value in content.items() if name != key}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: [], "Input should be an object"),
        (without("tensors"), "tensors: Field required"),
        (lambda index: index.update(tensors=[]), "tensors: "),
        (lambda index: index.update(code="x"), "code: Extra inputs"),
        (of_weight(dtype="load"), "'load' is not a data type of this torch"),
        (of_weight(dtype=3), "dtype: "),
        (of_weight(shape=[2**40, 2**20]), "a part lies outside"),
        (of_weight(shape=[2**70]), "shape.0: "),
        (of_weight(shape=[1] * 10**4), "shape: "),
        (of_weight(shape=[-3, -4, 5]), "shape.0: "),
        (of_weight(shape=[3.0, 4, 5]), "shape.0: "),
        (of_weight(shape=[3, 4, 6]), "its parts have 60 elements of 72"),
        (of_weight(shape=[4, 4, 5]), "its parts have 60 elements of 80"),
        (of_weight(parts=[]), "its parts have 0 elements"),
        (of_weight(shape=[0], parts=[]), "its parts have 0 elements of 0"),
        (of_weight(parts=[["a"]]), "parts.0"),
        (part_of_weight(0, [1, 0, 0]), "a part lies outside"),
        (part_of_weight(1, [3, 2, 5]), "its parts have 30 elements of 60"),
        (part_of_weight(1, [3, 0, 5]), "a part lies outside"),
        (overlapping_halves, "its parts overlap"),
        (part_of_weight(2, "../../secret.distcp"), "parts.0.2: "),
        (part_of_weight(2, "/etc/passwd"), "parts.0.2: "),
        (part_of_weight(2, "a\0.distcp"), "parts.0.2: "),
        (part_of_weight(3, -1), "parts.0.3: "),
        (part_of_weight(4, "all"), "parts.0.4: "),
        (
            lambda index: index["tensors"].update(evil=index["tensors"][WEIGHT]),
            "it has evil, which belongs",
        ),
        (
            lambda index: index["tensors"].update({"ranks/0-1": index["tensors"][WEIGHT]}),
            "it has ranks/0-1, which",
        ),
        (lambda index: index["tensors"].pop(WEIGHT) and None, "it lists parameter 0.weight, but has no tensor of it"),
        (
            lambda index: index["tensors"].update({"parameters/9.weight": index["tensors"][WEIGHT]}),
            "it does not list 9.weight, but has parameters/9.weight with shape [3, 4, 5]",
        ),
        (
            lambda index: index["tensors"].update({"optimizer/9.weight": index["tensors"][WEIGHT]}),
            "it does not list optimizer/9.weight, but has optimizer/9.weight with shape [3, 4, 5]",
        ),
    ],
)
def test_an_odd_index_is_refused(checkpoint, change, words):
    forge_index(checkpoint, change)
    refused(checkpoint, words)


@pytest.mark.parametrize(("position", "value"), [(3, 2**60), (4, 2**60), (4, 10**6), (5, 16 * "0")])
def test_bytes_that_are_not_there_are_refused(checkpoint, position, value):
    forge_index(checkpoint, part_of_weight(position, value))
    with pytest.raises(CheckpointError, match="__0_0.distcp is damaged"):
        read_whole(checkpoint)


def test_a_file_elsewhere_is_not_followed(checkpoint, tmp_path):
    """A link counts as damaged unless it leads to the written bytes."""
    (tmp_path / "secret").write_bytes(b"secret")
    items_file(checkpoint).unlink()
    (tensors_folder(checkpoint) / "__0_0.distcp").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="__0_0.distcp is damaged"):
        read_whole(checkpoint)


STATE_KEYS = (
    *(
        "versions",
        "layout",
        "layers",
        "parameters",
        "optimizer",
        "lr_scheduler",
        "loss_scaler",
        "counters",
        "micro_offset",
    ),
    *("data", "tensors", "index_checksum"),
)


@pytest.mark.parametrize("key", STATE_KEYS)
def test_a_state_without_a_key_is_refused(checkpoint, key):
    forge_state(checkpoint, without(key))
    refused(checkpoint, f"state.json is not what ds_lgamp writes ({key}: Field required)")


@pytest.mark.parametrize("key", STATE_KEYS)
@pytest.mark.parametrize("value", [[[]], "text", -1.5, {"a": {"b": 0}}], ids=repr)
def test_a_state_of_other_types_is_refused(checkpoint, key, value):
    forge_state(checkpoint, lambda state: state.update({key: value}))
    refused(checkpoint, f"state.json is not what ds_lgamp writes ({key}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (inside("tensors", ".."), "tensors: "),
        (inside("tensors", "tensors-../../../secret"), "tensors: "),
        (inside("tensors", "/etc"), "tensors: "),
        (
            inside("parameters/0.weight", {"shape": [2**62, 2**62], "group": 0}),
            "lists 0.weight with shape [4611686018427",
        ),
        (inside("parameters/0.none", {"shape": [2**70, 0], "group": None}), "parameters.0.none.shape.0: "),
        (inside("parameters/0.none", {"shape": [2, 1], "group": None}), "it lists parameter 0.none, but has no tensor"),
        (inside("parameters/0.weight/group", -1), "parameters.0.weight.group: "),
        (inside("layout/data_ranks", 0), "layout.data_ranks: "),
        (inside("layout/data_type", "load"), "'load' is not a data type of this torch"),
        (inside("layers/tied", {"embed": [-1]}), "layers.tied.embed.0: "),
        (inside("data/micro_batches_per_epoch", 0), "data.micro_batches_per_epoch: "),
        (inside("counters/global_steps", "3"), "counters.global_steps: "),
        (inside("counters/global_steps", 10**30), "counters.global_steps: "),
        (inside("optimizer/scalars", []), "it has 1 parameter groups but scalars of 0"),
        (inside("optimizer/groups", [{"lr": {"type": "object"}}]), "it holds a value marked as 'object'"),
        (inside("optimizer/scalars", [{"step": {"type": "tensor"}}]), "it holds a value that cannot be decoded"),
        (inside("lr_scheduler/state", {"type": "tensor"}), "it holds a value that cannot be decoded"),
        (inside("loss_scaler", {"__class__": 0.0}), "loss_scaler.cur_scale: Field required"),
    ],
)
def test_an_odd_state_is_refused(checkpoint, change, words):
    forge_state(checkpoint, change)
    refused(checkpoint, words)


def test_a_state_nested_without_end_is_refused(checkpoint):
    (checkpoint / "state.json").write_text("[" * 10**6)
    with pytest.raises(CheckpointError, match="state.json is damaged"):
        read_whole(checkpoint)


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe",
        b"[" * 10**6,
        b"[]",
        b"{}",
        b'{"random": [], "client_state": {}}',
        b'{"random": {}, "client_state": {"type": "tensor"}}',
        b'{"random": {}, "client_state": {"type": "tuple", "value": []}}',
    ],
    ids=lambda text: repr(text[:60]),
)
def test_an_odd_text_of_a_rank_is_refused(checkpoint, text):
    forge_text(checkpoint, text)
    refused(checkpoint, "ranks/0-0 holds ")


def forge_text(checkpoint, text):
    """Makes ``text`` the record of the first rank."""
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    forge_index(checkpoint, lambda index: index["tensors"]["ranks/0-0"].update(shape=[len(text)]))
    forge_index(checkpoint, lambda index: index["tensors"]["ranks/0-0"]["parts"][0].__setitem__(1, [len(text)]))
    forge_item(checkpoint, "ranks/0-0", saved(values))


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


def safetensors_file(header, data=b""):
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x10",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        safetensors_file(b"no json"),
        safetensors_file(b"[]"),
        safetensors_file(b"\xff\xfe"),
        safetensors_file(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'),
        safetensors_file(b'{"a": {"dtype": "F32", "shape": [4611686018427387904], "data_offsets": [0, 4]}}', bytes(4)),
        safetensors_file(b'{"a": {"dtype": "CODE", "shape": [1], "data_offsets": [0, 4]}}', bytes(4)),
        safetensors_file(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', bytes(4)),
        safetensors_file(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}', bytes(4)),
        safetensors_file(b'{"__metadata__": {"ds_lgamp.buffers": "[3]"}}'),
        safetensors_file(b'{"__metadata__": {"ds_lgamp.buffers": "no json"}}'),
        pickle.dumps(Attack(Path("marker"))),
    ],
    ids=lambda data: repr(data[:70]),
)
def test_a_broken_safetensors_file_is_refused(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(data)
    for source in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(CheckpointError) as error:
            read_safetensors(source)
        assert "model.safetensors cannot be read as a safetensors file (" in str(error.value)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"0.weight": 3}}',
        '{"weight_map": {"0.weight": "../secret.safetensors"}}',
        '{"weight_map": {"0.weight": "/etc/passwd"}}',
        '{"weight_map": {"0.weight": ".."}}',
    ],
)
def test_a_broken_index_of_safetensors_files_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="index.json is not an index of safetensors files"):
        read_safetensors(tmp_path)
