"""Values that are no tensors of the model as JSON: what is read back is data, never code."""

import base64
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy
import torch

_TAG = "type"
"""Marks a dictionary that stands for another value."""
_ARRAY_KINDS = "biuf"
"""Of NumPy: truth values, integers and floating point."""


class UnsupportedValue(TypeError):
    """A value of a type that has no place in a checkpoint; the message says which."""


def encode(value: Any) -> Any:
    """``value`` as JSON can hold it. Raises UnsupportedValue for other types than None, numbers, strings, tensors,
    arrays and lists, tuples and dictionaries of these."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if isinstance(value, numpy.generic) and not isinstance(value.item(), numpy.generic):
        return encode(value.item())
    if kind is list:
        return [encode(entry) for entry in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "value": [encode(entry) for entry in value]}
    if isinstance(value, torch.Tensor):
        return {_TAG: "tensor", **_encode_tensor(value)}
    if kind is numpy.ndarray and value.dtype.kind in _ARRAY_KINDS:
        return {_TAG: "array", **_encode_array(value)}
    if kind is Counter:
        return {_TAG: "counter", "value": [[encode(key), encode(count)] for key, count in value.items()]}
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: encode(entry) for key, entry in value.items()}
        return {_TAG: "dict", "value": [[encode(key), encode(entry)] for key, entry in value.items()]}
    raise UnsupportedValue(
        f"a value of type {kind.__module__}.{kind.__qualname__}; use numbers, strings, tensors, lists and dictionaries"
    )


def decode(value: Any) -> Any:
    """The value that :func:`encode` made ``value`` of; named tuples and other dictionaries come back as plain ones.
    Raises UnsupportedValue for what it did not make."""
    try:
        return _decode(value)
    except UnsupportedValue:
        raise
    except (AttributeError, KeyError, OverflowError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedValue(f"a value that cannot be decoded ({type(error).__name__}: {error})") from None


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(_TAG)
    if tag is None:
        return {key: _decode(entry) for key, entry in value.items()}
    if tag == "float":
        return float(value["value"])
    if tag == "tuple":
        return tuple(_decode(entry) for entry in value["value"])
    if tag == "counter":
        return Counter({_decode(key): _decode(count) for key, count in value["value"]})
    if tag == "dict":
        return {_decode(key): _decode(entry) for key, entry in value["value"]}
    if tag == "tensor":
        return _decode_tensor(value)
    if tag == "array":
        return _decode_array(value)
    raise UnsupportedValue(f"a value marked as '{tag}', which this release does not know; use the one that wrote it")


def _encode_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().reshape(-1).contiguous()
    data = flat.view(torch.uint8).numpy().tobytes()
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "data": base64.b64encode(data).decode(),
    }


def _decode_tensor(value: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, value["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedValue(f"a tensor of type '{value['dtype']}', which this torch does not have")
    data = bytearray(base64.b64decode(value["data"]))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(value["shape"])


def _encode_array(array: numpy.ndarray) -> dict[str, Any]:
    return {
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "data": base64.b64encode(numpy.ascontiguousarray(array).tobytes()).decode(),
    }


def _decode_array(value: dict[str, Any]) -> numpy.ndarray:
    dtype = numpy.dtype(value["dtype"])
    if dtype.kind not in _ARRAY_KINDS:
        raise UnsupportedValue(f"an array of type '{value['dtype']}', which no array has here")
    flat = numpy.frombuffer(base64.b64decode(value["data"]), dtype=dtype)
    return flat.reshape(value["shape"]).copy()
