"""Benchmark ``gpu``: tokens per second and peak memory beside plain torch and DeepSpeed, at each size."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

from benchmarks import gpu
from benchmarks.gpt.sizes import LARGE, SIZES, TINY
from benchmarks.record import OURS, Record


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
    """Returns the whole record, and a failure if one of ds_lgamp's runs failed. Peers may run out of memory."""
    failed = [failure for failure in record.failures if failure.contender.startswith(OURS)]
    reasons = [f"{failure.contender} {failure.config['size']}: {failure.reason}" for failure in failed]
    return {**json.loads(record.to_json()), **({"failure": "; ".join(reasons)} if failed else {})}
