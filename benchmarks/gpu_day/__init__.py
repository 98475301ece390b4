"""``python -m benchmarks gpu-day``: what to run first on a machine with a GPU.

A part is a module with a function ``run(out)``. It yields pairs of a name and what was measured under it, and each pair
is kept at once, because the machine may be gone any time. A key ``failure`` in what was measured makes the part fail;
``not run`` says why something could not be measured here. ``out`` is the folder for further files.
"""

from typing import NamedTuple


class Part(NamedTuple):
    """A part of the day."""

    module: str
    seconds: int
    """It is stopped after this time."""

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]


PARTS = (
    Part(f"{__name__}.environment", 120),
    Part(f"{__name__}.stages", 240),
    Part(f"{__name__}.settings", 470),
    Part(f"{__name__}.offload", 475),
    Part(f"{__name__}.offload_large", 475),
    Part(f"{__name__}.speed", 475),
    Part(f"{__name__}.trace", 120),
    Part(f"{__name__}.ranks", 420),
    Part(f"{__name__}.killed", 300),
    Part(f"{__name__}.largest", 475),
    Part(f"{__name__}.recomputation", 475),
    Part(f"{__name__}.compiled", 475),
    Part(f"{__name__}.launches", 475),
    Part(f"{__name__}.vocabulary", 475),
)
"""The most valuable first. A new part is one more entry and its module."""
