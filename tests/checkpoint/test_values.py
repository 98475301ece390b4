"""Values come back from JSON as they were, and nothing else does."""

import json
from collections import Counter, OrderedDict, namedtuple
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.checkpoint.values import UnsupportedValue, decode, encode

TENSOR_TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
ARRAY_TYPES = ["float32", "float64", "int16", "uint32", "bool"]
SHAPES = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def tensors(draw):
    seed, dtype = draw(st.integers(0, 99)), draw(st.sampled_from(TENSOR_TYPES))
    values = torch.randn(draw(SHAPES), generator=torch.Generator().manual_seed(seed)) * 3
    return values.mT.to(dtype) if values.dim() > 1 else values.to(dtype)


@st.composite
def arrays(draw):
    values = numpy.random.default_rng(draw(st.integers(0, 99))).normal(size=draw(SHAPES)) * 3
    return numpy.asarray(values).astype(draw(st.sampled_from(ARRAY_TYPES))).T


COUNTS = st.dictionaries(st.integers(), st.integers(1, 3), max_size=3).map(Counter)
KEYS = st.text(max_size=3) | st.just("type") | st.integers() | st.tuples(st.integers(), st.booleans())
VALUES = st.recursive(
    COUNTS | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | tensors() | arrays(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


def same(one, other):
    """Type and value, to the bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and one.tolist() == other.tolist()
    if isinstance(one, numpy.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return repr(one) == repr(other)


@given(VALUES)
def test_a_value_comes_back_from_json_as_it_was(value):
    assert same(decode(json.loads(json.dumps(encode(value), allow_nan=False))), value)


def test_values_like_these_come_back_as_plain_ones():
    pair = namedtuple("pair", "first second")
    value = [pair(1, 2), OrderedDict(a=1), numpy.float32(0.5), numpy.bool_(True), torch.nn.Parameter(torch.ones(2))]
    back = decode(encode(value))
    assert same(back, [(1, 2), {"a": 1}, 0.5, True, torch.ones(2)])


def test_what_comes_back_can_be_changed():
    tensor, array = decode(encode([torch.ones(2), numpy.ones(2)]))
    tensor += 1
    array += 1
    assert tensor.tolist() == array.tolist() == [2, 2]


@pytest.mark.parametrize(
    "value",
    [b"", {1}, 1j, print, Path("."), Fraction(1, 2), numpy.array(["a"]), numpy.array([None]), {"a": [object()]}],
    ids=lambda value: type(value).__name__,
)
def test_other_types_are_refused(value):
    with pytest.raises(UnsupportedValue, match="a value of type .*; use numbers, strings, tensors, lists and dict"):
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
        {"type": "array", "dtype": "<U1", "shape": [1], "data": "AAAAAA=="},
        {"type": "array", "dtype": "<f4", "shape": [2], "data": "AAAAAA=="},
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
