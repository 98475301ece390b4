"""Numbers with units: "25 Gbit/s", "80 GB", "312 TFLOP/s", "5 us", "2.5 USD/h"."""

import re
from collections.abc import Mapping

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


def with_unit(number: float, unit: str) -> str:
    """Returns ``number`` with three digits and a prefix: ``with_unit(2.5e10, "B/s")`` is "25 GB/s"."""
    if number == 0:
        return f"0 {unit}"
    number = float(f"{number:.3g}")
    for prefix, factor in sorted(_PREFIXES.items(), key=lambda item: -item[1]):
        if abs(number) >= factor or (prefix == "n"):
            return f"{number / factor:.3g} {prefix}{unit}"
    return f"{number:g} {unit}"
