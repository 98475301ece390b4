"""Reads files and their fields, and numbers with units: "25 Gbit/s", "80 GB", "312 TFLOP/s", "5 us", "2.5 USD/h".

Every function that reads raises ValueError that names the field, its value and the fix.
"""

import json
import re
from collections.abc import Collection, Mapping
from math import inf
from pathlib import Path
from typing import Any

_PREFIXES = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z/]*)\s*")


def _units(allowed: Mapping[str, float], prefixes: Mapping[str, float]) -> dict[str, float]:
    return {prefix + unit: factor * size for unit, size in allowed.items() for prefix, factor in prefixes.items()}


_LARGE = {prefix: factor for prefix, factor in _PREFIXES.items() if factor >= 1}
_SMALL = {prefix: factor for prefix, factor in _PREFIXES.items() if factor <= 1 and prefix != "k"}
UNITS: dict[str, dict[str, float]] = {
    "bytes": _units({"B": 1.0}, {**_LARGE, **_BINARY}),
    "bytes per second": _units({"B/s": 1.0, "bit/s": 1 / 8}, {**_LARGE, **_BINARY}),
    "flops per second": _units({"FLOP/s": 1.0}, _LARGE),
    "seconds": {**_units({"s": 1.0}, _SMALL), "min": 60.0, "h": 3600.0, "d": 86400.0},
    "dollars per second": {"USD/h": 1 / 3600, "USD/s": 1.0},
}
"""For each kind of quantity, its units and how many of the base unit each is."""


def parse_quantity(field: str, value: object, kind: str) -> float:
    """Returns ``value``, such as "25 Gbit/s", in the base unit of ``kind``.

    Args:
        field: the name that errors give.
        kind: a key of :data:`UNITS`.

    Raises ValueError if ``value`` has no unit or an unknown one, or is not finite and above 0.
    """
    units = UNITS[kind]
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        example = ", ".join(list(units)[:6])
        raise ValueError(f"{field} is {value!r}; write a number and a unit of {kind}, such as {example}")
    number = float(match[1]) * units[match[2]]
    if not 0 < number < float("inf"):
        raise ValueError(f"{field} is {value!r}; it must be finite and above 0 {kind}")
    return number


def optional_quantity(field: str, value: object, kind: str) -> float | None:
    """Returns what :func:`parse_quantity` does; None for None."""
    return None if value is None else parse_quantity(field, value, kind)


def with_unit(number: float, unit: str) -> str:
    """Returns ``number`` with three digits and a prefix: ``with_unit(2.5e10, "B/s")`` is "25 GB/s"."""
    if number == 0:
        return f"0 {unit}"
    number = float(f"{number:.3g}")
    for prefix, factor in sorted(_PREFIXES.items(), key=lambda item: -item[1]):
        if abs(number) >= factor or (prefix == "n"):
            return f"{number / factor:.3g} {prefix}{unit}"
    return f"{number:g} {unit}"


def read_text(source: str | Path, option: str) -> str:
    """Returns the text of the file ``source``, without the byte order mark that some programs put in front.

    Args:
        option: what names the file, for the sentence if it cannot be read.
    """
    try:
        return Path(source).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(
            f"{option} is '{source}', which cannot be read ({error.strerror}); name another file"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{option} is '{source}', which is no text in UTF-8 ({error.reason}); save it as such"
        ) from None


def read_json(source: str | Path, option: str = "cluster") -> dict[str, Any]:
    """Returns the object in the JSON file ``source``, which ``option`` names."""
    text = read_text(source, option)
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option} is '{source}', which is no JSON: {error}") from error
    except RecursionError:
        raise ValueError(f"{option} is '{source}', which is nested too deeply to read; name another file") from None
    if not isinstance(found, dict):
        raise ValueError(f"{option} is '{source}', which holds no JSON object; name another file")
    return found


def refuse_unknown(prefix: str, text: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuses keys of ``text`` that are not ``known``. ``prefix`` says where it stands, such as ``between.``."""
    for key in text:
        if key not in known:
            raise ValueError(f"{prefix}{key} is unknown; use {', '.join(sorted(known))}")


def section(text: Mapping[str, Any], name: str, known: Collection[str]) -> Mapping[str, Any]:
    """Returns the object at the field ``name``, with ``known`` keys only."""
    found = text.get(name)
    if not isinstance(found, Mapping):
        raise ValueError(f"{name} is {found!r}; write an object with {', '.join(sorted(known))}")
    refuse_unknown(f"{name}.", found, known)
    return found


def count(field: str, value: object) -> int:
    """Returns a whole number from 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{field} is {value!r}; use a whole number from 1")
    return value


def positive(field: str, value: object) -> float:
    """Returns a finite number above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
        raise ValueError(f"{field} is {value!r}; use a number above 0")
    return float(value)


def word(field: str, value: object) -> str:
    """Returns a text without blanks at its ends."""
    if not isinstance(value, str) or not value or value.strip() != value:
        raise ValueError(f"{field} is {value!r}; write a name")
    return value
