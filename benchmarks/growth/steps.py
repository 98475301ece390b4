"""Measures the overhead of a step along an axis. The engine is ds_lgamp's, compute is virtual, messages and collectives
are real and go over gloo.

CPU time is measured with chunks that neither compute nor sleep. It covers the engine, autograd and gloo calls of the
threads that execute programs. Time by the clock is measured with chunks that sleep. The time beyond the simulated step
is divided by the number of forwards and backwards that the simulation runs one after another.
"""

import gc
from collections.abc import Sequence
from statistics import median
from time import thread_time
from typing import NamedTuple

import torch.distributed as dist

from benchmarks.growth.job import Axis, Job
from benchmarks.record import OURS, Record
from benchmarks.virtual.chunk import Setting
from benchmarks.virtual.pipelines import Executed, spec_of
from benchmarks.virtual.steps import Start, Step, check_durations, is_precise, scheduling, time_step
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import ProgramSpec
from testing.ranks import run_on_ranks

BASE = Job(pipeline_ranks=2, data_ranks=2, chunks_per_rank=4, micro_batches=16)
AXES = (
    Axis("chunks_per_rank", BASE, (1, 2, 4, 8, 16)),
    Axis("micro_batches", BASE, (4, 8, 16, 32, 64)),
    Axis("pipeline_ranks", BASE._replace(data_ranks=1), (1, 2, 4, 8)),
    Axis("data_ranks", BASE._replace(pipeline_ranks=1), (1, 2, 4, 8)),
)
"""One pipeline rank sends no messages and one data-parallel rank has no collectives, so neither is a base."""
FORWARD = 0.005
"""Seconds per chunk and micro-batch if chunks sleep. A backward takes twice as long."""
PARAMETERS = 2016
"""Parameters of a chunk besides its weight. Collectives are small, and eight ranks have equal parts."""
IDLE_STEPS = 10
"""Steps without sleep that are timed together."""
SLEEPING, IDLE = "sleeping", "idle"
CPU, CLOCK = "CPU time per action", "beyond simulated, per forward and backward"
LIMIT = 1.2
SECONDS = 1200


def enter(record: Record, axes: Sequence[Axis], repetitions: int) -> None:
    """Enters rows and targets of all axes."""
    jobs = dict.fromkeys(job for axis in axes for job in axis.jobs)
    found = {}
    for ranks in dict.fromkeys(_ranks(job) for job in jobs):
        found.update(_measure(record, [job for job in jobs if _ranks(job) == ranks], repetitions))
    for axis in axes:
        for job in axis.jobs:
            for metric, samples in found[job].items():
                record.add(OURS, job.config(axis.name), metric, samples, "us")
        # Ranks share cores, so the clock time with more ranks depends on the machine.
        for metric in (CPU,) if axis.grows_ranks else (CPU, CLOCK):
            axis.aim(record, metric, [median(found[job][metric]) for job in axis.jobs], LIMIT)


def _measure(record: Record, jobs: Sequence[Job], repetitions: int) -> dict[Job, dict[str, list[float]]]:
    """Returns the samples in microseconds by job and metric. All ``jobs`` must have the same number of ranks."""
    ranks = _ranks(jobs[0])
    on_ranks = run_on_ranks(ranks, _measure_on_rank, jobs, repetitions, before_init=Start(None), seconds=SECONDS)
    record.machine["scheduling"] = scheduling(all(precise for _, precise in on_ranks))
    found = {}
    for job, of_ranks in zip(jobs, zip(*(timed for timed, _ in on_ranks))):
        setting = setting_of(job)
        program = build_program(_spec(setting))
        actions = IDLE_STEPS * job.data_ranks * sum(map(len, program))
        on_paper = simulate(_spec(setting), program, setting.durations()).step_time
        computes = on_paper / (setting.forward + setting.backward)
        durations = check_durations(setting, [timed.steps for timed in of_ranks])
        found[job] = {
            CPU: [sum(seconds) / actions * 1e6 for seconds in zip(*(timed.cpu for timed in of_ranks))],
            CLOCK: [(seconds - on_paper) / computes * 1e6 for seconds in durations[SLEEPING]],
        }
    return found


def setting_of(job: Job) -> Setting:
    return Setting(
        job.pipeline_ranks,
        job.chunks_per_rank,
        job.micro_batches,
        FORWARD,
        2 * FORWARD,
        data_ranks=job.data_ranks,
        parameters=PARAMETERS,
    )


class Timed(NamedTuple):
    """Results of one job on a rank."""

    steps: dict[str, list[Step]]
    """Steps with and without sleep."""
    cpu: list[float]
    """CPU seconds of the executing thread for ``IDLE_STEPS`` steps without sleep."""


def _measure_on_rank(jobs: Sequence[Job], repetitions: int) -> tuple[list[Timed], bool]:
    """Measures all jobs on one rank. They alternate; the first step of each does not count."""
    settings = [setting_of(job) for job in jobs]
    sleeping = [Executed(setting, "layered", zero_stage=3) for setting in settings]
    idle = [Executed(setting._replace(forward=0.0, backward=0.0), "layered", zero_stage=3) for setting in settings]
    gc.collect()
    gc.freeze()
    found = [Timed({SLEEPING: [time_step(long)], IDLE: [time_step(short)]}, []) for long, short in zip(sleeping, idle)]
    for _ in range(repetitions):
        for timed, long, short in zip(found, sleeping, idle):
            timed.steps[SLEEPING].append(time_step(long))
            timed.cpu.append(_cpu_seconds(short))
    return found, is_precise()


def _cpu_seconds(pipeline: Executed) -> float:
    """CPU seconds of steps without pauses, which would make caches cold."""
    dist.barrier()
    start = thread_time()
    for _ in range(IDLE_STEPS):
        pipeline.step()
    return thread_time() - start


def _spec(setting: Setting) -> ProgramSpec:
    return spec_of("layered", setting, zero_stage=3)


def _ranks(job: Job) -> int:
    return job.pipeline_ranks * job.data_ranks
