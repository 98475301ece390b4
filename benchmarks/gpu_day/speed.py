"""Benchmark ``gpu``: tokens per second and peak memory beside plain torch and DeepSpeed, at each size."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

from benchmarks import gpu
from benchmarks.gpt.sizes import LARGE, SIZES, TINY
from benchmarks.record import Record


def run(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    fitting = (TINY,) if on_cpu else [name for name in LARGE if SIZES[name].state_bytes < accelerator.total_memory()]
    for name in LARGE if not on_cpu else ():
        if name not in fitting:
            yield name, {"left out": f"its state alone takes {SIZES[name].state_bytes / 1e9:.0f} GB"}
    for record in gpu.records(fitting):
        yield "record", as_result(record)


def as_result(record: Record) -> dict[str, Any]:
    """Returns the whole record, and which of ds_lgamp's runs failed or were not run. Peers may run out of memory."""
    found: dict[str, Any] = json.loads(record.to_json())
    for failure in gpu.failures_of_ours(record):
        key = gpu.NOT_RUN if failure.reason.startswith(gpu.NOT_RUN) else "failure"
        reason = f"{failure.contender} {failure.config['size']}: {failure.reason}"
        found[key] = f"{found[key]}; {reason}" if key in found else reason
    return found
