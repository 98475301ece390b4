"""Trains a small GPT on two pipeline ranks between which hidden states travel rounded, beside exact ones:
``python -m benchmarks run rounded``.

It trains 500 steps on text that can be learned and compares the losses; counts the bytes of messages; and times steps
on loopback and over slow networks. ``--part`` does one part alone.
"""

from functools import partial

from benchmarks.contenders import Contender, Layout
from benchmarks.contenders.lgamp import Layered
from benchmarks.curves import CURVES, EXACT, SECONDS, STEPS, Comparison, compare_losses
from benchmarks.model import ModelSize
from benchmarks.record import OURS, PART, REPETITIONS, Record, begin
from benchmarks.training import LOOPBACK, MICRO_BATCHES, SMALL, Duration, compete
from benchmarks.training_slow import SLOW, SLOW_RATE
from ds_lgamp.runtime.measure import CollectiveCounter
from testing.namespaces import NetworkUnavailable, throttled_network

NAME = "rounded"
RANKS = 2
LEARNS = ModelSize(blocks=4, width=128, sequence=64, samples=2, vocabulary=256)
"""The model of the curves, which learns from two micro-batches in a step."""
RATES = {SLOW: SLOW_RATE, "50 Mbit/s": "50mbit"}
ROUNDED = {f"{OURS}, activation_dtype {narrow}": narrow for narrow in ("bf16", "fp8")}
ELSEWHERE = 1.02
"""The part of an exact step on loopback that a rounded one may take."""


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
        comparison = Comparison(contenders, 2, _sent, "bytes of messages", ranks=RANKS)
        compare_losses(record, Layout(RANKS, 1, learns), comparison, steps)
    if part in (None, SECONDS):
        _time(record, Layout(RANKS, 1, size), MICRO_BATCHES, repetitions)
    return record


def _sent(counter: CollectiveCounter) -> int:
    return counter.bytes_sent["send"]


def _time(record: Record, layout: Layout, micro_batches: int, repetitions: int) -> None:
    """Enters the seconds of a step on every link."""
    arguments = {NAME: contenders()}, layout, micro_batches, repetitions

    def enter(link: str, found: dict[str, list[Duration]]) -> None:
        config = {PART: SECONDS, **layout.config(micro_batches), "link": link}
        for name, durations in found.items():
            record.add(name, config, "step", [duration.wall for duration in durations], "s")
        walls = {name: [duration.wall for duration in durations] for name, durations in found.items()}
        for name, narrow in ROUNDED.items():
            limit = ELSEWHERE if link == LOOPBACK else 1.0
            record.compare(f"{SECONDS}: step in {narrow} / exact step, {link}", walls[name], walls[EXACT], limit)

    enter(LOOPBACK, compete(*arguments)[NAME])
    for link, rate in RATES.items():
        try:
            with throttled_network(RANKS, rate) as network:
                enter(link, compete(*arguments, network.enter)[NAME])
        except NetworkUnavailable as reason:
            record.lack_network(f"nothing measured at {link}", reason)
