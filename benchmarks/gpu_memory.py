"""Compares the peak memory of the benchmark ``gpu`` with what ``ds_lgamp run --explain`` says of it without a GPU:
``python -m benchmarks run gpu_memory``.
"""

import json
import sys

from benchmarks import ON_ACCELERATOR
from benchmarks.record import OURS, ROOT, Record, begin, read
from testing.launching import ON_CPU
from testing.launching import run as output_of

NAME = "gpu_memory"
METRICS = EXPLAINED, RATIO = "explained", "measured / explained"
LIMIT = 0.01


def run() -> Record:
    """Explains every size, recomputation and stage of which ``gpu`` has recorded the peak."""
    record = begin(NAME)
    for row in read(ON_ACCELERATOR).rows:
        if row.metric == "peak memory" and row.contender.startswith(OURS):
            size, recompute = (str(row.config[key]) for key in ("size", "recompute"))
            peak = explained(size, recompute, int(row.contender[-1]))
            record.add(row.contender, row.config, EXPLAINED, [peak], "bytes")
            record.add(row.contender, row.config, RATIO, [row.median / peak], "ratio")
    ratios = [row.median for row in record.rows if row.metric == RATIO]
    record.aim(
        "largest |measured / explained - 1| of peak memory on a GPU", max(abs(ratio - 1) for ratio in ratios), LIMIT
    )
    return record


def explained(size: str, recompute: str, stage: int) -> int:
    """Returns the peak in bytes that ``--explain`` says."""
    script = str(ROOT / "benchmarks" / "gpt" / "explained.py")
    words = [sys.executable, "-m", "ds_lgamp", "run", "--explain", "--json", script, size, recompute, str(stage)]
    written = output_of(words, 200, {**ON_CPU, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"})
    found = json.loads(next(line for line in written.splitlines() if line.startswith("{")))
    return found["ranks"][0]["memory"]["peak"]
