"""Tokens per second with optimizer and parameters on the host, beside everything on the device, DeepSpeed and FSDP2, at
several numbers of micro-batches."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

from benchmarks.gpt.contenders import Contender
from benchmarks.gpt.offload import CONTENDERS
from benchmarks.gpt.sizes import SIZES, TINY
from benchmarks.gpu import Trial
from benchmarks.gpu_day.beside import compared

MICRO_BATCHES = (4, 16, 1)
"""If the time of a contender ends, it is left without the last ones. Peers take very long for 16."""
STEPS = 3
"""Counted steps."""


def run(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from beside_each_other("1.3B", CONTENDERS)


def beside_each_other(name: str, contenders: Sequence[Contender]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Trains the size of that ``name`` with all ``contenders``; on a CPU the tiny one."""
    on_cpu = get_accelerator().device_name() == "cpu"
    numbers = (4, 1) if on_cpu else MICRO_BATCHES
    size = SIZES[TINY if on_cpu else name]
    # One process for all numbers: it asks the host for memory once.
    trials = {
        f"{number} micro-batches": Trial(size._replace(micro_batches=number), "full", STEPS) for number in numbers
    }
    yield from compared((contender, trials) for contender in contenders)
