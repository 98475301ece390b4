"""Compares gathers that run behind the step with deferred gathers at ZeRO stages 1 and 2: ``python -m benchmarks run
gathers``.

Measures whole training steps of a small GPT, on loopback and on a slow network. The modes take turns, and each turn
makes several steps without a pause. The time counts from the end of the first step to the end of the last. Timing
single steps would miss the gathers that run after them.
"""

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from statistics import median

from benchmarks.contenders import Layout
from benchmarks.contenders.lgamp import Layered
from benchmarks.record import OURS, REPETITIONS, Record, begin
from benchmarks.training import LOOPBACK, MICRO_BATCHES, SECONDS, SMALL, keep_memory
from benchmarks.training_slow import SLOW, SLOW_RATE
from benchmarks.virtual.steps import begin_together
from testing.deepspeed_rank import prepare_rank
from testing.namespaces import NetworkUnavailable, throttled_network
from testing.ranks import run_on_ranks

NAME = "gathers"
LAYOUTS = ((1, 2), (2, 2))
"""Pipeline ranks and data-parallel ranks."""
STAGES = (1, 2)
STEPS = 5
"""Steps per turn, including the first, which does not count."""
MODES = {f"{OURS}, gathers behind the step": False, f"{OURS}, gathers deferred": True}
RATIO = "behind the step / deferred"

Found = dict[tuple[int, str], list[float]]
"""Seconds per step of every counted turn, by stage and mode."""


def run(layouts: Sequence[tuple[int, int]] = LAYOUTS, turns: int = REPETITIONS, steps: int = STEPS) -> Record:
    """Measures every layout on loopback, then on the slow network."""
    record = begin(NAME)
    for grid in layouts:
        layout = Layout(*grid, SMALL)
        enter(record, layout, LOOPBACK, measure(layout, turns, steps))
        try:
            with throttled_network(grid[0] * grid[1], SLOW_RATE) as network:
                enter(record, layout, SLOW, measure(layout, turns, steps, network.enter))
        except NetworkUnavailable as reason:
            record.lack_network(f"nothing measured at {SLOW}", reason)
    return record


def measure(layout: Layout, turns: int, steps: int, enter_network: Callable[[int], None] | None = None) -> Found:
    """Returns the seconds per step of the slowest rank."""
    ranks = layout.pipeline_ranks * layout.data_ranks
    found = run_on_ranks(ranks, _train_on_rank, layout, turns, steps, before_init=enter_network, seconds=SECONDS)
    return {key: [max(turn) for turn in zip(*(rank[key] for rank in found))] for key in found[0]}


def enter(record: Record, layout: Layout, link: str, found: Found) -> None:
    """Enters both modes' rows for one layout and link, and their ratio."""
    for stage in STAGES:
        config = {**layout.config(MICRO_BATCHES), "link": link, "zero_stage": stage}
        for mode in MODES:
            record.add(mode, config, "step", found[stage, mode], "s")
        behind, deferred = (median(found[stage, mode]) for mode in MODES)
        record.add(OURS, config, RATIO, [behind / deferred], "ratio")


def _train_on_rank(layout: Layout, turns: int, steps: int) -> Found:
    prepare_rank()
    keep_memory()
    build = partial(Layered, layout, resident_chunks=2)
    trainings = {
        (stage, mode): build(zero_stage=stage, defer_gathers=MODES[mode]) for stage, mode in product(STAGES, MODES)
    }
    gc.collect()
    gc.freeze()
    seconds: Found = {key: [] for key in trainings}
    for turn in range(1 + turns):
        for key, training in trainings.items():
            begin_together()
            for step in range(steps):
                training.step(turn * steps + step, MICRO_BATCHES)
                if step == 0:
                    start = time.monotonic()
            seconds[key].append((time.monotonic() - start) / (steps - 1))
            # Finishes the gathers, so that none runs in the next mode's turn.
            training.engine.optimizer.partition.finish_gathers()
    return {key: each[1:] for key, each in seconds.items()}
