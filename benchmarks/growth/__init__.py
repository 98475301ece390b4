"""How overhead, memory and programs grow: ``python -m benchmarks run growth``.

Chunks per rank, micro-batches, pipeline ranks and data-parallel ranks grow one at a time from a base. A step of N
chunks per rank and M micro-batches is N times M forwards and backwards with their messages, and collectives as many as
N tells. So what a step costs beside compute, and what its program takes, should be proportional to its actions, and its
memory a straight line in N and in M; more ranks should change neither on a rank.
"""

from collections.abc import Sequence

from benchmarks.growth import memory, programs, steps
from benchmarks.growth.job import Axis, Job
from benchmarks.record import REPETITIONS, Record, begin

NAME = "growth"


def run(
    step_axes: Sequence[Axis] = steps.AXES,
    memory_axes: Sequence[Axis] = memory.AXES,
    program_axes: Sequence[Axis] = programs.AXES,
    largest: Job = programs.LARGEST,
    repetitions: int = REPETITIONS,
) -> Record:
    """Measures along all axes, and the programs of the ``largest`` job."""
    record = begin(NAME)
    steps.enter(record, step_axes, repetitions)
    memory.enter(record, memory_axes)
    programs.enter(record, program_axes, repetitions, largest)
    return record
