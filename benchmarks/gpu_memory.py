"""Compares the peaks of memory that were measured on a GPU with what ``ds_lgamp run --explain`` says of them without
one: ``python -m benchmarks run gpu_memory``.
"""

import json
import sys
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks import ON_ACCELERATOR
from benchmarks.gpt.offload import ALL, IN_MEMORY, ON_HOST, OPTIMIZER, OPTIMIZER_ON_HOST
from benchmarks.gpu_day.findings import NAME as GPU_DAY
from benchmarks.record import OURS, ROOT, Record, Row, begin, read
from testing.launching import ON_CPU
from testing.launching import run as output_of

NAME = "gpu_memory"
METRICS = EXPLAINED, RATIO = "explained", "measured / explained"
LIMIT = 0.01
OFFLOADED = {IN_MEMORY: (), ON_HOST: ALL, OPTIMIZER_ON_HOST: (OPTIMIZER,)}
"""The trainings of the part ``offload``, of the 1.3 B GPT at ZeRO-3, with what they keep on the host."""


class Training(NamedTuple):
    """What ``--explain`` is asked for."""

    size: str
    recompute: str
    stage: int
    micro_batches: int
    offload: tuple[str, ...] = ()


def run() -> Record:
    """Explains every training of ds_lgamp of which a peak is recorded."""
    record = begin(NAME)
    for row, training in measured():
        peak = explained(training)
        config = {key: getattr(training, key) for key in ("size", "recompute", "micro_batches")}
        record.add(row.contender, config, EXPLAINED, [peak], "bytes")
        record.add(row.contender, config, RATIO, [row.median / peak], "ratio")
    ratios = [row.median for row in record.rows if row.metric == RATIO]
    record.aim(
        "largest |measured / explained - 1| of peak memory on a GPU", max(abs(ratio - 1) for ratio in ratios), LIMIT
    )
    return record


def measured() -> Iterator[tuple[Row, Training]]:
    """Yields the recorded peaks of ds_lgamp, each with its training."""
    for row in read(ON_ACCELERATOR).rows:
        if row.metric == "peak memory" and row.contender.startswith(OURS):
            size, recompute, micro_batches = (row.config[key] for key in ("size", "recompute", "micro_batches"))
            yield row, Training(str(size), str(recompute), int(row.contender[-1]), int(micro_batches))
    for row in read(GPU_DAY).rows:
        if row.metric == "peak memory" and row.contender in OFFLOADED:
            micro_batches = int(row.config["micro_batches"])
            yield row, Training("1.3B", "full", 3, micro_batches, OFFLOADED[row.contender])


def explained(training: Training) -> int:
    """Returns the peak in bytes that ``--explain`` says."""
    script = str(ROOT / "benchmarks" / "gpt" / "explained.py")
    wanted = [str(word) for word in (*training[:-1], *training.offload)]
    words = [sys.executable, "-m", "ds_lgamp", "run", "--explain", "--json", script, *wanted]
    written = output_of(words, 200, {**ON_CPU, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"})
    found = json.loads(next(line for line in written.splitlines() if line.startswith("{")))
    return found["ranks"][0]["memory"]["peak"]
