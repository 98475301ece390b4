"""Times updates of chunks whose state lies on a disk beside the time that the disk needs for their bytes:
``python -m benchmarks run disk_update``.

The engine's own updates read each chunk ahead, step AdamW in a buffer and write it behind. The bound reads and writes
as many bytes of the same file front to back, past the page cache, both at once: what a program that does nothing else
gets of the disk. All take turns, in the folder of temporary files.
"""

import errno
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import Parameter

from benchmarks.host_update import timed
from benchmarks.record import OURS, REPETITIONS, Record, begin
from ds_lgamp.cost.offload import OnDisk
from ds_lgamp.optimizers.host_updates import DiskUpdates
from ds_lgamp.partition.bus import Bus
from ds_lgamp.partition.disk import Disk, Move, aligned
from ds_lgamp.partition.flat_storage import UnitParameter
from ds_lgamp.partition.host import Host, HostThread
from ds_lgamp.partition.policy import ZeroPolicy
from ds_lgamp.partition.zero_partition import build_partition
from ds_lgamp.schedule.spec import PIECE, PIECES
from testing.ranks import run_on_ranks

NAME = "disk_update"
CHUNKS, PARAMETERS = 6, 1 << 23
"""Chunks of a step, and parameters of each."""
THREADS = 1
"""Of an update: the cores of the machine that has recorded it, less one, as in the engine."""
LIMIT = 1.25
"""How many times as long as its bytes take front to back an update with copies in fp32 may take."""
CPU = torch.device("cpu")
PLAIN = "front to back"


class Way(NamedTuple):
    """How chunks are updated."""

    name: str
    copies: bool = True
    """Whether AdamW updates copies of the weights in fp32, which are rounded to bf16."""


WAYS = (Way(f"{OURS}, copies in fp32"), Way(f"{OURS}, state in bf16, by chance", copies=False))


class Step(NamedTuple):
    """Updates of all chunks."""

    seconds: float
    read: int
    """Bytes, from the disk."""
    written: int


def run(parameters: int = PARAMETERS, repetitions: int = REPETITIONS) -> Record:
    """Times updates, and as many bytes front to back: those that are read, those that are written, and both."""
    record = begin(NAME)
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            ((steps, alone, both),) = run_on_ranks(1, _measure, way, parameters, repetitions, folder, seconds=1800)
        config = {"state": way.name.removeprefix(f"{OURS}, ")}
        for direction, seconds in alone.items():
            size = getattr(steps[0], direction)
            record.add(PLAIN, config, f"{direction} alone", [size / each / 1e9 for each in seconds], "GB/s")
        moved = steps[0].read + steps[0].written
        record.add(PLAIN, config, "read and written", [moved / each / 1e9 for each in both], "GB/s")
        record.add(OURS, config, "read and written", [moved / step.seconds / 1e9 for step in steps], "GB/s")
        shares = [least / step.seconds for least, step in zip(both, steps)]
        record.add(OURS, config, "share of the disk's rate", shares, "ratio")
        if way.copies:
            seconds_of_steps = [step.seconds for step in steps]
            record.compare("update / as many bytes front to back, copies in fp32", seconds_of_steps, both, LIMIT)
    return record


def _measure(
    way: Way, parameters: int, repetitions: int, folder: str
) -> tuple[list[Step], dict[str, list[float]], list[float]]:
    """Returns the updates, and the seconds of as many bytes by direction, and of both directions at once. They leave
    numbers with which an update takes as long as with others."""
    torch.set_num_threads(THREADS)
    step = updates_in(folder, way, parameters)
    # The first update makes the state, and the second one is the first to read all of it.
    step()
    moved = step()
    plain = Plain(_file_of(folder))
    steps: list[Step] = []
    alone: dict[str, list[float]] = {"read": [], "written": []}
    both: list[float] = []
    for _ in range(repetitions):
        steps.append(step())
        both.append(timed(partial(plain.move, moved.read, moved.written)))
        alone["read"].append(timed(partial(plain.move, moved.read, 0)))
        alone["written"].append(timed(partial(plain.move, 0, moved.written)))
    return steps, alone, both


def updates_in(folder: str, way: Way, parameters: int) -> Callable[[], Step]:
    """Returns the engine's updates of all chunks of a step, whose state lies in ``folder``."""
    weights = [Parameter(torch.randn(parameters, dtype=torch.bfloat16)) for _ in range(CHUNKS)]
    disk = Disk(folder)
    host = Host(Bus(CPU, disk=disk), HostThread(CPU), parameters=True, on_disk=OnDisk(optimizer=True, parameters=True))
    policy = ZeroPolicy(dist.group.WORLD, 3, host=host, copies_weights=way.copies)
    chunks = {chunk: [UnitParameter(f"weight {chunk}", weight, 0)] for chunk, weight in enumerate(weights)}
    partition = build_partition(chunks, [], policy, CPU)
    updates = DiskUpdates(torch.optim.AdamW(weights, lr=1e-3, fused=True), partition, "reduction", not way.copies)
    options = updates.options()
    for unit in partition.units:
        assert unit.stored_gradient is not None, "the host updates the chunk"
        unit.stored_gradient.fill_(1e-3)

    def step() -> Step:
        before, begun = (disk.bytes_read, disk.bytes_written), perf_counter()
        for unit in partition.units:
            unit.reduction.shard_gradient = unit.stored_gradient
            unit.master.take_gradient(unit.stored_gradient)
            updates.announce(unit)
        for over in [updates.update_alone(unit, 1.0, options) for unit in partition.units]:
            over()
        return Step(perf_counter() - begun, disk.bytes_read - before[0], disk.bytes_written - before[1])

    return step


class Plain:
    """Reads a file front to back and writes small numbers to its end: pieces of the engine, four in each direction."""

    def __init__(self, path: Path) -> None:
        self._file, self._size = _opened(path), path.stat().st_size
        self._pool = ThreadPoolExecutor(2 * PIECES)
        # One piece of memory, as the engine's buffers are.
        self._memory = _values(2 * PIECES * PIECE).split(PIECE)

    def move(self, read: int, written: int) -> None:
        """Reads the first bytes, so many, and writes the last ones, so many."""
        ends = [
            self._start(os.preadv, 0, read, self._memory[:PIECES]),
            self._start(os.pwritev, self._size - written, written, self._memory[PIECES:]),
        ]
        for end in ends:
            end()

    def _start(self, move: Move, begin: int, size: int, memory: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Starts one thread for each piece of ``memory``; they take turns in the pieces of the file."""

        def work(number: int) -> None:
            for start in range(number * PIECE, size, PIECES * PIECE):
                piece = memory[number][: size - start].numpy()
                moved = move(self._file, [piece], begin + start)
                assert moved == len(piece), "the disk has moved less than it was asked to"

        jobs = [self._pool.submit(work, number) for number in range(len(memory))]

        def end() -> None:
            for job in jobs:
                job.result()

        return end


def _values(size: int) -> torch.Tensor:
    """Returns ``size`` bytes of numbers in fp32. Of zeros, a virtual disk might keep less."""
    memory = aligned(size)
    memory.view(torch.float32).fill_(1e-3)
    return memory


def _file_of(folder: str) -> Path:
    """Returns a path of the file that the engine has in ``folder`` without a name."""
    descriptors = Path("/proc/self/fd")
    return next(each for each in descriptors.iterdir() if os.readlink(each).startswith(f"{folder}/ds_lgamp-"))


def _opened(path: Path) -> int:
    """Opens a file past the page cache, where the file system can do that, as the engine does."""
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_RDWR)
