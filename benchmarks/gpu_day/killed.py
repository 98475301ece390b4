"""One rank of several on a GPU is killed during training: whether, how and after how many seconds all others end.

The ranks have no launcher that would end them.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.accelerator import get_accelerator

from benchmarks.gpu_day.equality import caught
from benchmarks.gpu_day.layouts import LAYOUTS, Layout, too_old
from testing.launching import free_port

UNTIL_STEADY, UNTIL_ENDED = 90, 60
"""Seconds that ranks have to start, and to end."""
TAIL = 800
"""Characters of each rank's output that are kept."""


class Rank(NamedTuple):
    """A process and the file of its output."""

    process: subprocess.Popen
    output: Path


def run(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    on_cpu = get_accelerator().device_name() == "cpu"
    for layout, victim in zip(LAYOUTS, (0, 1, 3)):
        old = too_old(layout.ranks)
        if on_cpu and old is None and layout != LAYOUTS[-1]:
            # The last one has all kinds of ranks, and on a CPU the tests kill ranks of others.
            continue
        found = caught(partial(measured, layout, victim)) if old is None else {"not run": old}
        yield f"{layout}, rank {victim} killed", found


def measured(layout: Layout, victim: int) -> dict[str, Any]:
    """Returns by rank the seconds from the kill to its end, its exit status and the end of its output."""
    with tempfile.TemporaryDirectory() as folder, started(layout, Path(folder)) as ranks:
        wait_until_steady(ranks, Path(folder))
        ranks[victim].process.kill()
        seconds = seconds_to_end([rank.process for rank in ranks])
        found: dict[str, Any] = {
            "seconds": seconds,
            "exit status": [rank.process.poll() for rank in ranks],
            "output": [rank.output.read_text(errors="replace")[-TAIL:] for rank in ranks],
        }
    late = [rank for rank, ended in enumerate(seconds) if ended is None]
    return {**found, **({"failure": f"ranks {late} run on for {UNTIL_ENDED} s"} if late else {})}


@contextmanager
def started(layout: Layout, folder: Path) -> Iterator[list[Rank]]:
    """Starts the ranks. All are gone when the block ends."""
    port = free_port()
    ranks: list[Rank] = []
    try:
        for rank in range(layout.ranks):
            output = folder / f"{rank}.log"
            environment = {"RANK": rank, "WORLD_SIZE": layout.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            with output.open("w") as file:
                process = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.gpu_day.endless", str(folder), str(layout.pipeline_ranks)],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={
                        **os.environ,
                        "PYTHONWARNINGS": "ignore",
                        **{name: str(value) for name, value in environment.items()},
                    },
                )
            ranks.append(Rank(process, output))
        yield ranks
    finally:
        for process, _ in ranks:
            process.kill()
            process.wait()


def wait_until_steady(ranks: list[Rank], folder: Path) -> None:
    """Waits until every rank has trained some steps.

    Raises RuntimeError with a rank's output if one ends before, and TimeoutError.
    """
    deadline = time.monotonic() + UNTIL_STEADY
    while not all((folder / str(rank)).exists() for rank in range(len(ranks))):
        for rank, (process, output) in enumerate(ranks):
            if process.poll() is not None:
                raise RuntimeError(f"rank {rank} ended before the kill: {output.read_text(errors='replace')[-TAIL:]}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the ranks do not train after {UNTIL_STEADY} s")
        time.sleep(0.1)


def seconds_to_end(processes: list[subprocess.Popen]) -> list[float | None]:
    """Waits until all have ended. Returns the seconds that each took; None for one that runs on."""
    killed = time.monotonic()
    seconds: list[float | None] = [None] * len(processes)
    while None in seconds and time.monotonic() - killed < UNTIL_ENDED:
        for rank, process in enumerate(processes):
            if seconds[rank] is None and process.poll() is not None:
                seconds[rank] = round(time.monotonic() - killed, 1)
        time.sleep(0.1)
    return seconds
