"""How close a step comes to the simulated time of its order: ``python -m benchmarks run schedule``.

Compute is virtual (every chunk sleeps), messages are real gloo. Every contender's step is divided by what
``ds_lgamp/schedule/simulate.py`` says for its own order. On loopback a hop counts as nothing. On the slow link it
counts as one message's way alone, calibrated in the same run. What a message waits for others, or for news that the
receiver is ready, is left to the contenders; messages both ways at once are calibrated beside it.
"""

from collections.abc import Sequence
from itertools import product
from statistics import median

from benchmarks.namespaces import NetworkUnavailable, throttled_network
from benchmarks.record import REPETITIONS, Record, begin
from benchmarks.virtual.bubbles import MEGABYTE, SLOW, SLOW_RATE, enter_bubbles, enter_hop, simulated
from benchmarks.virtual.chunk import Setting
from benchmarks.virtual.pipelines import CONTENDERS, LAYERED, Contender
from benchmarks.virtual.steps import Measured, measure, scheduling

NAME = "schedule"
LOOPBACK = "loopback"
SETTINGS = [
    Setting(ranks, chunks, micro_batches) for ranks, chunks, micro_batches in product((4, 8), (1, 2, 4, 8), (8, 16))
]
SLOW_SETTINGS = [setting._replace(elements=MEGABYTE // 4) for setting in SETTINGS]
RATIO = "step / simulated"
LIMIT, LIMIT_MANY_RANKS = 1.03, 1.05
"""Of the ratio, up to 4 ranks and with more."""


def run(
    settings: Sequence[Setting] = SETTINGS,
    slow_settings: Sequence[Setting] = SLOW_SETTINGS,
    contenders: Sequence[Contender] = CONTENDERS,
    repetitions: int = REPETITIONS,
) -> Record:
    """Measures ``settings`` on loopback and ``slow_settings`` over the slow link; says so where there can be none."""
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
    """One spawn's settings each."""
    numbers = dict.fromkeys(setting.pipeline_ranks for setting in settings)
    return [[setting for setting in settings if setting.pipeline_ranks == number] for number in numbers]


def _enter(
    record: Record, link: str, contenders: Sequence[Contender], settings: Sequence[Setting], measured: Measured
) -> None:
    """The rows of one spawn and its target."""
    record.machine["scheduling"] = scheduling(measured.precise)
    ratios = []
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
                if contender.name == LAYERED.name:
                    ratios.append(median(steps) / timeline.step_time)
    ranks = settings[0].pipeline_ranks
    limit = LIMIT if ranks <= 4 else LIMIT_MANY_RANKS
    if ratios:
        record.aim(f"largest {RATIO} of {LAYERED.name}, {ranks} pipeline ranks, {link}", max(ratios), limit)
