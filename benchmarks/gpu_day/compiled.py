"""Compiled layers beside compiled layers of a bare loop, and both without a compiler; nothing is recomputed."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

from benchmarks.gpt.contenders import BASELINE, Contender, Layered, PlainTorch
from benchmarks.gpt.sizes import SIZES, TINY
from benchmarks.gpu import Trial
from benchmarks.gpu_day.beside import compared
from benchmarks.record import OURS

COMPILED = "compiled"
_KEYS = {"ds_lgamp": {"compile": True}}
CONTENDERS = (
    Contender(BASELINE, PlainTorch),
    Contender(OURS, partial(Layered, stage=3)),
    Contender(f"{BASELINE}, {COMPILED}", partial(PlainTorch, compiled=True)),
    Contender(f"{OURS}, {COMPILED}", partial(Layered, stage=3, more=_KEYS)),
)
SIZES_ON_GPU = ("125M", "1.3B")
"""One whose kernels the host hardly launches in time, and one that computes."""


def run(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    names = (TINY,) if get_accelerator().device_name() == "cpu" else SIZES_ON_GPU
    trials = {name: Trial(SIZES[name], "none") for name in names}
    yield from compared((contender, trials) for contender in CONTENDERS)
