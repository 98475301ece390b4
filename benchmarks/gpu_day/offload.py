"""Tokens per second with optimizer and parameters on the host, beside everything on the device, DeepSpeed and FSDP2, at
several numbers of micro-batches."""

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from deepspeed.accelerator import get_accelerator

from benchmarks.gpt.offload import CONTENDERS, IN_MEMORY
from benchmarks.gpt.sizes import SIZES, TINY, GptSize
from benchmarks.gpu import NOT_RUN, Trial, deviation, measure_trials
from benchmarks.record import OURS

SECONDS = 450
"""For all contenders together."""
MICRO_BATCHES = (4, 16, 1)
"""If the time of a contender ends, it is left without the last ones. Peers take very long for 16."""
STEPS = 3
"""Counted steps."""


def run(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    on_cpu = get_accelerator().device_name() == "cpu"
    numbers = (4, 1) if on_cpu else MICRO_BATCHES
    size = SIZES[TINY if on_cpu else "1.3B"]
    # One process for all numbers: it asks the host for memory once.
    trials = {str(number): Trial(size._replace(micro_batches=number), "full", STEPS) for number in numbers}
    deadline = time.monotonic() + SECONDS
    expected: dict[str, list[float]] = {}
    for contender in CONTENDERS:
        for number, found in measure_trials(contender, trials, deadline, limit=SECONDS).items():
            result = as_result(contender.name, trials[number].size, found, expected.get(number))
            if contender.name == IN_MEMORY and "losses" in result:
                expected[number] = result["losses"]
            yield f"{contender.name}, {number} micro-batches", result


def as_result(contender: str, size: GptSize, found: dict[str, Any], expected: list[float] | None) -> dict[str, Any]:
    """Returns what is kept of a run. Only ds_lgamp can fail the part: peers may run out of memory or time."""
    result = {key: value for key, value in found.items() if key in ("failure", NOT_RUN)}
    result |= {"contender": contender, "micro-batches": size.micro_batches}
    if "losses" in found:
        result |= {
            "tokens": size.tokens,
            "seconds": found["seconds"],
            "tokens per second": size.tokens / median(found["seconds"]),
            "peak bytes": found["peak"],
            "losses": found["losses"],
        }
        wrong = deviation(found["losses"], expected) if expected is not None else None
        if wrong:
            result["failure"] = wrong
    if not contender.startswith(OURS):
        return {"outcome" if key in ("failure", NOT_RUN) else key: value for key, value in result.items()}
    return result
