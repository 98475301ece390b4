"""Trains a small GPT at ZeRO stage 3 with fewer bytes on the network: with weights and gradients that travel rounded,
and with gathered weights that wait on the host. ``python -m benchmarks run quantised``.

It trains 500 steps on text that can be learned and compares the losses; counts the bytes of a step; and times steps on
loopback and over slow networks. Then it times stock DeepSpeed's and PyTorch's beside them. ``--part`` does one part
alone.
"""

from collections.abc import Sequence
from functools import partial
from statistics import median

from benchmarks.communication import moved, predicted
from benchmarks.contenders import Contender, Layout
from benchmarks.contenders.fsdp import Accumulation
from benchmarks.contenders.lgamp import Layered
from benchmarks.contenders.zero import Zero
from benchmarks.counting import Step
from benchmarks.curves import CURVES, EXACT, SECONDS, STEPS, Comparison, compare_losses
from benchmarks.model import ModelSize
from benchmarks.record import OURS, PART, REPETITIONS, Config, Record, begin
from benchmarks.training import LOOPBACK, SMALL, Found, compete
from benchmarks.training_slow import SLOW, SLOW_RATE
from ds_lgamp.runtime.measure import CollectiveCounter
from testing.namespaces import NetworkUnavailable, throttled_network

NAME = "quantised"
RANKS = 2
LEARNS = ModelSize(blocks=4, width=128, sequence=64, samples=4, vocabulary=256)
"""The model of the curves."""
ACCUMULATION = (1, 4, 16)
PEERS, MOST_OF_PEERS = "peers", 4
"""A part, and the most micro-batches of a step in it: with more, stock DeepSpeed takes minutes over 50 Mbit/s."""
RATES = {SLOW: (SLOW_RATE, 25e6), "50 Mbit/s": ("50mbit", 6.25e6)}
"""By link: the rate of the network, for the kernel and in bytes per second."""
IS_LIMIT = 0.7
"""The network is the limit if its bytes take this part of an exact step at least."""
BITS = {f"{OURS}, weights in 8 bits, gradients in {bits}": bits for bits in (8, 4)}
"""Those that round, and in how many bits their gradients travel."""
HELD = f"{OURS}, second gather from the host"
LIMITED, FEWER, ELSEWHERE = 0.6, 0.8, 1.02
"""The parts of an exact step that a rounded one may take where the network is the limit, and one with copies on the
host, which sends 16 of 22 parts; and the part of either on loopback."""


def contenders() -> list[Contender]:
    layered = partial(Layered, zero_stage=3, resident_chunks=2)
    zero = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    rounded = [
        Contender(name, partial(layered, zero=zero, quantised_gradient_bits=bits), rounds=True)
        for name, bits in BITS.items()
    ]
    return [Contender(EXACT, layered), Contender(HELD, partial(layered, regather="host")), *rounded]


def peers() -> list[Contender]:
    """Returns what others send whole, beside ours with whole and with the fewest bytes. Over two ranks, HSDP shards
    inside groups of one."""
    ours = contenders()
    return [
        Contender("DeepSpeed ZeRO-3", partial(Zero, stage=3)),
        Contender("FSDP2, deferred sync", partial(Accumulation, deferred_sync=True)),
        Contender("FSDP2 HSDP, deferred sync", partial(Accumulation, deferred_sync=True, replicas=RANKS)),
        ours[0],
        ours[-1],
    ]


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
        comparison = Comparison(contenders, 1, _sent, "bytes sent", ranks=1)
        compare_losses(record, Layout(1, RANKS, learns), comparison, steps)
    if part in (None, SECONDS):
        for micro_batches in accumulation:
            _time(record, Layout(1, RANKS, size), micro_batches, repetitions)
    if part in (None, PEERS):
        for micro_batches in [each for each in accumulation if each <= MOST_OF_PEERS]:
            _time_peers(record, Layout(1, RANKS, size), micro_batches, repetitions)
    return record


def _sent(counter: CollectiveCounter) -> int:
    return moved(Step(counter.log, 0)).collective_bytes


def _time(record: Record, layout: Layout, micro_batches: int, repetitions: int) -> None:
    """Enters the seconds of a step on every link."""
    arguments = {NAME: contenders()}, layout, micro_batches, repetitions
    sent = predicted(layout, 0, micro_batches, 3, 2).collective_bytes

    def enter(link: str, found: Found, seconds: float | None = None) -> None:
        _enter(record, {PART: SECONDS, **layout.config(micro_batches), "link": link}, found)
        compared = EXACT, HELD, next(iter(BITS))
        exact, held, best = ([duration.wall for duration in found[NAME][name]] for name in compared)
        if seconds is None or seconds >= IS_LIMIT * median(exact):
            for what, steps, limit in (("in 8 bits", best, LIMITED), ("with copies on the host", held, FEWER)):
                name = f"{SECONDS}: step {what} / exact step, {link}, M = {micro_batches}"
                record.compare(name, steps, exact, ELSEWHERE if seconds is None else limit)

    enter(LOOPBACK, compete(*arguments))
    for link, (rate, speed) in RATES.items():
        try:
            with throttled_network(layout.data_ranks, rate) as network:
                enter(link, compete(*arguments, network.enter), sent / speed)
        except NetworkUnavailable as reason:
            record.lack_network(f"nothing measured at {link}", reason)


def _time_peers(record: Record, layout: Layout, micro_batches: int, repetitions: int) -> None:
    """Enters the seconds of a step over every slow network."""
    for link, (rate, _) in RATES.items():
        try:
            with throttled_network(layout.data_ranks, rate) as network:
                found = compete({NAME: peers()}, layout, micro_batches, repetitions, network.enter)
                _enter(record, {PART: PEERS, **layout.config(micro_batches), "link": link}, found)
        except NetworkUnavailable as reason:
            record.lack_network(f"nothing measured at {link}", reason)


def _enter(record: Record, config: Config, found: Found) -> None:
    for name, durations in found[NAME].items():
        record.add(name, config, "step", [duration.wall for duration in durations], "s")
        record.add(name, config, "CPU", [duration.cpu for duration in durations], "s")
