"""Measures programs along an axis: actions and memory of one rank's program, build time, and validation time of all
ranks."""

import gc
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from benchmarks.growth.job import Axis, Job
from benchmarks.record import OURS, Record
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_program, build_rank_program
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.validate import validate

BASE = Job(pipeline_ranks=8, data_ranks=1, chunks_per_rank=4, micro_batches=64)
AXES = (
    Axis("chunks_per_rank", BASE, (1, 2, 4, 8, 16)),
    Axis("micro_batches", BASE, (8, 16, 32, 64, 128, 256, 512)),
    Axis("pipeline_ranks", BASE, (1, 2, 4, 8, 16, 32, 64)),
)
LARGEST = Job(pipeline_ranks=64, data_ranks=1, chunks_per_rank=16, micro_batches=512)
RESIDENT_CHUNKS = 2
ENOUGH = 50_000
"""Smallest number of actions that one timing covers."""
ACTIONS, BYTES = "actions of one rank", "memory of one rank's, per action"
BUILD, VALIDATE = "build one rank's, per action", "validate all, per action"
METRICS = {ACTIONS: "actions", BYTES: "bytes", BUILD: "us", VALIDATE: "us"}
"""Metrics with their units."""
BUILD_ONE, VALIDATE_ALL = "build one rank's program", "validate all ranks' programs"
LIMIT = 1.2
BUILD_SECONDS, VALIDATE_SECONDS = 1, 60
"""Limits in seconds that a launch can tolerate."""


def enter(record: Record, axes: Sequence[Axis], repetitions: int, largest: Job) -> None:
    """Enters rows and targets of all axes and of the ``largest`` job."""
    jobs = dict.fromkeys(job for axis in axes for job in axis.jobs)
    # A garbage collection would traverse the modules of all frameworks.
    gc.collect()
    gc.freeze()
    found = measure([*jobs, largest], repetitions)
    gc.unfreeze()
    for axis in axes:
        for job in axis.jobs:
            _enter_job(record, axis.name, job, found[job])
        for metric in (BYTES, BUILD, VALIDATE):
            axis.aim(record, metric, [median(found[job][metric]) for job in axis.jobs], LIMIT)
    _enter_job(record, "all", largest, found[largest])
    for metric, limit in ((BUILD_ONE, BUILD_SECONDS), (VALIDATE_ALL, VALIDATE_SECONDS)):
        record.add(OURS, largest.config("all"), metric, found[largest][metric], "s")
        record.aim(f"{metric}, {largest.text}, s", median(found[largest][metric]), limit)
    record.aim("ranks with another number of actions than the formula's", sum(map(count_deviations, found)), 0)


def measure(jobs: Iterable[Job], repetitions: int) -> dict[Job, dict[str, list[float]]]:
    """Returns the samples by job and metric. The jobs alternate."""
    found: dict[Job, dict[str, list[float]]] = {job: defaultdict(list) for job in jobs}
    for _ in range(repetitions):
        for job, samples in found.items():
            for metric, value in _sample(job).items():
                samples[metric].append(value)
    return found


def _sample(job: Job) -> dict[str, float]:
    """Measures one job. Uses a middle rank, because it has two neighbours if any rank has."""
    spec, rank = spec_of(job), job.pipeline_ranks // 2
    own = len(build_rank_program(spec, rank))
    build = _seconds(lambda: build_rank_program(spec, rank), max(1, ENOUGH // own))
    program = build_program(spec)
    actions = sum(map(len, program))
    proof = _seconds(lambda: validate(spec, program), max(1, ENOUGH // actions))
    return {
        ACTIONS: own,
        BYTES: bytes_per_action(spec, rank),
        BUILD: build / own * 1e6,
        VALIDATE: proof / actions * 1e6,
        BUILD_ONE: build,
        VALIDATE_ALL: proof,
    }


def spec_of(job: Job) -> ProgramSpec:
    placement = place_chunks("modular", job.pipeline_ranks * job.chunks_per_rank, job.pipeline_ranks)
    return ProgramSpec(placement, "layered", job.micro_batches, job.micro_batches, 3, RESIDENT_CHUNKS)


def bytes_per_action(spec: ProgramSpec, rank: int) -> float:
    """Bytes per action that the program of ``rank`` takes in Python."""
    tracemalloc.start()
    try:
        program = build_rank_program(spec, rank)
        resident, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return resident / len(program)


def count_deviations(job: Job) -> int:
    """Number of ranks whose program differs in length from :func:`predicted_actions`."""
    spec = spec_of(job)
    ranks = range(job.pipeline_ranks)
    return sum(len(build_rank_program(spec, rank)) != predicted_actions(job, rank) for rank in ranks)


def predicted_actions(job: Job, rank: int) -> int:
    """The formula's number of actions on a rank.

    Each chunk and micro-batch has a forward and a backward, and a send or receive in each direction at every boundary
    with a neighbour. Each chunk has two gathers, two releases and a reduction. Chunks that stay resident at the
    turn-around save one gather and one release. Each gather and each reduction has a wait. The optimizer's step comes
    last.
    """
    chunks = job.chunks_per_rank
    boundaries = 0
    if job.pipeline_ranks > 1:
        boundaries = 2 * chunks - (rank == 0) - (rank == job.pipeline_ranks - 1)
    gathers = 2 * chunks - min(RESIDENT_CHUNKS, chunks)
    return 2 * job.micro_batches * (chunks + boundaries) + 3 * gathers + 2 * chunks + 1


def _enter_job(record: Record, axis: str, job: Job, found: dict[str, list[float]]) -> None:
    for metric, unit in METRICS.items():
        record.add(OURS, job.config(axis), metric, found[metric], unit)


def _seconds(function: Callable[[], object], calls: int) -> float:
    """CPU seconds of one call; ``calls`` are timed together."""
    start = time.thread_time()
    for _ in range(calls):
        function()
    return (time.thread_time() - start) / calls
