"""Compares orders whose backwards have two parts: ``python -m benchmarks run zero_bubble``.

Compute is virtual: every chunk sleeps, half of its backward for the gradient of its weight. Messages are real and go
over gloo. All contenders compute the same. So what a step takes beyond a rank's compute is idle time: the bubble, hops,
and the contender's own work. Then whole steps of a small GPT are timed with whole backwards and with two parts.
``--part`` does one of both.
"""

from collections.abc import Sequence
from functools import partial
from statistics import median

from torch.distributed.pipelining import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from benchmarks.contenders import Contender as Trained
from benchmarks.contenders import Layout
from benchmarks.contenders.lgamp import Layered
from benchmarks.model import ModelSize
from benchmarks.record import OURS, PART, REPETITIONS, Record, begin
from benchmarks.training import SMALL, SMALL_REPETITIONS, compete
from benchmarks.virtual.bubbles import enter_hop, simulated
from benchmarks.virtual.chunk import Setting
from benchmarks.virtual.pipelines import LAYERED, Contender, Torch, split
from benchmarks.virtual.steps import Measured, measure, scheduling
from testing.namespaces import NetworkUnavailable, throttled_network

NAME = "zero_bubble"
LOOPBACK, SLOW, SLOW_RATE = "loopback", "200 Mbit/s", "200mbit"
SETTINGS = [Setting(4, 2, micro_batches) for micro_batches in (8, 16)]
"""Two chunks for each rank, as torch's ZBV and DualPipeV need."""
SLOW_SETTINGS = [setting._replace(elements=1 << 14) for setting in SETTINGS]
"""Messages of 64 kB, which take 2.6 ms."""
PARTS = split("layered, two parts", "layered")
PEERS = [
    Contender("torch LoopedBFS", "layered", partial(Torch, schedule=ScheduleLoopedBFS)),
    Contender(
        "torch InterleavedZeroBubble", "interleaved_1f1b", partial(Torch, schedule=ScheduleInterleavedZeroBubble)
    ),
    Contender("torch ZBVZeroBubble", "layered", partial(Torch, schedule=ScheduleZBVZeroBubble)),
    Contender("torch DualPipeV", "layered", partial(Torch, schedule=ScheduleDualPipeV)),
]
OTHERS = [split("interleaved_1f1b, two parts", "interleaved_1f1b"), split("zbv, two parts", "zbv")]
CONTENDERS = [PARTS, *OTHERS, LAYERED, *PEERS]
IDLE, RATIO = "idle per rank", "step / simulated"
LIMIT = 1.06
VIRTUAL, REAL = "virtual", "real steps"
ORDERS, MICRO_BATCHES = ("layered", "1f1b"), (2, 4, 8)
"""Of the real steps, on two pipeline ranks."""
NOT_SLOWER = 1.02
"""The part of a step with whole backwards that one with two parts may take."""


def run(
    part: str | None = None,
    settings: Sequence[Setting] = SETTINGS,
    slow_settings: Sequence[Setting] = SLOW_SETTINGS,
    contenders: Sequence[Contender] = CONTENDERS,
    size: ModelSize = SMALL,
    repetitions: int | None = None,
) -> Record:
    """Measures ``settings`` on loopback and ``slow_settings`` over the slow link, and real steps; or does the ``part``
    that is named. Records the reason if this machine cannot make a slow link."""
    record = begin(NAME)
    if part in (None, VIRTUAL):
        _measure(record, settings, slow_settings, contenders, repetitions or REPETITIONS)
    if part in (None, REAL):
        for micro_batches in MICRO_BATCHES:
            _time(record, Layout(2, 1, size), micro_batches, repetitions or SMALL_REPETITIONS)
    return record


def _time(record: Record, layout: Layout, micro_batches: int, repetitions: int) -> None:
    """Enters the seconds of real steps in every order, without recomputation."""
    for order in ORDERS:
        build = partial(Layered, zero_stage=1, resident_chunks=2, recompute="none", schedule=order)
        whole, two = f"{OURS} {order}", f"{OURS} {order}, two parts"
        contenders = [Trained(whole, build), Trained(two, partial(build, split_backward=True))]
        found = compete({order: contenders}, layout, micro_batches, repetitions)[order]
        for name, durations in found.items():
            config = {PART: REAL, "micro_batches": micro_batches, "order": order}
            record.add(name, config, "step", [each.wall for each in durations], "s")
        walls = ([each.wall for each in found[name]] for name in (two, whole))
        record.compare(f"{REAL}: {order}, {micro_batches} micro-batches: two parts / whole", *walls, NOT_SLOWER)


def _measure(
    record: Record,
    settings: Sequence[Setting],
    slow_settings: Sequence[Setting],
    contenders: Sequence[Contender],
    repetitions: int,
) -> None:
    _enter(record, LOOPBACK, contenders, settings, measure(settings, contenders, repetitions))
    try:
        with throttled_network(slow_settings[0].pipeline_ranks, SLOW_RATE) as network:
            measured = measure(slow_settings, contenders, repetitions, network.enter)
        _enter(record, SLOW, contenders, slow_settings, measured)
    except NetworkUnavailable as reason:
        record.lack_network(f"nothing measured at {SLOW}", reason)


def _enter(
    record: Record, link: str, contenders: Sequence[Contender], settings: Sequence[Setting], measured: Measured
) -> None:
    """Enters the rows and targets of a link."""
    record.machine["scheduling"] = scheduling(measured.precise)
    for setting, hop, seconds in zip(settings, measured.hops, measured.seconds):
        config = {PART: VIRTUAL, "micro_batches": setting.micro_batches, "link": link}
        enter_hop(record, config, hop)
        compute = setting.chunks_per_rank * setting.micro_batches * (setting.forward + setting.backward)
        idle = {name: [1000 * (step - compute) for step in steps] for name, steps in seconds.items()}
        for name, milliseconds in idle.items():
            record.add(name, config, IDLE, milliseconds, "ms")
        for contender in contenders:
            if contender.name.startswith(OURS):
                timeline = simulated(contender, setting, median(hop.one_way) if link == SLOW else 0.0)
                ratios = [step / timeline.step_time for step in seconds[contender.name]]
                record.add(contender.name, config, RATIO, ratios, "ratio")
                record.add(contender.name, config, "simulated bubble", [timeline.bubble], "ratio")
        words = f"{setting.micro_batches} micro-batches, {link}"
        ours = next(row for row in record.rows if row.config == config and row.metric == RATIO)
        record.aim(f"{VIRTUAL}: {RATIO} of {PARTS.name}, {words}", ours.median, LIMIT)
        fewest = min(median(idle[peer.name]) for peer in PEERS)
        record.aim(
            f"{VIRTUAL}: {IDLE} of {PARTS.name} over the fewest of torch's, {words}",
            median(idle[PARTS.name]) / fewest,
            1.0,
        )
