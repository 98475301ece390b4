"""Measures what a failure costs under launch/elastic.sh: ``python -m benchmarks run restart``.

A small model trains on nodes of two ranks, which are torchrun's agents on this machine, and saves every other step. A
rank is killed, a node is killed with all its ranks, a node joins: then all ranks start again. The time counts from the
end of the last step before to the end of the first step that had not been made before. Most of it is the start of
Python and its packages, and the seconds for which agents wait for more nodes. Steps since the newest whole checkpoint
are made again.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import OURS, Record, begin
from testing.elastic import GATHERING, Job, Step, job

NAME = "restart"
TURNS = 3
STEP = 0.5
"""Seconds of a step."""
SAVED_EVERY = 2
"""Steps."""
WARM = 5
"""Steps before the first event."""
CONFIG = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
    "ds_lgamp": {},
}
PAUSE = 3.0
"""Seconds without a step by which a new start is known."""
EVENTS: dict[str, tuple[Callable[[Job], None], int]] = {
    "a rank is killed": (lambda run: run.kill_rank("b"), 4),
    "a node is killed": (lambda run: run.kill_node("b"), 2),
    "a node joins": (lambda run: run.start("b"), 4),
}
"""What happens, in this order, and how many ranks train afterwards."""


def run(turns: int = TURNS) -> Record:
    """Lets everything happen ``turns`` times, in one job."""
    record = begin(NAME)
    record.machine["agents wait for more nodes"] = f"{GATHERING} s"
    found: dict[str, list[tuple[float, float]]] = {event: [] for event in EVENTS}
    words: list[Any] = ["--steps", 100_000, "--save-interval", SAVED_EVERY, "--seconds", STEP, "--pipeline-ranks", 2]
    with tempfile.TemporaryDirectory() as folder, job(Path(folder), "1:2", 2, CONFIG, *words) as trained:
        trained.start("a")
        trained.start("b")
        trained.wait_for(lambda step: step.ranks == 4 and step.step > WARM)
        for _ in range(turns):
            for event, (happen, ranks) in EVENTS.items():
                found[event].append(_cost(trained, happen, ranks))
    for event, costs in found.items():
        seconds, again = map(list, zip(*costs))
        record.add(OURS, {"event": event}, "until training goes on", seconds, "s")
        record.add(OURS, {"event": event}, "steps made again", again, "steps")
        # The last save may be under way in the background. It ends before the next one begins, but no earlier for sure.
        record.aim(f"most steps made again, {event}", max(again), 2 * SAVED_EVERY)
    return record


def _cost(trained: Job, happen: Callable[[Job], None], ranks: int) -> tuple[float, float]:
    """Lets it ``happen``. Returns seconds until training goes on, on so many ``ranks``, and steps made again."""
    known = len(trained.steps())
    happen(trained)
    last = trained.wait_for(lambda step: step.ranks == ranks and _paused(trained.steps()[known - 1 :]) is not None).step
    trained.wait_for(lambda step: step.step > last + WARM)
    since = trained.steps()[known - 1 :]
    pause = _paused(since)
    assert pause is not None, "there was one"
    before, after = since[:pause], since[pause:]
    new = next(step for step in after if step.step > before[-1].step)
    return new.time - before[-1].time, before[-1].step + 1 - after[0].step


def _paused(steps: Sequence[Step]) -> int | None:
    """Returns the place of the first step behind a pause; None if there was none."""
    gaps = (number for number in range(1, len(steps)) if steps[number].time - steps[number - 1].time > PAUSE)
    return next(gaps, None)
