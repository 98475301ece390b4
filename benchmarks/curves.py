"""Trains contenders on text that can be learned, and compares their losses with those of the exact one."""

from collections.abc import Callable
from statistics import mean
from typing import NamedTuple
from unittest.mock import patch

from benchmarks.contenders import Contender, Layout, stock_pipeline
from benchmarks.model import predictable
from benchmarks.record import OURS, PART, Config, Record
from ds_lgamp.runtime.measure import CollectiveCounter
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks

CURVES, SECONDS = "curves", "seconds"
"""The parts of a benchmark of losses and steps."""
STEPS, LAST, DIFFERENCE = 500, 50, 0.005
"""Steps of a training, the last ones of which the mean loss counts, and the largest relative difference of that."""
EXACT = f"{OURS}, exact"


class Comparison(NamedTuple):
    """What is compared. Its functions run on every rank."""

    contenders: Callable[[], list[Contender]]
    """Makes them; one is called :data:`EXACT`."""
    micro_batches: int
    sent: Callable[[CollectiveCounter], int] | None = None
    """Returns the bytes of a step that count; None if none do."""
    metric: str = ""
    """What these bytes are called."""
    ranks: int = 1
    """The first ranks, whose bytes add up."""
    config: Config = {}
    """What the contenders have in common, for the rows."""


def compare_losses(record: Record, layout: Layout, comparison: Comparison, steps: int) -> None:
    """Enters the losses of ``steps`` steps, and the bytes of the last one. Those of contenders that round have an
    aim."""
    config = {PART: CURVES, **layout.config(comparison.micro_batches), **comparison.config}
    on_ranks = run_on_ranks(layout.pipeline_ranks * layout.data_ranks, _learn, layout, comparison, steps, seconds=3600)
    last = {}
    for name, (losses, _) in on_ranks[0].items():
        last[name] = mean(losses[-LAST:])
        record.add(name, config, "loss of the first step", losses[:1], "")
        record.add(name, config, f"mean loss of the last {LAST} of {steps} steps", [last[name]], "")
        if comparison.sent is not None:
            sent = sum(rank[name][1] for rank in on_ranks[: comparison.ranks])
            record.add(name, config, comparison.metric, [sent], "bytes")
    for contender in comparison.contenders():
        if contender.rounds:
            difference = abs(last[contender.name] / last[EXACT] - 1)
            common = "".join(f", {key} {value:g}" for key, value in comparison.config.items())
            record.aim(f"{CURVES}: difference of {contender.name}, relative{common}", difference, DIFFERENCE)


def _learn(layout: Layout, comparison: Comparison, steps: int) -> dict[str, tuple[list[float], int]]:
    """Returns the losses of every contender, and what this rank sends in its last step."""
    prepare_rank()
    found = {}
    with patch.object(stock_pipeline, "micro_batch", predictable):
        for contender in comparison.contenders():
            training = contender.build(layout)
            losses = [training.step(step, comparison.micro_batches) for step in range(steps - 1)]
            with CollectiveCounter() as counter:
                losses.append(training.step(steps - 1, comparison.micro_batches))
            found[contender.name] = losses, 0 if comparison.sent is None else comparison.sent(counter)
    return found
