"""Runs one part in this process, and keeps each result at once: ``python -m benchmarks.gpu_day MODULE OUT``."""

import importlib
import sys
from pathlib import Path

from benchmarks.gpu_day.environment import device_and_nccl
from benchmarks.record import machine, write_json

module, out = sys.argv[1], Path(sys.argv[2])
results: dict[str, dict] = {}
report = {
    "part": module.rpartition(".")[2],
    "status": "running",
    "reason": "",
    "machine": {**machine(), **device_and_nccl()},
    "results": results,
}
for name, found in importlib.import_module(module).run(out):
    results[name] = found
    write_json(out / f"{report['part']}.json", report)
