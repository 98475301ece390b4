"""Compares the losses of Megatron-LM's pretrain_gpt.py with and without a ds_lgamp block, at every layout of
testing/pretraining.py.

``MEGATRON_LM_PATH`` names a Megatron-LM tree of the branch core_r0.16.0.
"""

import os
import tempfile
from importlib.metadata import version
from pathlib import Path

from benchmarks.record import OURS, Record, begin
from testing.pretraining import (
    EVALUATED_EVERY,
    ITERATIONS,
    PLACES,
    STOCK_CHUNKS,
    Losses,
    pretrain,
    pretrain_with_block,
)

STOCK = "Megatron-LM"
SHOWN = (1, ITERATIONS // 2, ITERATIONS)
INTERLEAVED = "P2 x N4"


def run() -> Record:
    if not os.environ.get("MEGATRON_LM_PATH"):
        raise SystemExit("MEGATRON_LM_PATH is not set; it names a Megatron-LM tree of the branch core_r0.16.0")
    record = begin("megatron")
    record.machine["megatron-core"] = version("megatron-core")
    found = losses()
    alone = found[STOCK, next(iter(PLACES))]
    for (contender, place), kinds in found.items():
        for kind, by_iteration in kinds._asdict().items():
            for iteration in SHOWN if kind == "training" else (EVALUATED_EVERY, ITERATIONS):
                config = {"place": place, "iteration": iteration}
                record.add(contender, config, f"{kind} loss", [by_iteration[iteration]], "nats")
    for tensor_ranks, limit in (("T1", 1e-6), ("T2", 1e-5)):
        differences = [
            difference(kinds, alone)
            for (contender, place), kinds in found.items()
            if contender == OURS and place.startswith("T2") == (tensor_ranks == "T2")
        ]
        text = f"largest relative difference of a loss with a block from {STOCK} on one process, {tensor_ranks}"
        record.aim(text, max(differences), limit)
    difference_there = difference(found[OURS, INTERLEAVED], found[STOCK, INTERLEAVED])
    record.aim(f"the same from {STOCK}'s interleaved schedule at {INTERLEAVED}", difference_there, 0.0)
    return record


def losses() -> dict[tuple[str, str], Losses]:
    """Losses by contender and place. All runs start from the same weights."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        pretrain(1, f"--save {folder} --save-interval 1 --exit-interval 1")
        start = f"--load {folder} --finetune"
        for place, (ranks, flags) in PLACES.items():
            chunks = STOCK_CHUNKS if place == INTERLEAVED else ""
            found[STOCK, place] = pretrain(ranks, f"{start} {flags} {chunks}")
            found[OURS, place] = pretrain_with_block(place, start, Path(folder))
    return found


def difference(some: Losses, others: Losses) -> float:
    """The largest relative difference over all iterations."""
    return max(
        abs(loss - other[iteration]) / other[iteration]
        for kind, other in zip(some, others)
        for iteration, loss in kind.items()
    )
