"""Benchmark ``gpu``: tokens per second and peak memory beside plain torch and DeepSpeed, at each size."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

from benchmarks import gpu
from benchmarks.gpt.sizes import LARGE, TINY
from benchmarks.record import OURS, Record


def run(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    sizes = (TINY,) if get_accelerator().device_name() == "cpu" else LARGE
    for record in gpu.records(sizes):
        yield "record", as_result(record)


def as_result(record: Record) -> dict[str, Any]:
    """Returns the whole record, and a failure if one of ds_lgamp's runs failed. Peers may run out of memory."""
    failed = [failure for failure in record.failures if failure.contender.startswith(OURS)]
    reasons = [f"{failure.contender} {failure.config['size']}: {failure.reason}" for failure in failed]
    return {**json.loads(record.to_json()), **({"failure": "; ".join(reasons)} if failed else {})}
