"""Predicts peak bytes on a rank along an axis. The memory benchmark compares the same formula with measurements."""

from collections.abc import Sequence

from benchmarks.contenders import Layout
from benchmarks.growth.job import Axis, Job
from benchmarks.memory import predicted
from benchmarks.model import ModelSize
from benchmarks.record import OURS, Record

BASE = Job(pipeline_ranks=4, data_ranks=2, chunks_per_rank=4, micro_batches=32)
AXES = (
    Axis("chunks_per_rank", BASE, (1, 2, 4, 8, 16)),
    Axis("micro_batches", BASE, (8, 16, 32, 64, 128, 256, 512)),
    Axis("pipeline_ranks", BASE, (1, 2, 4, 8, 16, 32, 64)),
    Axis("data_ranks", BASE, (1, 2, 4, 8, 16, 32, 64)),
)
PEAK = "peak memory"
LIMIT_SLOPE, LIMIT_RANKS = 1.01, 1.0


def enter(record: Record, axes: Sequence[Axis]) -> None:
    """Enters rows and targets of all axes."""
    for axis in axes:
        peaks = [peak(job) for job in axis.jobs]
        for job, found in zip(axis.jobs, peaks):
            record.add(OURS, job.config(axis.name), PEAK, [found], "bytes")
        if axis.grows_ranks:
            axis.aim(record, PEAK, peaks, LIMIT_RANKS)
        else:
            before, middle, last = axis.values[-3:]
            slopes = (peaks[-1] - peaks[-2]) / (last - middle), (peaks[-2] - peaks[-3]) / (middle - before)
            text = f"{PEAK} per further {axis.name}, {middle} to {last} / {before} to {middle}"
            record.aim(text, slopes[0] / slopes[1], LIMIT_SLOPE)


def peak(job: Job) -> int:
    """Bytes on the pipeline rank with the highest peak. All ranks between the first and the last are alike."""
    size = ModelSize(blocks=job.pipeline_ranks * job.chunks_per_rank)
    layout = Layout(job.pipeline_ranks, job.data_ranks, size)
    ranks = {0, job.pipeline_ranks // 2, job.pipeline_ranks - 1}
    return max(
        predicted(layout, rank * job.data_ranks, job.micro_batches, zero_stage=3, resident_chunks=2).peak
        for rank in ranks
    )
