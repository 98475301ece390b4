"""Values return from JSON unchanged. Everything else is refused."""

import json
import random
import types
from argparse import Namespace
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from enum import Enum, Flag, IntEnum, IntFlag, auto
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.checkpoint.values import UnsupportedValue, decode, encode


class Colour(Enum):
    RED = "r"
    GREEN = 2
    SCARLET = "r"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Kind(str, Enum):
    TEXT = "text"


class Access(Flag):
    READ = auto()
    WRITE = auto()
    BOTH = READ | WRITE
    RUN = auto()


class Bits(IntFlag):
    ONE = 1
    FOUR = 4


class Pair(NamedTuple):
    first: Any
    second: Any = None


@dataclass
class Settings:
    name: str
    inner: Any = None
    derived: list = field(init=False)

    def __post_init__(self):
        self.derived = [self.name]
        self.beside = len(self.name)

    class Nested(Enum):
        HERE = 1


@dataclass(frozen=True)
class Frozen:
    value: Any

    def __post_init__(self):
        raise AssertionError("nothing of the class is called")


@dataclass
class Slotted:
    __slots__ = ("left", "right")
    left: Any
    right: Any


@dataclass
class Extended(Slotted):
    """Has both slots and a dictionary."""

    more: Any


def frozen(value):
    made = object.__new__(Frozen)
    made.__dict__["value"] = value
    return made


MEMBERS = [
    *(Colour.RED, Colour.SCARLET, Colour.GREEN, Level.HIGH, Kind.TEXT, Settings.Nested.HERE),
    *(Access.WRITE, Access.BOTH, Access.READ | Access.RUN, Access(0), Bits.ONE | Bits.FOUR),
]
TENSOR_TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
ARRAY_TYPES = ["float32", "float64", ">f4", "int16", "uint32", "bool", "complex64", "<U5", "S3", "M8[s]", "m8[ms]"]
SHAPES = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def tensors(draw):
    seed, dtype = draw(st.integers(0, 99)), draw(st.sampled_from(TENSOR_TYPES))
    values = torch.randn(draw(SHAPES), generator=torch.Generator().manual_seed(seed)) * 3
    return values.mT.to(dtype) if values.dim() > 1 else values.to(dtype)


@st.composite
def arrays(draw):
    values = numpy.random.default_rng(draw(st.integers(0, 99))).normal(size=draw(SHAPES)) * 3
    dtype = draw(st.sampled_from(ARRAY_TYPES))
    return numpy.asarray(values).astype("int64" if dtype[0] in "Mm" else dtype).astype(dtype).T


def scalars():
    return arrays().filter(lambda array: array.size).map(lambda array: array.flat[0])


COUNTS = st.dictionaries(st.integers(), st.integers(1, 3), max_size=3).map(Counter)
PATHS = st.builds(
    lambda kind, text: kind(text), st.sampled_from([Path, PurePosixPath, PureWindowsPath]), st.text("a./", max_size=4)
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text(max_size=5)
TORCH = st.sampled_from([torch.bfloat16, torch.bool, torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 0])])
HASHABLE = PLAIN | PATHS | TORCH | st.sampled_from(MEMBERS) | st.binary(max_size=3) | PLAIN.map(frozen)
KEYS = st.text(max_size=3) | st.just("type") | HASHABLE | st.tuples(st.integers(), st.booleans())


def sets():
    """Draws sets of values that differ in more than their types."""
    return st.lists(HASHABLE, max_size=3, unique_by=repr).map(frozenset)


def containers(inner):
    lists, dicts = st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)
    names = st.dictionaries(st.text("abtype", max_size=4), inner, max_size=3)
    return (
        lists
        | lists.map(tuple)
        | lists.map(deque)
        | lists.map(lambda entries: deque(entries, maxlen=3))
        | dicts
        | dicts.map(OrderedDict)
        | dicts.map(lambda entries: defaultdict(list, entries))
        | names.map(lambda attributes: namespace(Namespace(), attributes))
        | names.map(lambda attributes: namespace(types.SimpleNamespace(), attributes))
        | st.builds(Settings, st.text(max_size=2), inner)
        | st.builds(Slotted, inner, inner)
        | st.builds(Extended, inner, inner, inner)
        | inner.map(frozen)
        | st.builds(Pair, inner, inner)
    )


def namespace(empty, attributes):
    vars(empty).update(attributes)
    return empty


LEAVES = COUNTS | HASHABLE | sets() | sets().map(set) | st.binary().map(bytearray) | tensors() | arrays() | scalars()
VALUES = st.recursive(LEAVES, containers, max_leaves=8)


def same(one, other):
    """Compares type and value, to the bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and one.tolist() == other.tolist()
    if isinstance(one, (numpy.ndarray, numpy.generic)):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other)) and lengths(one) == lengths(other)
    if isinstance(one, (set, frozenset)):
        return sorted(map(shown, one)) == sorted(map(shown, other))
    if isinstance(one, dict):
        factories = getattr(one, "default_factory", None), getattr(other, "default_factory", None)
        return factories[0] is factories[1] and same([*one.items()], [*other.items()])
    if isinstance(one, Slotted):
        ours, theirs = ((each.left, each.right, getattr(each, "__dict__", None)) for each in (one, other))
        return same(ours, theirs)
    if isinstance(one, (Namespace, types.SimpleNamespace, Settings, Frozen)):
        return same(vars(one), vars(other))
    return one is other if isinstance(one, Enum) else repr(one) == repr(other)


def lengths(value):
    return getattr(value, "maxlen", None)


def shown(value):
    return f"{type(value)} {value!r}"


@given(VALUES)
def test_a_value_comes_back_from_json_as_it_was(value):
    assert same(decode(json.loads(json.dumps(encode(value), allow_nan=False))), value)


def test_values_like_these_come_back_as_plain_ones():
    pair = namedtuple("pair", "first second")
    value = [pair(1, 2), UserDict(a=1), defaultdict(lambda: 1, {2: 1}), torch.nn.Parameter(torch.ones(2))]
    assert same(decode(encode(value)), [(1, 2), {"a": 1}, {2: 1}, torch.ones(2)])
    kinds = (type("Text", (str,), {"__str__": repr}), type("Whole", (int,), {}), type("Real", (float,), {}))
    made = [kind(plain) for kind, plain in zip(kinds, ("a", 3, float("inf")))]
    value = [torch.__version__, *made, type("Rows", (list,), {})([1])]
    assert same(decode(encode(value)), [str(torch.__version__), "a", 3, float("inf"), [1]])


def test_states_of_generators_come_back_as_they_take_them():
    generators = [random.Random(3), numpy.random.RandomState(3), numpy.random.default_rng(3)]
    states = [generators[0].getstate(), generators[1].get_state(), generators[2].bit_generator.state]
    drawn = [generator.random() for generator in generators]
    python, legacy, state = decode(json.loads(json.dumps(encode(states))))
    generators[0].setstate(python)
    generators[1].set_state(legacy)
    generators[2].bit_generator.state = state
    assert [generator.random() for generator in generators] == drawn


def schedulers():
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1, momentum=0.9)
    kinds = torch.optim.lr_scheduler
    constant, cosine = kinds.ConstantLR(optimizer), kinds.CosineAnnealingLR(optimizer, numpy.int64(9))
    return [
        *(constant, cosine, kinds.MultiStepLR(optimizer, [2, 2, 5]), kinds.OneCycleLR(optimizer, 0.1, 99)),
        *(
            kinds.CyclicLR(optimizer, 0.1, 0.2),
            kinds.ReduceLROnPlateau(optimizer),
            kinds.LambdaLR(optimizer, lambda step: 1.0),
        ),
        *(kinds.SequentialLR(optimizer, [constant, cosine], [3]), kinds.ChainedScheduler([constant, cosine])),
    ]


@pytest.mark.parametrize("scheduler", schedulers(), ids=lambda scheduler: type(scheduler).__name__)
def test_states_of_schedulers_come_back_as_they_were(scheduler):
    state = scheduler.state_dict()
    assert same(decode(json.loads(json.dumps(encode(state)))), state)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ({"type": "tuple", "value": [1, {"type": "float", "value": "inf"}]}, (1, float("inf"))),
        ({"type": "dict", "value": [[1, 2], ["type", 3]]}, {1: 2, "type": 3}),
        ({"type": "counter", "value": [["a", 2]]}, Counter(a=2)),
        ({"type": "array", "dtype": "<f4", "shape": [1], "data": "AACAPw=="}, numpy.ones(1, "float32")),
        ({"type": "tensor", "dtype": "float32", "shape": [1], "data": "AACAPw=="}, torch.ones(1)),
    ],
    ids=lambda value: str(type(value)),
)
def test_what_the_first_release_wrote_is_read(written, value):
    assert same(decode(written), value)


def test_sets_are_written_in_one_order_in_every_process():
    assert encode({"b", "c", "a", 1})["value"] == ["a", "b", "c", 1]


def test_what_comes_back_can_be_changed():
    tensor, array = decode(encode([torch.ones(2), numpy.ones(2)]))
    tensor += 1
    array += 1
    assert tensor.tolist() == array.tolist() == [2, 2]


@pytest.mark.parametrize(
    "value",
    [print, Colour, Settings, Fraction(1, 2), {"a": [object()]}, numpy.random.default_rng(), torch.Generator()],
    ids=lambda value: type(value).__name__,
)
def test_other_types_are_refused(value):
    with pytest.raises(UnsupportedValue, match="a value of type .*; use numbers, strings, tensors, lists and dict"):
        encode(value)


@dataclass
class Called:
    def __call__(self):
        """A reader that takes the object for a function would run this."""


@dataclass
class Closing:
    def __del__(self):
        """Python runs this when it discards the object."""


@dataclass
class Failing(Exception):
    """Holds more than its attributes."""


def local_dataclass():
    @dataclass
    class Local:
        pass

    return Local()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (numpy.array([None]), "a NumPy value of type object"),
        (numpy.zeros(1, [("a", "f4")]), "a NumPy value of type .*; use numbers or strings"),
        (Called(), "Called, a dataclass that has __call__ or __del__ .*; save its fields instead"),
        (Closing(), "Closing, a dataclass that has"),
        (Failing(), "Failing, a dataclass that has"),
        (local_dataclass(), "Local, which cannot be found by its name; define it at the top of a module"),
        (Enum("Made", "a").a, "Made, which cannot be found by its name"),
        (Bits(8), "Bits, which is not a combination of its members"),
        ({"args": Namespace(model={1: print})}, "^under 'args' under 'model' under 1 a value of type builtins.builtin"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_come_back_is_refused(value, words):
    with pytest.raises(UnsupportedValue, match=words):
        encode(value)


def test_what_contains_itself_is_refused():
    value = Namespace()
    value.self = [value]
    with pytest.raises(UnsupportedValue, match="a value that contains itself"):
        encode(value)


@pytest.mark.parametrize(
    "forged",
    [
        {"type": "object"},
        {"type": ["tuple"]},
        {"type": "tuple"},
        {"type": "tuple", "value": 3},
        {"type": "float", "value": "one"},
        {"type": "dict", "value": [[[], 1]]},
        {"type": "dict", "value": [[1, 2, 3]]},
        {"type": "tensor", "dtype": "load", "shape": [], "data": ""},
        {"type": "tensor", "dtype": 3, "shape": [], "data": ""},
        {"type": "tensor", "dtype": "float32", "shape": [2**62], "data": "AAAAAA=="},
        {"type": "tensor", "dtype": "float32", "shape": [2**70], "data": "AAAAAA=="},
        {"type": "tensor", "dtype": "float32", "shape": "wide", "data": "AAAAAA=="},
        {"type": "tensor", "dtype": "float32", "shape": [1], "data": "AAAA"},
        {"type": "tensor", "dtype": "float32", "shape": [1], "data": "é"},
        {"type": "array", "dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="},
        {"type": "array", "dtype": [["a", "O"]], "shape": [1], "data": "AAAAAAAAAAA="},
        {"type": "array", "dtype": "V4", "shape": [1], "data": "AAAAAA=="},
        {"type": "array", "dtype": "<U0", "shape": [1], "data": ""},
        {"type": "array", "dtype": "<f4", "shape": [2], "data": "AAAAAA=="},
        {"type": "scalar", "dtype": "O", "shape": [], "data": "AAAAAAAAAAA="},
        {"type": "complex", "value": [1, 2, 3]},
        {"type": "bytes", "value": 3},
        {"type": "bytes", "value": "A"},
        {"type": "set", "value": [[]]},
        {"type": "deque", "value": [], "maxlen": -1},
        {"type": "default_dict", "factory": "eval", "value": []},
        {"type": "default_dict", "factory": [], "value": []},
        {"type": "namespace", "value": [1]},
        {"type": "namespace", "value": {"type": "dict", "value": [[1, 2]]}},
        {"type": "path", "class": "object", "value": "a"},
        {"type": "path", "class": "Path", "value": 3},
        {"type": "dtype", "value": "load"},
        {"type": "dtype", "value": []},
        {"type": "device", "value": "the moon"},
        {"type": "size", "value": ["a"]},
        {"type": "enum", "class": 3, "value": {"names": ["RED"]}},
        {"type": "enum", "class": "enum:Enum", "value": {}},
        {"type": "enum", "class": "enum:Enum", "value": []},
        {"type": "dataclass", "class": "os:path", "value": [[1, 2]]},
        {"type": "named_tuple", "class": "os:path", "fields": 3},
        {"type": "record"},
    ],
    ids=str,
)
def test_what_no_value_was_encoded_as_is_refused(forged):
    with pytest.raises(UnsupportedValue):
        decode({"outer": [forged]})


def test_what_is_nested_without_end_is_refused():
    nested: list = []
    for _ in range(10**5):
        nested = [nested]
    with pytest.raises(UnsupportedValue, match="RecursionError"):
        decode(nested)
