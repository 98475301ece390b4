"""Measures how much of the gathers and reductions compute hides: ``python -m benchmarks run overlap``.

Compute is virtual (every chunk sleeps). Collectives are real and go over gloo and throttled links with short queues, so
that small messages of pipelines pass them. The number of parameters per chunk makes the collectives of a step at ZeRO
stage 3 with two resident chunks take about ``SHARE`` of its compute, at the full rate of the link. The simulation
(``ds_lgamp/schedule/simulate.py``) uses the time of one gather and one reduction alone, measured in the same run. The
step without collectives is also measured in the same run, with chunks that have no parameters but their weight. The
schedule benchmark measures the executor's own cost beside it. Waits are read from the executor's stopwatch on the rank
that waits longest.
"""

import gc
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.record import OURS, REPETITIONS, Record, begin
from benchmarks.schedule import LIMIT
from benchmarks.virtual.chunk import Setting, sleep_until
from benchmarks.virtual.pipelines import Executed, data_group, spec_of
from benchmarks.virtual.steps import (
    Start,
    Step,
    begin_together,
    check_durations,
    is_precise,
    scheduling,
    time_step,
)
from ds_lgamp.partition.collectives import start_all_gather, start_reduce_scatter
from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.costs import Durations
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import Timeline, simulate
from testing.namespaces import NetworkUnavailable, throttled_network
from testing.ranks import run_on_ranks

NAME = "overlap"
RATE, BYTES_PER_SECOND = "1gbit", 125e6
SHORT = 1 << 17
"""Bytes of a connection that may wait where queues are short."""
SHARE = 0.4
LAYOUTS = ((1, 2), (1, 4), (2, 2))
"""Pipeline ranks and data-parallel ranks."""
POLICIES = ((1, 2), (2, 2), (3, 2), (3, 1))
"""ZeRO stage and resident chunks."""
COLLECTIVES = 20
"""Collectives of each kind that a calibration times, after a first one."""
COMPUTE = f"{OURS}, no collectives"
APART = 0.001
"""Seconds between the starts of neighbouring data-parallel ranks."""
BOUND = "step / (compute + first gather + last reduction)"
RATIO = "step / simulated"
KINDS = {"gather": Kind.GATHER, "reduce": Kind.REDUCE}
"""By the stopwatch's name of the wait."""


class OnRank(NamedTuple):
    """Results of one rank."""

    alone: dict[str, list[float]]
    """By kind, seconds of a collective that has the network for itself."""
    steps: dict[str, list[Step]]
    """By policy."""
    waits: dict[str, list[dict[str, float]]]
    """The stopwatch's readings, by policy and step."""
    precise: bool
    """Whether this rank had real-time priority."""


def setting_of(pipeline_ranks: int, data_ranks: int) -> Setting:
    """Four chunks per rank and four micro-batches, with as many parameters as ``SHARE`` requires."""
    return sized(Setting(pipeline_ranks, chunks_per_rank=4, micro_batches=4, data_ranks=data_ranks), SHARE)


def sized(setting: Setting, share: float) -> Setting:
    """Returns ``setting`` with parameters, so that the collectives of a step at ZeRO stage 3 with two resident chunks
    take ``share`` of its compute at the full rate."""
    compute = setting.chunks_per_rank * setting.micro_batches * (setting.forward + setting.backward)
    bytes_sent = share * compute / sum(collectives(setting, 3)) * BYTES_PER_SECOND
    # A rank sends one part to, or for, every other rank.
    return setting._replace(parameters=round(bytes_sent / 4 / (setting.data_ranks - 1)) * setting.data_ranks - 1)


def collectives(setting: Setting, zero_stage: int, micro_batch_group: int | None = None) -> list[int]:
    """Gathers and reductions of a step on the rank that has most."""
    program = build_program(spec_of("layered", setting, zero_stage, micro_batch_group=micro_batch_group))
    counts = [[sum(action.kind is kind for action in actions) for kind in KINDS.values()] for actions in program]
    return max(counts, key=sum)


def run(
    layouts: Sequence[tuple[int, int]] = LAYOUTS,
    policies: Sequence[tuple[int, int]] = POLICIES,
    repetitions: int = REPETITIONS,
) -> Record:
    """Measures every policy in every layout. Records the reason if this machine cannot make a slow link."""
    record = begin(NAME)
    for layout in layouts:
        setting = setting_of(*layout)
        try:
            with throttled_network(setting.pipeline_ranks * setting.data_ranks, RATE, socket_queue=SHORT) as network:
                found = measure(setting, policies, repetitions, network.enter)
        except NetworkUnavailable as reason:
            record.lack_network(f"nothing measured at {RATE}", reason)
            break
        enter(record, setting, policies, found)
    return record


def measure(
    setting: Setting,
    policies: Sequence[tuple[int, int]],
    repetitions: int,
    enter_network: Callable[[int], None] | None = None,
) -> list[OnRank]:
    """Runs all policies in turns on one set of processes. Returns the results of each rank."""
    ranks = setting.pipeline_ranks * setting.data_ranks
    return run_on_ranks(ranks, _measure_on_rank, setting, policies, repetitions, before_init=Start(enter_network))


def name_of(zero_stage: int, resident_chunks: int) -> str:
    return f"{OURS}, ZeRO-{zero_stage}, {resident_chunks} resident"


def simulated(setting: Setting, policy: tuple[int, int], durations: Durations) -> Timeline:
    """The simulated timeline of the layered order."""
    spec = spec_of("layered", setting, *policy)
    return simulate(spec, build_program(spec), durations)


def enter(record: Record, setting: Setting, policies: Sequence[tuple[int, int]], found: Sequence[OnRank]) -> None:
    """Enters the rows of one layout and its target."""
    config = {"pipeline_ranks": setting.pipeline_ranks, "data_ranks": setting.data_ranks}
    precise = all(on_rank.precise for on_rank in found)
    record.machine["scheduling"] = scheduling(precise)
    alone = {}
    for kind in KINDS:
        # Of the rank that begins last.
        samples = found[setting.data_ranks - 1].alone[kind]
        record.add("gloo", config, f"{kind} alone", [sample * 1000 for sample in samples], "ms")
        alone[kind] = median(samples)
    seconds = check_durations(setting, [on_rank.steps for on_rank in found])
    record.add(COMPUTE, config, "step", [step * 1000 for step in seconds[COMPUTE]], "ms")
    limit = median(seconds[COMPUTE]) + sum(alone.values())
    hidden = []
    for policy in policies:
        name = name_of(*policy)
        timeline = simulated(setting, policy, setting.durations(**alone))
        bound = [step / limit for step in seconds[name]]
        record.add(name, config, BOUND, bound, "ratio")
        record.add(name, config, RATIO, [step / timeline.step_time for step in seconds[name]], "ratio")
        for word, kind in KINDS.items():
            steps = zip(*(on_rank.waits[name][1:] for on_rank in found))
            longest = [max(waits[word] for waits in ranks) * 1000 for ranks in steps]
            record.add(name, config, f"exposed {word}", longest, "ms")
            record.add(name, config, f"simulated exposed {word}", [max(timeline.exposed(kind)) * 1000], "ms")
        if policy[0] < 3 or policy[1] > 1:
            hidden.append(bound)
    text = f"largest {BOUND}, {setting.pipeline_ranks} x {setting.data_ranks} ranks, 2 resident chunks"
    worst = max(hidden, key=median)
    record.aim(text, median(worst), LIMIT, samples=worst)


def _measure_on_rank(setting: Setting, policies: Sequence[tuple[int, int]], repetitions: int) -> OnRank:
    alone = calibrate(setting)
    pipelines = {name_of(*policy): Executed(setting, "layered", *policy) for policy in policies}
    pipelines[COMPUTE] = Executed(setting._replace(parameters=0), "layered", alone=True)
    gc.collect()
    gc.freeze()
    steps: dict[str, list[Step]] = {name: [] for name in pipelines}
    waits: dict[str, list[dict[str, float]]] = {name: [] for name in pipelines}
    for _ in range(repetitions + 1):
        for name, pipeline in pipelines.items():
            stopwatch = pipeline.executor.timing
            stopwatch.running = True
            steps[name].append(time_step(pipeline))
            waits[name].append(stopwatch.read())
    return OnRank(alone, steps, waits, is_precise())


def calibrate(setting: Setting) -> dict[str, list[float]]:
    """Seconds of gathers and reductions of one chunk, each alone."""
    group = data_group(setting.data_ranks)
    part = torch.zeros(-(-(setting.parameters + 1) // setting.data_ranks))
    full = torch.zeros(part.numel() * setting.data_ranks)
    calls = {
        "gather": lambda: start_all_gather(full, part, group).wait(),
        "reduce": lambda: start_reduce_scatter(full, group, torch.float32)(),
    }
    return {kind: [_seconds(call, group.rank()) for _ in range(COLLECTIVES + 1)][1:] for kind, call in calls.items()}


def _seconds(call: Callable[[], object], data_rank: int) -> float:
    """Seconds of a collective whose ranks begin a little apart, as they do behind compute.

    gloo's all-to-all between two ranks uses both directions of the link at once only if both ranks begin at the same
    instant. Otherwise the later rank's ready message queues behind the data it sends.
    """
    begin_together()
    start = time.monotonic() + APART * data_rank
    sleep_until(start)
    call()
    return time.monotonic() - start
