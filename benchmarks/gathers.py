"""What gathers behind the step cost against deferred ones at ZeRO stages 1 and 2: ``python -m benchmarks.gathers``.

Whole training steps of a small GPT, on loopback and on a slow network. Each mode in its turn makes some steps without a
pause, and what counts is the time from the end of its first to the end of its last: single steps would leave gathers
behind them to run unseen. Prints a table, writes no file.
"""

import gc
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median

from benchmarks.__main__ import others_on_stderr
from benchmarks.contenders import Layout
from benchmarks.contenders.lgamp import Layered
from benchmarks.namespaces import NetworkUnavailable, throttled_network
from benchmarks.training import LOOPBACK, MICRO_BATCHES, SECONDS, SLOW, SLOW_RATE, SMALL, keep_memory
from benchmarks.virtual.steps import begin_together
from docs.blocks import table
from tests.engine.running import prepare_rank
from tests.ranks import run_on_ranks

LAYOUTS = ((1, 2), (2, 2))
"""Pipeline ranks and data-parallel ranks."""
STAGES = (1, 2)
STEPS = 6
"""In a turn, the first included, which does not count."""
TURNS = 5
MODES = {"behind the step": False, "deferred": True}


def main() -> None:
    # gloo and the CPU, whatever the machine has.
    os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    rows: list[list[str]] = []
    for grid in LAYOUTS:
        layout = Layout(*grid, SMALL)
        with others_on_stderr():
            rows += compare(layout, LOOPBACK)
            try:
                with throttled_network(grid[0] * grid[1], SLOW_RATE) as network:
                    rows += compare(layout, SLOW, network.enter)
            except NetworkUnavailable as reason:
                rows.append([f"{grid[0]} x {grid[1]}", f"{SLOW}: {reason}", *[""] * 5])
    header = ["P x W", "link", "stage", "behind the step, s", "spread", "deferred, s", "spread", "ratio"]
    print(table(header, rows, numbers_from=2))


def compare(layout: Layout, link: str, enter: Callable[[int], None] | None = None) -> list[list[str]]:
    """A row for every stage: median and spread of the seconds of a step in both modes, and their ratio."""
    ranks = layout.pipeline_ranks * layout.data_ranks
    found = run_on_ranks(ranks, _train_on_rank, layout, before_init=enter, seconds=SECONDS)
    rows = []
    for stage in STAGES:
        own, deferred = ([max(turn) for turn in zip(*(rank[stage, mode] for rank in found))] for mode in MODES)
        seconds = [f"{value:.4f}" for each in (own, deferred) for value in (median(each), max(each) - min(each))]
        ratio = f"{median(own) / median(deferred):.3f}"
        rows.append([f"{layout.pipeline_ranks} x {layout.data_ranks}", link, f"{stage}", *seconds, ratio])
    return rows


def _train_on_rank(layout: Layout) -> dict[tuple[int, str], list[float]]:
    """By stage and mode, the seconds of a step in every turn but the first."""
    prepare_rank()
    keep_memory()
    build = partial(Layered, layout, resident_chunks=2)
    trainings = {
        (stage, mode): build(zero_stage=stage, defer_gathers=MODES[mode]) for stage, mode in product(STAGES, MODES)
    }
    gc.collect()
    gc.freeze()
    seconds: dict[tuple[int, str], list[float]] = {key: [] for key in trainings}
    for turn in range(1 + TURNS):
        for key, training in trainings.items():
            begin_together()
            for step in range(STEPS):
                training.step(turn * STEPS + step, MICRO_BATCHES)
                if step == 0:
                    start = time.monotonic()
            seconds[key].append((time.monotonic() - start) / (STEPS - 1))
            # Nothing of this one runs in the next one's turn.
            training.engine.optimizer.partition.finish_gathers()
    return {key: each[1:] for key, each in seconds.items()}


if __name__ == "__main__":
    main()
