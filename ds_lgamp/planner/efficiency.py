"""The fraction of promised rates that is reached."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf, nan


@dataclass(frozen=True)
class Efficiency:
    """What remains of the promised rates. ``python -m benchmarks run planner_fit`` fitted the defaults to published
    runs."""

    matmul: float = 0.801
    """Fraction of the peak that large matrix products reach."""
    dimension: float = 45.9
    """Size of a matrix dimension at which a product reaches half of that."""
    memory: float = 0.868
    """Fraction of the memory bandwidth."""
    launch_seconds: float = 40.8e-6
    """What the host takes to launch a kernel. A GPU that computes faster waits for it."""
    gap_seconds: float = 9.57e-6
    """What a kernel takes beyond its work: it starts, and its last blocks end one by one."""
    inside: float = 0.831
    """Fraction of the bandwidth inside a node."""
    between: float = 0.923
    """Fraction of the bandwidth between nodes."""
    crowding: float = 0.733
    """How much collectives over a part of a node disturb each other: among k of its n GPUs, they reach (k/n)**crowding
    of the bandwidth that one over all n GPUs reaches."""


_MAY_BE_ZERO = ("dimension", "launch_seconds", "gap_seconds", "crowding")


def check_efficiency(changes: Mapping[str, object]) -> dict[str, float]:
    """Returns ``changes`` to the constants. Raises ValueError that names a field that is unknown or out of range."""
    known = [field.name for field in fields(Efficiency)]
    checked = {}
    for name, value in changes.items():
        if name not in known:
            raise ValueError(f"efficiency.{name} is unknown; use {', '.join(known)}")
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else nan
        if not (0 < number < inf or (number == 0 and name in _MAY_BE_ZERO)):
            raise ValueError(f"efficiency.{name} is {value!r}; use a number above 0")
        checked[name] = float(number)
    return checked
