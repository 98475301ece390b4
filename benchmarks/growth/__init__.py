"""Measures how overhead, memory and programs grow: ``python -m benchmarks run growth``.

Chunks per rank, micro-batches, pipeline ranks and data-parallel ranks grow one at a time from a base. A step of N
chunks per rank and M micro-batches has N times M forwards and backwards with their messages. Its number of collectives
depends only on N. The overhead of a step and the cost of its program should therefore be proportional to its actions.
Memory should be linear in N and in M. More ranks should change none of this on a rank.
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
