"""Compares predicted with measured steps: ``python -m benchmarks run prediction``.

Compute is virtual (every chunk sleeps). Messages and collectives are real and go over gloo and throttled links, and
share each rank's network card. The configurations differ in schedule, pipeline and data-parallel ranks, chunks, their
lengths, micro-batches, ZeRO stage, resident chunks, sizes and rate.

A prediction is the clock's (``ds_lgamp/schedule/simulate.py``). It knows the configuration, and of this machine only
what the same run calibrates with other sizes than it predicts: latency and seconds per byte of messages and of
collectives, each alone, and what the engine adds to each compute.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch.distributed as dist

from benchmarks.overlap import calibrate
from benchmarks.record import OURS, REPETITIONS, Record, begin
from benchmarks.virtual.chunk import Setting
from benchmarks.virtual.pipelines import Executed, spec_of
from benchmarks.virtual.steps import (
    Start,
    Step,
    calibrate_hop,
    check_durations,
    is_precise,
    scheduling,
    time_step,
)
from ds_lgamp.schedule.costs import Costs, uniform_costs
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from testing.namespaces import NetworkUnavailable, throttled_network
from testing.ranks import run_on_ranks

NAME = "prediction"
RATES = {"1gbit": "1 Gbit/s", "200mbit": "200 Mbit/s"}
"""Rates as tc and as people write them."""
CLOSE, LIMIT, NEAR_ENOUGH = 0.05, 0.10, 20
"""Relative errors, and how many of the 24 predictions must be within the smaller one."""
RATIO = "predicted / measured"
EVEN, UNEVEN, LONG_END = (1.0,), (1.0, 0.6, 1.4), (1.0, 1.0, 1.0, 1.5)
SECONDS = 1200


class Case(NamedTuple):
    """One configuration."""

    schedule: str
    rate: str
    setting: Setting
    zero_stage: int = 0
    resident_chunks: int = 2

    @property
    def config(self) -> dict[str, int | float | str]:
        of = self.setting
        return {
            "schedule": self.schedule,
            "rate": RATES[self.rate],
            "pipeline_ranks": of.pipeline_ranks,
            "data_ranks": of.data_ranks,
            "chunks_per_rank": of.chunks_per_rank,
            "micro_batches": of.micro_batches,
            "zero_stage": self.zero_stage,
            "resident_chunks": self.resident_chunks,
            "lengths": " ".join(f"{length:g}" for length in of.lengths),
            "forward_ms": of.forward * 1000,
            "message_kb": of.elements * 4 / 1000,
            "chunk_kb": of.parameters * 4 / 1000,
        }


def _case(
    schedule: str,
    rate: str,
    ranks: tuple[int, int],
    chunks: int,
    micro_batches: int,
    kilobytes: tuple[int, int],
    stage: int = 0,
    resident: int = 2,
    lengths: tuple[float, ...] = EVEN,
    forward: float = 0.010,
) -> Case:
    """Returns a case. ``ranks``: pipeline and data-parallel ranks. ``kilobytes``: of a message and of a chunk."""
    elements, parameters = kilobytes[0] * 250, kilobytes[1] * 250
    backward = 2 * forward
    return Case(
        schedule,
        rate,
        Setting(ranks[0], chunks, micro_batches, forward, backward, max(elements, 64), ranks[1], parameters, lengths),
        stage,
        resident,
    )


CASES = [
    _case("layered", "1gbit", (1, 2), 4, 4, (1, 3000), 3),
    _case("layered", "1gbit", (1, 2), 6, 8, (1, 1500), 3, resident=1),
    _case("layered", "1gbit", (1, 2), 4, 6, (1, 4000), 2, lengths=UNEVEN),
    _case("layered", "200mbit", (1, 2), 4, 8, (1, 800), 3),
    _case("layered", "200mbit", (1, 2), 8, 4, (1, 600), 3, lengths=UNEVEN),
    _case("layered", "200mbit", (1, 2), 4, 8, (1, 1000), 1),
    _case("layered", "1gbit", (2, 2), 4, 4, (500, 1500), 3),
    _case("layered", "1gbit", (2, 2), 2, 8, (800, 3000), 3, lengths=UNEVEN),
    _case("layered", "1gbit", (2, 2), 4, 8, (300, 1000), 2),
    _case("interleaved_1f1b", "1gbit", (2, 2), 2, 8, (400, 2000), 1),
    _case("1f1b", "1gbit", (2, 2), 1, 8, (600, 4000), 1),
    _case("gpipe", "1gbit", (2, 2), 1, 6, (1000, 2000), 2),
    _case("layered", "200mbit", (2, 2), 4, 8, (60, 500), 3),
    _case("layered", "200mbit", (2, 2), 2, 6, (100, 700), 3, lengths=LONG_END),
    _case("1f1b", "200mbit", (2, 2), 1, 8, (150, 1000), 1, lengths=UNEVEN),
    _case("layered", "1gbit", (4, 1), 4, 8, (500, 0)),
    _case("layered", "1gbit", (4, 1), 2, 6, (1000, 0), lengths=UNEVEN),
    _case("layered", "1gbit", (4, 1), 4, 3, (300, 0)),
    _case("interleaved_1f1b", "1gbit", (4, 1), 2, 8, (700, 0)),
    _case("1f1b", "1gbit", (4, 1), 1, 8, (1200, 0), lengths=LONG_END),
    _case("gpipe", "1gbit", (4, 1), 1, 8, (900, 0)),
    _case("layered", "200mbit", (4, 1), 2, 8, (100, 0), forward=0.015),
    _case("interleaved_1f1b", "200mbit", (4, 1), 4, 8, (60, 0), lengths=UNEVEN),
    _case("1f1b", "200mbit", (4, 1), 1, 4, (250, 0), forward=0.020),
]


class Line(NamedTuple):
    """Seconds of something that moves bytes: ``start`` and ``each`` byte."""

    start: float
    each: float

    @classmethod
    def through(cls, first: tuple[int, float], second: tuple[int, float]) -> "Line":
        """Returns the line through two measured points (bytes, seconds)."""
        each = max(0.0, (second[1] - first[1]) / (second[0] - first[0]))
        return cls(max(0.0, first[1] - each * first[0]), each)

    def seconds(self, amount: int) -> float:
        return self.start + self.each * amount


class Machine(NamedTuple):
    """What a run calibrates of this machine, for one number of ranks and one rate."""

    message: Line
    gather: Line
    reduce: Line
    compute: float
    """Seconds that the engine adds to a forward or a backward."""


class OnRank(NamedTuple):
    """Results of one rank."""

    machine: Machine
    steps: list[dict[str, list[Step]]]
    """By case."""
    precise: bool


def run(cases: Sequence[Case] = CASES, repetitions: int = REPETITIONS) -> Record:
    """Measures and predicts ``cases``. Records the reason if this machine cannot make a slow link."""
    record = begin(NAME)
    ratios: list[float] = []
    for members in _alike(cases):
        of = members[0].setting
        try:
            with throttled_network(of.pipeline_ranks * of.data_ranks, members[0].rate) as network:
                found = measure(members, repetitions, network.enter)
        except NetworkUnavailable as reason:
            record.lack_network("nothing measured", reason)
            return record
        ratios += enter(record, members, found)
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    near = sum(error <= CLOSE for error in errors)
    record.aim(f"predictions of {len(errors)} that err by more than {CLOSE:.0%}", len(errors) - near, 4)
    record.aim("largest error of a prediction", errors[-1], LIMIT)
    return record


def _alike(cases: Sequence[Case]) -> list[list[Case]]:
    """Groups the cases that run on one set of processes and one network."""
    groups: dict[tuple, list[Case]] = {}
    for case in cases:
        key = case.rate, case.setting.pipeline_ranks, case.setting.data_ranks
        groups.setdefault(key, []).append(case)
    return list(groups.values())


def measure(
    cases: Sequence[Case], repetitions: int, enter_network: Callable[[int], None] | None = None
) -> list[OnRank]:
    """Calibrates, then runs all cases in turns on one set of processes. Returns the results of each rank."""
    ranks = cases[0].setting.pipeline_ranks * cases[0].setting.data_ranks
    before = Start(enter_network)
    return run_on_ranks(ranks, _measure_on_rank, cases, repetitions, before_init=before, seconds=SECONDS)


def enter(record: Record, cases: Sequence[Case], found: Sequence[OnRank]) -> list[float]:
    """Enters the rows of one group. Returns predicted / measured of every case."""
    record.machine["scheduling"] = scheduling(all(on_rank.precise for on_rank in found))
    # Of the rank that begins last.
    machine = found[cases[0].setting.data_ranks - 1].machine
    ratios = []
    for number, case in enumerate(cases):
        seconds = check_durations(case.setting, [on_rank.steps[number] for on_rank in found])[OURS]
        predicted = predict(case, machine)
        record.add(OURS, case.config, "measured", [step * 1000 for step in seconds], "ms")
        record.add(OURS, case.config, "predicted", [predicted * 1000], "ms")
        record.add(OURS, case.config, RATIO, [predicted / step for step in seconds], "ratio")
        ratios.append(predicted / median(seconds))
    return ratios


def predict(case: Case, machine: Machine) -> float:
    """Returns the predicted seconds of a step."""
    spec = spec_of(case.schedule, case.setting, case.zero_stage, case.resident_chunks)
    return simulate(spec, build_program(spec), costs_of(case, machine)).step_time


def costs_of(case: Case, machine: Machine) -> Costs:
    """Returns what the clock needs to know."""
    of = case.setting
    spec = spec_of(case.schedule, of, case.zero_stage, case.resident_chunks)
    message, chunk = of.elements * 4, (of.parameters + 1) * 4
    lone = of.data_ranks == 1
    durations = of.durations(
        hop=machine.message.seconds(message),
        message=machine.message.each * message,
        gather=0.0 if lone else machine.gather.seconds(chunk),
        reduce=0.0 if lone else machine.reduce.seconds(chunk),
    )
    lengths = [of.length(index) for index in range(of.chunks)]
    return replace(
        uniform_costs(spec, durations),
        forward=[of.forward * length + machine.compute for length in lengths],
        backward=[of.backward * length + machine.compute for length in lengths],
        shares_card=True,
    )


def _measure_on_rank(cases: Sequence[Case], repetitions: int) -> OnRank:
    machine = _calibrate(cases[0].setting)
    pipelines = [Executed(case.setting, case.schedule, case.zero_stage, case.resident_chunks) for case in cases]
    gc.collect()
    gc.freeze()
    steps: list[dict[str, list[Step]]] = [{OURS: []} for _ in cases]
    for _ in range(repetitions + 1):
        for entered, pipeline in zip(steps, pipelines):
            entered[OURS].append(time_step(pipeline))
    return OnRank(machine, steps, is_precise())


MESSAGES = 64, 1 << 18
CHUNKS = 1 << 14, 1 << 20
"""Elements of the sizes that a calibration moves."""


def _calibrate(setting: Setting) -> Machine:
    """Measures lines through two sizes, and what the engine adds to a compute. Collective over all ranks."""
    message = Line.through(*((4 * size, median(calibrate_hop(size).one_way)) for size in MESSAGES))
    if setting.data_ranks == 1:
        gather = reduce = Line(0.0, 0.0)
    else:
        alone = [calibrate(setting._replace(parameters=size - 1)) for size in CHUNKS]
        gather, reduce = (
            Line.through(*((4 * size, median(of[kind])) for size, of in zip(CHUNKS, alone)))
            for kind in ("gather", "reduce")
        )
    return Machine(message, gather, reduce, _added_to_a_compute())


def _added_to_a_compute() -> float:
    """Returns the seconds that the engine adds to a forward or a backward. Every rank runs short chunks by itself, all
    at the same time."""
    setting = Setting(1, 4, 8, forward=0.002, backward=0.004, data_ranks=dist.get_world_size())
    pipeline = Executed(setting, "layered", alone=True)
    steps = [time_step(pipeline) for _ in range(REPETITIONS + 1)][1:]
    chunks = setting.chunks * setting.micro_batches
    added = median(step.end - step.start for step in steps) - chunks * (setting.forward + setting.backward)
    return max(0.0, added / (2 * chunks))
