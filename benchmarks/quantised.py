"""Trains a small GPT at ZeRO stage 3 with weights and gradients that travel rounded, beside exact ones:
``python -m benchmarks run quantised``.

It trains 500 steps on text that can be learned and compares the losses; counts the bytes of a step; and times steps on
loopback and over slow networks. ``--part`` does one part alone.
"""

from collections.abc import Sequence
from functools import partial
from statistics import mean, median
from unittest.mock import patch

import torch

from benchmarks import model
from benchmarks.communication import moved, predicted
from benchmarks.contenders import Contender, Layout, stock_pipeline
from benchmarks.contenders.lgamp import Layered
from benchmarks.counting import Step
from benchmarks.model import ModelSize
from benchmarks.record import OURS, PART, REPETITIONS, Record, begin
from benchmarks.training import LOOPBACK, SMALL, Found, compete
from benchmarks.training_slow import SLOW, SLOW_RATE
from ds_lgamp.runtime.measure import CollectiveCounter
from testing.deepspeed_rank import prepare_rank
from testing.namespaces import NetworkUnavailable, throttled_network
from testing.ranks import run_on_ranks

NAME = "quantised"
CURVES, SECONDS = "curves", "seconds"
RANKS, STEPS, LAST = 2, 500, 50
LEARNS = ModelSize(blocks=4, width=128, sequence=64, samples=4, vocabulary=256)
"""The model of the curves."""
ACCUMULATION = (1, 4, 16)
RATES = {SLOW: (SLOW_RATE, 25e6), "50 Mbit/s": ("50mbit", 6.25e6)}
"""By link: the rate of the network, for the kernel and in bytes per second."""
IS_LIMIT = 0.7
"""The network is the limit if its bytes take this part of an exact step at least."""
EXACT = f"{OURS}, exact"
BITS = {f"{OURS}, weights in 8 bits, gradients in {bits}": bits for bits in (8, 4)}
"""The others, and in how many bits their gradients travel."""
LIMITED, ELSEWHERE, DIFFERENCE = 0.6, 1.02, 0.005
"""The parts of an exact step that a rounded one may take where the network is the limit, and on loopback; and the
largest relative difference of the mean of the last losses."""


def contenders() -> list[Contender]:
    layered = partial(Layered, zero_stage=3, resident_chunks=2)
    zero = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    rounded = [
        Contender(name, partial(layered, zero=zero, quantised_gradient_bits=bits), rounds=True)
        for name, bits in BITS.items()
    ]
    return [Contender(EXACT, layered), *rounded]


def run(
    part: str | None = None,
    size: ModelSize = SMALL,
    learns: ModelSize = LEARNS,
    steps: int = STEPS,
    accumulation: Sequence[int] = ACCUMULATION,
    repetitions: int = REPETITIONS,
) -> Record:
    """Compares the losses of ``steps`` steps and the seconds of one; or does the ``part`` that is named."""
    record = begin(NAME)
    if part in (None, CURVES):
        _compare_losses(record, Layout(1, RANKS, learns), steps)
    if part in (None, SECONDS):
        for micro_batches in accumulation:
            _time(record, Layout(1, RANKS, size), micro_batches, repetitions)
    return record


def _compare_losses(record: Record, layout: Layout, steps: int) -> None:
    config = {PART: CURVES, **layout.config(1)}
    found = run_on_ranks(RANKS, _learn, layout, steps, seconds=3600)
    last = {}
    for name, (losses, sent) in found[0].items():
        last[name] = mean(losses[-LAST:])
        record.add(name, config, "loss of the first step", losses[:1], "")
        record.add(name, config, f"mean loss of the last {LAST} of {steps} steps", [last[name]], "")
        record.add(name, config, "bytes sent", [sent], "bytes")
    for name in BITS:
        record.aim(f"{CURVES}: difference of {name}, relative", abs(last[name] / last[EXACT] - 1), DIFFERENCE)


def _learn(layout: Layout, steps: int) -> dict[str, tuple[list[float], int]]:
    """Returns the losses and the bytes of the last step of every contender."""
    prepare_rank()
    found = {}
    with patch.object(stock_pipeline, "micro_batch", predictable):
        for contender in contenders():
            training = contender.build(layout)
            losses = [training.step(step, 1) for step in range(steps)]
            with CollectiveCounter() as counter:
                training.step(steps, 1)
            found[contender.name] = losses, moved(Step(counter.log, 0)).collective_bytes
    return found


def predictable(size: ModelSize, step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes a micro-batch as :func:`model.micro_batch` does, of text that can be learned: three of four tokens follow
    from the one before."""
    follows = torch.randperm(size.vocabulary, generator=torch.Generator().manual_seed(0))
    text, _ = model.micro_batch(size._replace(sequence=size.sequence + 1), step, index)
    generator = torch.Generator().manual_seed(100_000 * step + index)
    text, random = text.clone(), torch.rand(text.shape, generator=generator) < 0.25
    for place in range(1, text.shape[1]):
        text[:, place] = torch.where(random[:, place], text[:, place], follows[text[:, place - 1]])
    return text[:, :-1], text[:, 1:]


def _time(record: Record, layout: Layout, micro_batches: int, repetitions: int) -> None:
    """Enters the seconds of a step on every link."""
    arguments = {NAME: contenders()}, layout, micro_batches, repetitions
    sent = predicted(layout, 0, micro_batches, 3, 2).collective_bytes

    def enter(link: str, found: Found, seconds: float | None = None) -> None:
        config = {PART: SECONDS, **layout.config(micro_batches), "link": link}
        for name, durations in found[NAME].items():
            record.add(name, config, "step", [duration.wall for duration in durations], "s")
            record.add(name, config, "CPU", [duration.cpu for duration in durations], "s")
        exact, best = (median(duration.wall for duration in found[NAME][name]) for name in (EXACT, next(iter(BITS))))
        if seconds is None or seconds >= IS_LIMIT * exact:
            limit = ELSEWHERE if seconds is None else LIMITED
            record.aim(f"{SECONDS}: step in 8 bits / exact step, {link}, M = {micro_batches}", best / exact, limit)

    enter(LOOPBACK, compete(*arguments))
    for link, (rate, speed) in RATES.items():
        try:
            with throttled_network(layout.data_ranks, rate) as network:
                enter(link, compete(*arguments, network.enter), sent / speed)
        except NetworkUnavailable as reason:
            record.lack_network(f"nothing measured at {link}", reason)
