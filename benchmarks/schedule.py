"""Compares steps with the simulated time of their order: ``python -m benchmarks run schedule``.

Compute is virtual (every chunk sleeps). Messages are real and go over gloo. Each contender's step is divided by the
simulated step of its own order (``ds_lgamp/schedule/simulate.py``). A hop costs nothing on loopback. On the slow link
it costs the time of one message alone, calibrated in the same run. Any wait for other messages or for the receiver's
ready signal counts as the contender's time. Simultaneous messages in both directions are calibrated too.
"""

from collections.abc import Sequence
from itertools import product
from statistics import median

from benchmarks.record import REPETITIONS, Record, begin
from benchmarks.virtual.bubbles import MEGABYTE, SLOW, SLOW_RATE, enter_bubbles, enter_hop, simulated
from benchmarks.virtual.chunk import Setting
from benchmarks.virtual.pipelines import BARE_LOOP, CONTENDERS, LAYERED, Contender
from benchmarks.virtual.steps import Measured, measure, scheduling
from testing.namespaces import NetworkUnavailable, throttled_network

NAME = "schedule"
LOOPBACK = "loopback"
SETTINGS = [
    Setting(ranks, chunks, micro_batches) for ranks, chunks, micro_batches in product((4, 8), (1, 2, 4, 8), (8, 16))
]
SLOW_SETTINGS = [setting._replace(elements=MEGABYTE // 4) for setting in SETTINGS]
RATIO = "step / simulated"
LIMIT, LIMIT_MANY_RANKS = 1.03, 1.05
"""Limit of the ratio, up to 4 ranks and with more."""


def run(
    settings: Sequence[Setting] = SETTINGS,
    slow_settings: Sequence[Setting] = SLOW_SETTINGS,
    contenders: Sequence[Contender] = CONTENDERS,
    repetitions: int = REPETITIONS,
) -> Record:
    """Measures ``settings`` on loopback and ``slow_settings`` over the slow link. Records the reason if this machine
    cannot make one."""
    record = begin(NAME)
    for members in _by_ranks(settings):
        _enter(record, LOOPBACK, contenders, members, measure(members, contenders, repetitions))
    for members in _by_ranks(slow_settings):
        try:
            with throttled_network(members[0].pipeline_ranks, SLOW_RATE) as network:
                measured = measure(members, contenders, repetitions, network.enter)
        except NetworkUnavailable as reason:
            record.lack_network(f"nothing measured at {SLOW}", reason)
            break
        _enter(record, SLOW, contenders, members, measured)
    return record


def _by_ranks(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Groups the settings by number of ranks. One group runs on one set of processes."""
    numbers = dict.fromkeys(setting.pipeline_ranks for setting in settings)
    return [[setting for setting in settings if setting.pipeline_ranks == number] for number in numbers]


def _enter(
    record: Record, link: str, contenders: Sequence[Contender], settings: Sequence[Setting], measured: Measured
) -> None:
    """Enters the rows of one group and its target."""
    record.machine["scheduling"] = scheduling(measured.precise)
    ratios: dict[str, list[float]] = {LAYERED.name: [], BARE_LOOP.name: []}
    for setting, hop, seconds in zip(settings, measured.hops, measured.seconds):
        config = {
            "pipeline_ranks": setting.pipeline_ranks,
            "chunks_per_rank": setting.chunks_per_rank,
            "micro_batches": setting.micro_batches,
            "link": link,
        }
        enter_hop(record, config, hop)
        for contender in contenders:
            if contender.suits(setting):
                timeline = simulated(contender, setting, median(hop.one_way) if link == SLOW else 0.0)
                steps = seconds[contender.name]
                record.add(contender.name, config, RATIO, [step / timeline.step_time for step in steps], "ratio")
                enter_bubbles(record, contender.name, config, steps, timeline)
                if contender.name in ratios:
                    ratios[contender.name].append(median(steps) / timeline.step_time)
    ranks = settings[0].pipeline_ranks
    limit = LIMIT if ranks <= 4 else LIMIT_MANY_RANKS
    text = f"largest {RATIO} of {LAYERED.name}, {ranks} pipeline ranks, {link}"
    if ratios[LAYERED.name]:
        record.aim(text, max(ratios[LAYERED.name]), limit, floor=max(ratios[BARE_LOOP.name], default=None))
