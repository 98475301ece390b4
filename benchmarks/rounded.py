"""Trains a small GPT on two pipeline ranks between which hidden states travel rounded, beside exact ones:
``python -m benchmarks run rounded``.

It trains 500 steps on text that can be learned and compares the losses; counts the bytes of messages; and times steps
on loopback and over slow networks. ``--part`` does one part alone.
"""

from functools import partial
from statistics import mean, median
from unittest.mock import patch

from benchmarks.contenders import Contender, Layout, stock_pipeline
from benchmarks.contenders.lgamp import Layered
from benchmarks.model import ModelSize, predictable
from benchmarks.record import OURS, PART, REPETITIONS, Record, begin
from benchmarks.training import LOOPBACK, MICRO_BATCHES, SMALL, Duration, compete
from benchmarks.training_slow import SLOW, SLOW_RATE
from ds_lgamp.runtime.measure import CollectiveCounter
from testing.deepspeed_rank import prepare_rank
from testing.namespaces import NetworkUnavailable, throttled_network
from testing.ranks import run_on_ranks

NAME = "rounded"
CURVES, SECONDS = "curves", "seconds"
RANKS, STEPS, LAST = 2, 500, 50
LEARNS = ModelSize(blocks=4, width=128, sequence=64, samples=2, vocabulary=256)
"""The model of the curves, which learns from two micro-batches in a step."""
RATES = {SLOW: SLOW_RATE, "50 Mbit/s": "50mbit"}
EXACT = f"{OURS}, exact"
ROUNDED = {f"{OURS}, activation_dtype {narrow}": narrow for narrow in ("bf16", "fp8")}
DIFFERENCE, ELSEWHERE = 0.005, 1.02
"""The largest relative difference of the mean of the last losses, and the part of an exact step on loopback that a
rounded one may take."""


def contenders() -> list[Contender]:
    layered = partial(Layered, zero_stage=1, resident_chunks=2)
    rounded = (
        Contender(name, partial(layered, activation_dtype=narrow), rounds=True) for name, narrow in ROUNDED.items()
    )
    return [Contender(EXACT, layered), *rounded]


def run(
    part: str | None = None,
    size: ModelSize = SMALL,
    learns: ModelSize = LEARNS,
    steps: int = STEPS,
    repetitions: int = REPETITIONS,
) -> Record:
    """Compares the losses of ``steps`` steps and the seconds of one; or does the ``part`` that is named."""
    record = begin(NAME)
    if part in (None, CURVES):
        _compare_losses(record, Layout(RANKS, 1, learns), steps)
    if part in (None, SECONDS):
        _time(record, Layout(RANKS, 1, size), MICRO_BATCHES, repetitions)
    return record


def _compare_losses(record: Record, layout: Layout, steps: int) -> None:
    config = {PART: CURVES, **layout.config(2)}
    on_ranks = run_on_ranks(RANKS, _learn, layout, steps, seconds=3600)
    last = {}
    for name, (losses, _) in on_ranks[0].items():
        last[name] = mean(losses[-LAST:])
        record.add(name, config, "loss of the first step", losses[:1], "")
        record.add(name, config, f"mean loss of the last {LAST} of {steps} steps", [last[name]], "")
        record.add(name, config, "bytes of messages", [sum(rank[name][1] for rank in on_ranks)], "bytes")
    for name in ROUNDED:
        record.aim(f"{CURVES}: difference of {name}, relative", abs(last[name] / last[EXACT] - 1), DIFFERENCE)


def _learn(layout: Layout, steps: int) -> dict[str, tuple[list[float], int]]:
    """Returns the losses of every contender, and the bytes that this rank sends in its last step."""
    prepare_rank()
    found = {}
    with patch.object(stock_pipeline, "micro_batch", predictable):
        for contender in contenders():
            training = contender.build(layout)
            losses = [training.step(step, 2) for step in range(steps - 1)]
            with CollectiveCounter() as counter:
                losses.append(training.step(steps - 1, 2))
            found[contender.name] = losses, counter.bytes_sent["send"]
    return found


def _time(record: Record, layout: Layout, micro_batches: int, repetitions: int) -> None:
    """Enters the seconds of a step on every link."""
    arguments = {NAME: contenders()}, layout, micro_batches, repetitions

    def enter(link: str, found: dict[str, list[Duration]]) -> None:
        config = {PART: SECONDS, **layout.config(micro_batches), "link": link}
        for name, durations in found.items():
            record.add(name, config, "step", [duration.wall for duration in durations], "s")
        walls = {name: median(duration.wall for duration in durations) for name, durations in found.items()}
        for name, narrow in ROUNDED.items():
            limit = ELSEWHERE if link == LOOPBACK else 1.0
            record.aim(f"{SECONDS}: step in {narrow} / exact step, {link}", walls[name] / walls[EXACT], limit)

    enter(LOOPBACK, compete(*arguments)[NAME])
    for link, rate in RATES.items():
        try:
            with throttled_network(RANKS, rate) as network:
                enter(link, compete(*arguments, network.enter)[NAME])
        except NetworkUnavailable as reason:
            record.lack_network(f"nothing measured at {link}", reason)
