"""What ranks of tests and benchmarks are, beside the results that they return."""

import os
from pathlib import Path

from testing.ranks import run_on_ranks

NICE = 5


def take_priority(rank: int) -> None:
    os.setpriority(os.PRIO_PROCESS, 0, NICE)


def priorities_of_threads() -> list[int]:
    return [os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in Path("/proc/self/task").iterdir()]


def test_threads_of_gloo_have_the_priority_that_a_rank_takes_first():
    for found in run_on_ranks(2, priorities_of_threads, before_init=take_priority):
        # Of the rank itself and of gloo, whose device and process group have threads once the group exists.
        assert len(found) > 2 and set(found) == {NICE}
