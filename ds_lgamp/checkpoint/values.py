"""Encodes values other than tensors of the model as JSON. Decoding makes data and runs no code."""

import base64
import json
import math
import pathlib
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy
import torch

from ds_lgamp.checkpoint.classes import (
    Record,
    attributes_of,
    complaint_about,
    find,
    is_named_tuple,
    members_of,
    name_of,
    restored_member,
    restored_object,
    restored_tuple,
)
from ds_lgamp.partition.memory import bytes_of

_TAG = "type"
"""Key of a dictionary that encodes another value."""
_ARRAY_KINDS = "biufcmMSU"
"""Kinds of NumPy arrays: booleans, numbers, times and text."""
_PATHS = {kind.__name__: kind for kind in (pathlib.Path, pathlib.PurePosixPath, pathlib.PureWindowsPath)}
_PLAIN: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__, list: list}
"""By built-in type, what makes a plain value of one of a subclass, such as torch.__version__."""
_FACTORIES: dict[str | None, type | None] = {
    None: None,
    **{kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)},
}
"""Default factories that a decoded defaultdict may have."""


class UnsupportedValue(TypeError):
    """A checkpoint cannot hold a value of this type. The message names the type."""


def encode(value: Any) -> Any:
    """Encodes ``value`` as JSON-compatible data.

    Supports None, numbers, strings, bytes, paths, tensors and arrays; lists, tuples, sets, dictionaries and namespaces
    of these; enums and dataclasses that can be found by name. Raises UnsupportedValue for anything else.
    """
    try:
        return _encode(value)
    except RecursionError:
        raise UnsupportedValue("a value that contains itself, or is nested too deeply; save its parts") from None


def decode(value: Any) -> Any:
    """Decodes what :func:`encode` returned.

    Tensors are on the CPU. Subclasses of strings, numbers, lists and dictionaries become the plain classes. If a class
    is not imported, its objects become a :class:`Record` and its named tuples become tuples.

    Raises UnsupportedValue for anything that :func:`encode` does not return.
    """
    try:
        return _decode(value)
    except UnsupportedValue:
        raise
    except (AttributeError, KeyError, OverflowError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedValue(f"a value that cannot be decoded ({type(error).__name__}: {error})") from None


def _encode(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return [_encode(entry) for entry in value]
    if kind in _ENCODERS:
        tag, fields = _ENCODERS[kind]
        return {_TAG: tag, **fields(value)}
    if isinstance(value, torch.Tensor):
        return {_TAG: "tensor", **_tensor_fields(value)}
    if isinstance(value, numpy.generic):
        return {_TAG: "scalar", **_array_fields(numpy.asarray(value))}
    if isinstance(value, Enum):
        return _encode_member(value)
    if isinstance(value, tuple):
        return _encode_tuple(value)
    if isinstance(value, Mapping):
        return _encode_mapping(value)
    if is_dataclass(kind):
        _refuse_if(complaint_about(kind), kind)
        return {_TAG: "dataclass", "class": name_of(kind), "value": _encode_mapping(attributes_of(value))}
    for base in _PLAIN:
        if isinstance(value, base):
            return _encode(_PLAIN[base](value))
    raise UnsupportedValue(
        f"a value of type {kind.__module__}.{kind.__qualname__}; use numbers, strings, tensors, lists and dictionaries"
    )


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(_TAG)
    if tag is None:
        return {key: _decode(entry) for key, entry in value.items()}
    if tag not in _DECODERS:
        raise UnsupportedValue(
            f"a value marked as '{tag}', which this release does not know; use the one that wrote it"
        )
    return _DECODERS[tag](value)


def _refuse_if(complaint: str | None, kind: type) -> None:
    if complaint is not None:
        raise UnsupportedValue(f"a value of type {kind.__module__}.{kind.__qualname__}, {complaint}")


# Containers


def _encode_mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    if all(type(key) is str for key in value) and _TAG not in value:
        return {key: _entry(key, entry) for key, entry in value.items()}
    return {_TAG: "dict", "value": _pairs(value)}


def _pairs(value: Mapping[Any, Any]) -> list[Any]:
    return [[_encode(key), _entry(key, entry)] for key, entry in value.items()]


def _entry(key: Any, value: Any) -> Any:
    try:
        return _encode(value)
    except UnsupportedValue as error:
        raise UnsupportedValue(f"under {key!r} {error}") from None


def _decode_pairs(value: list[Any]) -> dict[Any, Any]:
    return {_decode(key): _decode(entry) for key, entry in value}


def _decode_attributes(value: Any) -> dict[str, Any]:
    attributes = _decode(value)
    if type(attributes) is not dict or not all(type(name) is str for name in attributes):
        raise UnsupportedValue("an object whose attribute names are not strings")
    return attributes


def _with_attributes(namespace: Any, value: dict[str, Any]) -> Any:
    vars(namespace).update(_decode_attributes(value["value"]))
    return namespace


def _encode_default_dict(value: defaultdict[Any, Any]) -> dict[str, Any]:
    """Encodes a plain dictionary if the factory is no built-in type."""
    for name, factory in _FACTORIES.items():
        if factory is value.default_factory:
            return {"factory": name, "value": _pairs(value)}
    return {_TAG: "dict", "value": _pairs(value)}


def _in_one_order(value: set[Any] | frozenset[Any]) -> list[Any]:
    """Sorts the encoded entries, so that every process writes the same order."""
    return sorted((_encode(entry) for entry in value), key=lambda entry: json.dumps(entry, sort_keys=True))


def _encode_tuple(value: tuple[Any, ...]) -> dict[str, Any]:
    kind = type(value)
    encoded = {_TAG: "tuple", "value": [_encode(entry) for entry in value]}
    if is_named_tuple(kind) and find(name_of(kind)) is kind:
        encoded |= {_TAG: "named_tuple", "class": name_of(kind), "fields": list(kind._fields)}  # type: ignore[attr-defined]
    return encoded


def _encode_member(value: Enum) -> dict[str, Any]:
    kind, names = type(value), members_of(value)
    _refuse_if(complaint_about(kind), kind)
    _refuse_if("which is not a combination of its members; use one that is" if names is None else None, kind)
    return {_TAG: "enum", "class": name_of(kind), "value": {"names": names}}


def _decode_member(value: dict[str, Any]) -> Any:
    fields = _decode_attributes(value["value"])
    member = restored_member(value["class"], fields["names"])
    return Record("enum", value["class"], fields) if member is None else member


def _decode_object(value: dict[str, Any]) -> Any:
    attributes = _decode_attributes(value["value"])
    made = restored_object(value["class"], attributes)
    return Record("dataclass", value["class"], attributes) if made is None else made


def _record_fields(value: Record) -> dict[str, Any]:
    return {_TAG: value.tag, "class": value.class_name, "value": _encode_mapping(value.fields)}


# Numbers in memory


def _tensor_fields(tensor: torch.Tensor) -> dict[str, Any]:
    data = bytes_of(tensor.detach().to("cpu").resolve_conj().resolve_neg()).numpy().tobytes()
    return {"dtype": name_of_dtype(tensor.dtype), "shape": list(tensor.shape), "data": _text(data)}


def _decode_tensor(value: dict[str, Any]) -> torch.Tensor:
    dtype = decode_dtype(value["dtype"])
    data = bytearray(base64.b64decode(value["data"]))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    return flat.reshape(value["shape"])


def name_of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def decode_dtype(name: Any) -> torch.dtype:
    # Avoids getattr, because torch imports some attributes on demand.
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedValue(f"a tensor of type '{name}', which this torch does not have")
    return dtype


def _array_fields(array: numpy.ndarray) -> dict[str, Any]:
    if array.dtype.kind not in _ARRAY_KINDS:
        raise UnsupportedValue(f"a NumPy value of type {array.dtype}; use numbers or strings")
    data = numpy.ascontiguousarray(array).tobytes()
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": _text(data)}


def _decode_array(value: dict[str, Any]) -> numpy.ndarray:
    dtype = numpy.dtype(value["dtype"])
    if dtype.kind not in _ARRAY_KINDS:
        raise UnsupportedValue(f"an array of type '{value['dtype']}', which a checkpoint cannot hold")
    flat = numpy.frombuffer(base64.b64decode(value["data"]), dtype=dtype)
    return flat.reshape(value["shape"]).copy()


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _entries(value: Any) -> dict[str, Any]:
    return {"value": [_encode(entry) for entry in value]}


def _decode_entries(value: dict[str, Any]) -> Iterator[Any]:
    return (_decode(entry) for entry in value["value"])


_ENCODERS: dict[type, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    float: ("float", lambda value: {"value": repr(value)}),
    complex: ("complex", lambda value: _entries((value.real, value.imag))),
    bytes: ("bytes", lambda value: {"value": _text(value)}),
    bytearray: ("bytearray", lambda value: {"value": _text(value)}),
    set: ("set", lambda value: {"value": _in_one_order(value)}),
    frozenset: ("frozenset", lambda value: {"value": _in_one_order(value)}),
    deque: ("deque", lambda value: {**_entries(value), "maxlen": value.maxlen}),
    Counter: ("counter", lambda value: {"value": _pairs(value)}),
    OrderedDict: ("ordered_dict", lambda value: {"value": _pairs(value)}),
    defaultdict: ("default_dict", _encode_default_dict),
    Namespace: ("namespace", lambda value: {"value": _encode_mapping(vars(value))}),
    SimpleNamespace: ("simple_namespace", lambda value: {"value": _encode_mapping(vars(value))}),
    type(pathlib.Path()): ("path", lambda value: {"class": "Path", "value": str(value)}),
    pathlib.PurePosixPath: ("path", lambda value: {"class": "PurePosixPath", "value": str(value)}),
    pathlib.PureWindowsPath: ("path", lambda value: {"class": "PureWindowsPath", "value": str(value)}),
    torch.dtype: ("dtype", lambda value: {"value": name_of_dtype(value)}),
    torch.device: ("device", lambda value: {"value": str(value)}),
    torch.Size: ("size", _entries),
    numpy.ndarray: ("array", _array_fields),
    Record: ("record", _record_fields),
}
"""By exact type: the tag, and a function that returns the other fields."""
_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "float": lambda value: float(value["value"]),
    "complex": lambda value: complex(*_decode_entries(value)),
    "bytes": lambda value: base64.b64decode(value["value"]),
    "bytearray": lambda value: bytearray(base64.b64decode(value["value"])),
    "tuple": lambda value: tuple(_decode_entries(value)),
    "named_tuple": lambda value: restored_tuple(value["class"], value["fields"], list(_decode_entries(value))),
    "set": lambda value: set(_decode_entries(value)),
    "frozenset": lambda value: frozenset(_decode_entries(value)),
    "deque": lambda value: deque(_decode_entries(value), value["maxlen"]),
    "counter": lambda value: Counter(_decode_pairs(value["value"])),
    "ordered_dict": lambda value: OrderedDict(_decode_pairs(value["value"])),
    "default_dict": lambda value: defaultdict(_FACTORIES[value["factory"]], _decode_pairs(value["value"])),
    "dict": lambda value: _decode_pairs(value["value"]),
    "namespace": lambda value: _with_attributes(Namespace(), value),
    "simple_namespace": lambda value: _with_attributes(SimpleNamespace(), value),
    "enum": _decode_member,
    "dataclass": _decode_object,
    "path": lambda value: _PATHS[value["class"]](value["value"]),
    "dtype": lambda value: decode_dtype(value["value"]),
    "device": lambda value: torch.device(value["value"]),
    "size": lambda value: torch.Size(_decode_entries(value)),
    "tensor": _decode_tensor,
    "array": _decode_array,
    "scalar": lambda value: _decode_array(value)[()],
}
"""By tag."""
