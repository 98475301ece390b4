"""Compares orders whose backwards have two parts: ``python -m benchmarks run zero_bubble``.

Compute is virtual: every chunk sleeps, half of its backward for the gradient of its weight. Messages are real and go
over gloo. All contenders compute the same. So what a step takes beyond a rank's compute is idle time: the bubble, hops,
and the contender's own work.
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

from benchmarks.record import OURS, REPETITIONS, Record, begin
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
CONTENDERS = [PARTS, split("interleaved_1f1b, two parts", "interleaved_1f1b"), LAYERED, *PEERS]
IDLE, RATIO = "idle per rank", "step / simulated"
LIMIT = 1.06


def run(
    settings: Sequence[Setting] = SETTINGS,
    slow_settings: Sequence[Setting] = SLOW_SETTINGS,
    contenders: Sequence[Contender] = CONTENDERS,
    repetitions: int = REPETITIONS,
) -> Record:
    """Measures ``settings`` on loopback and ``slow_settings`` over the slow link. Records the reason if this machine
    cannot make one."""
    record = begin(NAME)
    _enter(record, LOOPBACK, contenders, settings, measure(settings, contenders, repetitions))
    try:
        with throttled_network(slow_settings[0].pipeline_ranks, SLOW_RATE) as network:
            measured = measure(slow_settings, contenders, repetitions, network.enter)
        _enter(record, SLOW, contenders, slow_settings, measured)
    except NetworkUnavailable as reason:
        record.lack_network(f"nothing measured at {SLOW}", reason)
    return record


def _enter(
    record: Record, link: str, contenders: Sequence[Contender], settings: Sequence[Setting], measured: Measured
) -> None:
    """Enters the rows and targets of a link."""
    record.machine["scheduling"] = scheduling(measured.precise)
    for setting, hop, seconds in zip(settings, measured.hops, measured.seconds):
        config = {"micro_batches": setting.micro_batches, "link": link}
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
        record.aim(f"{RATIO} of {PARTS.name}, {words}", ours.median, LIMIT)
        fewest = min(median(idle[peer.name]) for peer in PEERS)
        record.aim(
            f"{IDLE} of {PARTS.name} over the fewest of torch's, {words}", median(idle[PARTS.name]) / fewest, 1.0
        )
