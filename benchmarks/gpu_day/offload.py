"""Tokens per second with optimizer and parameters on the host, beside everything on the device, DeepSpeed and FSDP2, at
several numbers of micro-batches."""

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from deepspeed.accelerator import get_accelerator

from benchmarks.gpt.contenders import Contender
from benchmarks.gpt.offload import CONTENDERS, IN_MEMORY
from benchmarks.gpt.sizes import SIZES, TINY, GptSize
from benchmarks.gpu import NOT_RUN, deviation, measure
from benchmarks.record import OURS

SECONDS = 450
"""For all contenders together."""
MICRO_BATCHES = (16, 4, 1)


def run(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    on_cpu = get_accelerator().device_name() == "cpu"
    deadline = time.monotonic() + SECONDS
    expected: dict[int, list[float]] = {}
    # The most micro-batches first, and ours: if the time ends, peers with few are left out.
    for number in MICRO_BATCHES[1:] if on_cpu else MICRO_BATCHES:
        for contender in CONTENDERS:
            size = SIZES[TINY if on_cpu else "1.3B"]._replace(micro_batches=number, recompute=("full",))
            found = measured(contender, size, deadline, expected.get(number))
            if contender.name == IN_MEMORY and "losses" in found:
                expected[number] = found["losses"]
            yield f"{contender.name}, {number} micro-batches", found


def measured(contender: Contender, size: GptSize, deadline: float, expected: list[float] | None) -> dict[str, Any]:
    """Trains in a process of its own. Only ds_lgamp can fail the part: peers may run out of memory or time."""
    found = dict(measure(contender, size, deadline, None)["full"])
    if "losses" in found:
        rate = size.tokens / median(found["seconds"])
        found = {"tokens per second": rate, "peak bytes": found["peak"], "losses": found["losses"]}
        wrong = deviation(found["losses"], expected) if expected is not None else None
        if wrong:
            found["failure"] = wrong
    if not contender.name.startswith(OURS):
        return {"outcome" if key in ("failure", NOT_RUN) else key: value for key, value in found.items()}
    return found
