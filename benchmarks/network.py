"""Measures how a slow network affects a step: ``python -m benchmarks run network``.

Compute is virtual (every chunk sleeps). Collectives are real and go over gloo and links with several rates. The layered
order is compared with the micro-batch-outer order, in which each micro-batch passes all chunks before the next begins.
Both run on the same engine; the second has ``micro_batch_group`` 1. The number of parameters per chunk makes the
collectives of a layered step at ZeRO stage 3 take about ``SHARE`` of its compute at the fastest rate.

A step's bound is the longer of two times: its compute with the first gather and the last reduction, which nothing can
hide, and all of its collectives. Compute is measured without collectives. A collective's time is measured while it has
the network for itself. The bound ignores the order: gathers longer than a chunk's forward passes cannot hide behind
them, even if the network is idle later. The simulated step of the same program includes this.
"""

import gc
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from benchmarks.overlap import COMPUTE, KINDS, SHORT, calibrate, collectives, simulated, sized
from benchmarks.record import OURS, REPETITIONS, Record, begin
from benchmarks.virtual.chunk import Setting
from benchmarks.virtual.pipelines import Executed
from benchmarks.virtual.steps import Start, Step, check_durations, is_precise, scheduling, time_step
from testing.namespaces import NetworkUnavailable, throttled_network
from testing.ranks import run_on_ranks

NAME = "network"


class Link(NamedTuple):
    """How nodes are joined."""

    rate: str
    """As tc writes it."""
    text: str
    socket_queue: int | None = None


LINKS = (
    Link("1gbit", "1 Gbit/s"),
    Link("200mbit", "200 Mbit/s"),
    Link("200mbit", "200 Mbit/s, short queues", SHORT),
    Link("50mbit", "50 Mbit/s"),
)
"""The fastest first. With short queues, small messages of pipelines and of gloo pass large ones of collectives."""
SHARE = 0.16
LAYOUTS = ((1, 2), (2, 2))
"""Pipeline ranks and data-parallel ranks."""
STAGES = (1, 2, 3)
OUTER = f"{OURS}, ZeRO-3, one micro-batch at a time"
LIMIT = 1.02
BOUND = "step / bound"
SECONDS = 1200

Found = tuple[dict[str, list[float]], dict[str, list[Step]], bool]
"""Results of a rank: seconds of collectives that have the network for themselves, by kind; steps by contender; and
whether it had real-time priority."""


def setting_of(pipeline_ranks: int, data_ranks: int) -> Setting:
    """Four chunks per rank and eight micro-batches."""
    setting = Setting(pipeline_ranks, 4, micro_batches=8, forward=0.005, backward=0.010, data_ranks=data_ranks)
    return sized(setting, SHARE)


def run(
    layouts: Sequence[tuple[int, int]] = LAYOUTS, links: Sequence[Link] = LINKS, repetitions: int = REPETITIONS
) -> Record:
    """Measures every layout over every link. Records the reason if this machine cannot make a slow link."""
    record = begin(NAME)
    for layout in layouts:
        setting = setting_of(*layout)
        for link in links:
            ranks = setting.pipeline_ranks * setting.data_ranks
            try:
                with throttled_network(ranks, link.rate, socket_queue=link.socket_queue) as network:
                    found = measure(setting, repetitions, network.enter)
            except NetworkUnavailable as reason:
                record.lack_network("nothing measured", reason)
                return record
            enter(record, setting, link, found)
    return record


def measure(setting: Setting, repetitions: int, enter_network: Callable[[int], None] | None = None) -> list[Found]:
    """Runs all contenders in turns on one set of processes. Returns the results of each rank."""
    ranks = setting.pipeline_ranks * setting.data_ranks
    before = Start(enter_network)
    return run_on_ranks(ranks, _measure_on_rank, setting, repetitions, before_init=before, seconds=SECONDS)


def layered(zero_stage: int) -> str:
    return f"{OURS}, ZeRO-{zero_stage}"


def enter(record: Record, setting: Setting, link: Link, found: Sequence[Found]) -> None:
    """Enters the rows of one layout and link, and their target."""
    config = {"pipeline_ranks": setting.pipeline_ranks, "data_ranks": setting.data_ranks, "rate": link.text}
    record.machine["scheduling"] = scheduling(all(precise for _, _, precise in found))
    # Of the rank that begins last.
    alone = {kind: median(samples) for kind, samples in found[setting.data_ranks - 1][0].items()}
    seconds = check_durations(setting, [steps for _, steps, _ in found])
    compute = median(seconds[COMPUTE])
    record.add(COMPUTE, config, "step", [step * 1000 for step in seconds[COMPUTE]], "ms")
    targets = []
    for stage in STAGES:
        network = sum(count * alone[kind] for count, kind in zip(collectives(setting, stage), KINDS))
        bound = max(compute + sum(alone.values()), network)
        record.add(layered(stage), config, "bound", [bound * 1000], "ms")
        timeline = simulated(setting, (stage, 2), setting.durations(**alone))
        record.add(layered(stage), config, "simulated", [timeline.step_time * 1000], "ms")
        ratios = [step / bound for step in seconds[layered(stage)]]
        record.add(layered(stage), config, BOUND, ratios, "ratio")
        targets.append((median(ratios), ratios, timeline.step_time / bound))
    for name in (*map(layered, STAGES), OUTER):
        record.add(name, config, "step", [step * 1000 for step in seconds[name]], "ms")
    layout = f"{setting.pipeline_ranks} x {setting.data_ranks} ranks"
    largest, ratios, floor = max(targets)
    record.aim(f"largest {BOUND}, {layout}, {link.text}", largest, LIMIT, floor=floor, samples=ratios)


def _measure_on_rank(setting: Setting, repetitions: int) -> Found:
    alone = calibrate(setting)
    contenders = {layered(stage): Executed(setting, "layered", stage) for stage in STAGES}
    contenders[OUTER] = Executed(setting, "layered", 3, micro_batch_group=1)
    contenders[COMPUTE] = Executed(setting._replace(parameters=0), "layered", alone=True)
    gc.collect()
    gc.freeze()
    steps: dict[str, list[Step]] = {name: [] for name in contenders}
    for _ in range(repetitions + 1):
        for name, pipeline in contenders.items():
            steps[name].append(time_step(pipeline))
    return alone, steps, is_precise()
