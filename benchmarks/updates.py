"""Measures what it saves to update chunks one by one on a slow network: ``python -m benchmarks run updates``.

Chunks sleep, in their forwards, backwards and updates. Collectives are real and go over gloo and throttled links. The
number of parameters makes the collectives of a step at ZeRO stage 3 last about ``SHARE`` of its compute at 1 Gbit/s. So
the slower rate bounds the step, and the faster one hardly matters. The three ways take turns, and each turn makes
several steps without a pause, because a step may leave its updates to the next one. The time counts from the end of the
first step to the end of the last.
"""

from collections.abc import Callable, Sequence
from itertools import product
from statistics import median

from benchmarks.overlap import calibrate, sized
from benchmarks.record import OURS, REPETITIONS, Record, begin
from benchmarks.virtual.chunk import Setting
from benchmarks.virtual.pipelines import Executed, spec_of
from benchmarks.virtual.steps import Start, is_precise, scheduling, seconds_in_turns
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from testing.namespaces import NetworkUnavailable, throttled_network
from testing.ranks import run_on_ranks

NAME = "updates"
SHARE = 0.16
RATES = {"1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
"""As tc and as people write them."""
LAYOUTS = ((1, 2), (2, 2))
"""Pipeline ranks and data-parallel ranks."""
STAGES = (1, 3)
WAYS = {
    "step": f"{OURS}, all updates at the step",
    "reduction": f"{OURS}, each update after its reduction",
    "next_step": f"{OURS}, each update in the next step",
}
"""By the value of ``ProgramSpec.updates``."""
RATIO = "all at the step / one by one"
STEPS = 4
"""Steps per turn, including the first, which does not count."""
SECONDS = 900

Found = tuple[dict[str, list[float]], dict[tuple[int, str], list[float]], bool]
"""Results of a rank: seconds of collectives that have the network for themselves, by kind; seconds per step of every
turn but the first, by stage and way; and whether it had real-time priority."""


def setting_of(pipeline_ranks: int, data_ranks: int) -> Setting:
    """Four chunks per rank and four micro-batches. An update takes as long as a backward of one micro-batch."""
    setting = Setting(pipeline_ranks, 4, 4, forward=0.005, backward=0.010, data_ranks=data_ranks, update=0.010)
    return sized(setting, SHARE)


def run(
    layouts: Sequence[tuple[int, int]] = LAYOUTS, rates: Sequence[str] = tuple(RATES), turns: int = REPETITIONS
) -> Record:
    """Measures every layout at every rate. Records the reason if this machine cannot make a slow link."""
    record = begin(NAME)
    for layout, rate in product(layouts, rates):
        setting = setting_of(*layout)
        try:
            with throttled_network(setting.pipeline_ranks * setting.data_ranks, rate) as network:
                found = measure(setting, turns, network.enter)
        except NetworkUnavailable as reason:
            record.lack_network("nothing measured", reason)
            break
        enter(record, setting, rate, found)
    return record


def measure(
    setting: Setting, turns: int, enter_network: Callable[[int], None] | None = None, steps: int = STEPS
) -> list[Found]:
    """Runs all ways in turns on one set of processes. Returns the results of each rank."""
    ranks = setting.pipeline_ranks * setting.data_ranks
    return run_on_ranks(
        ranks, _measure_on_rank, setting, turns, steps, before_init=Start(enter_network), seconds=SECONDS
    )


def enter(record: Record, setting: Setting, rate: str, found: Sequence[Found]) -> None:
    """Enters the rows of one layout and rate: measured and simulated seconds, and the ratio to updates at the step."""
    record.machine["scheduling"] = scheduling(all(precise for _, _, precise in found))
    # Of the rank that begins last.
    alone = {kind: median(samples) for kind, samples in found[setting.data_ranks - 1][0].items()}
    for stage in STAGES:
        config = {
            "pipeline_ranks": setting.pipeline_ranks,
            "data_ranks": setting.data_ranks,
            "rate": RATES[rate],
            "zero_stage": stage,
        }
        seconds = {way: [max(turn) for turn in zip(*(steps[stage, way] for _, steps, _ in found))] for way in WAYS}
        for way, name in WAYS.items():
            spec = spec_of("layered", setting, stage, updates=way)
            on_paper = simulate(spec, build_program(spec), setting.durations(**alone)).step_time
            record.add(name, config, "step", [1000 * each for each in seconds[way]], "ms")
            record.add(name, config, "simulated", [1000 * on_paper], "ms")
            pairs = zip(seconds["step"], seconds[way])
            record.add(name, config, RATIO, [at_step / one_by_one for at_step, one_by_one in pairs], "ratio")


def _measure_on_rank(setting: Setting, turns: int, steps: int) -> Found:
    alone = calibrate(setting)
    pipelines = {(stage, way): Executed(setting, "layered", stage, updates=way) for stage, way in product(STAGES, WAYS)}
    return alone, seconds_in_turns(pipelines, turns, steps), is_precise()
