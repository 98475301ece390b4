"""Measures how fast checkpoints are written and read, and how much a save slows training: ``python -m benchmarks run
checkpoint``.

ds_lgamp and plain torch.distributed.checkpoint (DCP) take turns to write and read the same numbers in the same number
of files. DCP stores each rank's range as an ordinary tensor with its own name. ds_lgamp stores it as boxes of globally
named tensors, with checksums, and publishes the checkpoint atomically. Both wait until the files are on the disk, and
both read files that are still in the page cache. A rate is that of the slowest rank.

Steps during a save use virtual compute (every chunk sleeps) and real collectives at ZeRO stage 3. The ranks train while
their threads write. Training threads have a higher real-time priority, as if the writing thread had its own core. The
remaining slowdown comes from the interpreter's lock and the memory bandwidth.
"""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.record import OURS, REPETITIONS, Config, Record, begin
from benchmarks.virtual.chunk import Setting
from benchmarks.virtual.pipelines import Executed
from benchmarks.virtual.steps import scheduling
from ds_lgamp.checkpoint import folder as folders
from ds_lgamp.checkpoint.ranges import FlatShard
from ds_lgamp.checkpoint.saver import THREADS, Saver
from ds_lgamp.checkpoint.values import encode
from ds_lgamp.partition.agreement import everyone
from testing.checkpoints import example
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks

NAME = "checkpoint"
RANKS = (1, 2, 4)
PLAIN = "torch DCP"
RATE_LIMIT, STEP_LIMIT = 1.2, 1.05
KINDS = ("parameters", "optimizer/exp_avg", "optimizer/exp_avg_sq")
TRAINING = Setting(1, 4, 4, forward=0.002, backward=0.004, data_ranks=2, parameters=100_000)
STEPS = 8
"""Steps without a save between two saves."""


class State(NamedTuple):
    """The state to save: units with parameters in flat storage, of which each rank holds a range."""

    units: int = 6
    shapes: tuple[tuple[int, ...], ...] = ((4096, 1024), (4096,), (1024, 4096), (1024,))
    """Shapes of a unit's parameters, all fp32. Each parameter has optimizer state."""

    @property
    def unit_numel(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def megabytes(self) -> float:
        """Size on all ranks together."""
        return 4e-6 * self.units * len(KINDS) * self.unit_numel


STATE = State()


class Files(NamedTuple):
    """Seconds that one rank took to write and to read everything, by contender and repetition."""

    save: dict[str, list[float]]
    load: dict[str, list[float]]


class Steps(NamedTuple):
    """Seconds by repetition: steps without a save, steps during a save, and the call that starts it."""

    alone: list[list[float]]
    saving: list[list[float]]
    call: list[float]
    precise: bool = False
    """Whether this rank had real-time priority."""


def run(
    ranks: Sequence[int] = RANKS,
    state: State = STATE,
    training: Setting = TRAINING,
    repetitions: int = REPETITIONS,
) -> Record:
    """Times files for every number of ranks, then steps."""
    record = begin(NAME)
    for count in ranks:
        with tempfile.TemporaryDirectory() as directory:
            enter_files(record, state, run_on_ranks(count, _time_files, Path(directory), state, repetitions))
    with tempfile.TemporaryDirectory() as directory:
        arguments = Path(directory), state, training, repetitions
        found = run_on_ranks(training.data_ranks, _time_steps, *arguments)
    enter_steps(record, state, training, found)
    return record


def enter_files(record: Record, state: State, found: Sequence[Files]) -> None:
    """Enters the rows and targets for one number of ranks."""
    megabytes = state.megabytes
    config: Config = {"ranks": len(found), "MB": round(megabytes)}
    for what in Files._fields:
        seconds = {
            name: [max(times) for times in zip(*(getattr(files, what)[name] for files in found))]
            for name in (OURS, PLAIN)
        }
        for name, samples in seconds.items():
            record.add(name, config, what, [megabytes / sample for sample in samples], "MB/s")
        ratio = median(seconds[OURS]) / median(seconds[PLAIN])
        record.aim(f"time to {what} / {PLAIN}'s, {len(found)} ranks", ratio, RATE_LIMIT)


def enter_steps(record: Record, state: State, training: Setting, found: Sequence[Steps]) -> None:
    """Enters the rows and the target of steps."""
    config: Config = {"ranks": training.data_ranks, "MB": round(state.megabytes)}
    steps = found[0]
    precise = all(of.precise for of in found)
    record.machine["scheduling"] = scheduling(precise)
    record.add(OURS, config, "steps during a save", [len(saving) for saving in steps.saving], "steps")
    record.add(OURS, config, "step without a save", [median(alone) * 1000 for alone in steps.alone], "ms")
    record.add(OURS, config, "step during a save", [median(saving) * 1000 for saving in steps.saving], "ms")
    record.add(OURS, config, "save_checkpoint returns after", [call * 1000 for call in steps.call], "ms")
    alone, saving = (median(sum(several, [])) for several in (steps.alone, steps.saving))
    record.aim("median step during a save / without", saving / alone, STEP_LIMIT)


def shards(state: State) -> dict[str, FlatShard]:
    """Makes this rank's ranges of all tensors, filled with random numbers."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    numel = state.unit_numel
    start, end = numel * rank // ranks, numel * (rank + 1) // ranks
    found = {}
    for unit in range(state.units):
        for kind in KINDS:
            values, first = torch.randn(end - start), 0
            for index, shape in enumerate(state.shapes):
                size = torch.Size(shape).numel()
                low, high = max(start, first), min(end, first + size)
                if low < high:
                    found[f"{kind}/{unit}.{index}"] = FlatShard(shape, low - first, values[low - start : high - start])
                first += size
    return found


def no_tensors(state: State) -> dict[str, Any]:
    """Makes the part of a checkpoint's state that is no tensor."""
    parameters = {
        f"{unit}.{index}": {"shape": list(shape), "group": 0}
        for unit in range(state.units)
        for index, shape in enumerate(state.shapes)
    }
    return encode({**example().state, "parameters": parameters})


def _time_files(directory: Path, state: State, repetitions: int) -> Files:
    """Times writing and reading on one rank. The contenders alternate; the first round does not count."""
    files = Files({OURS: [], PLAIN: []}, {OURS: [], PLAIN: []})
    tensors, saver = shards(state), Saver(asynchronous=False, keep_last=None)
    rest = no_tensors(state)
    plain = {f"{dist.get_rank()}/{name}": shard.values.clone() for name, shard in tensors.items()}
    targets = {name: FlatShard(s.shape, s.start, torch.empty_like(s.values)) for name, s in tensors.items()}
    plain_targets = {name: torch.empty_like(values) for name, values in plain.items()}
    path = directory / "saved"

    def load() -> None:
        saver.load(folders.open_checkpoint(path)[1], targets)

    calls = {
        OURS: (lambda: saver.save(directory, "saved", tensors, rest, publish_latest=False), load),
        PLAIN: (lambda: dcp.save(plain, checkpoint_id=path), lambda: dcp.load(plain_targets, checkpoint_id=path)),
    }
    for _ in range(repetitions + 1):
        for name, (save, load_again) in calls.items():
            files.save[name].append(_seconds(save))
            files.load[name].append(_seconds(load_again))
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path)
            dist.barrier()
    assert all(torch.equal(target.values, tensors[name].values) for name, target in targets.items())
    assert all(torch.equal(target, plain[name]) for name, target in plain_targets.items())
    return Files(*({name: samples[1:] for name, samples in of.items()} for of in files))


def _time_steps(directory: Path, state: State, training: Setting, repetitions: int) -> Steps:
    """Times steps on one rank. Steps without and during a save alternate; the first round does not count."""
    prepare_rank()
    pipeline = Executed(training, "layered", zero_stage=3)
    tensors, saver = shards(state), Saver(asynchronous=True, keep_last=1)
    rest = no_tensors(state)
    steps = Steps([], [], [])
    for repetition in range(repetitions + 1):
        tag = f"step{repetition}"
        if repetition:
            # The writing thread exists by now and keeps its priority.
            steps = steps._replace(precise=_go_first())
        steps.alone.append([_seconds(pipeline.step) for _ in range(STEPS)])
        steps.call.append(_seconds(lambda tag=tag: saver.save(directory, tag, tensors, rest, publish_latest=True)))
        during = []
        while not all(everyone(folders.read_latest(directory) == tag)):
            during.append(_seconds(pipeline.step))
        saver.wait()
        # The save ended during the last step.
        steps.saving.append(during[:-1] or during)
    return steps._replace(alone=steps.alone[1:], saving=steps.saving[1:], call=steps.call[1:])


def _go_first() -> bool:
    """Gives all threads of this rank real-time priority, except those that write. Returns whether the user may do
    that."""
    writing = {thread.native_id for thread in threading.enumerate() if thread.name.startswith(THREADS)}
    try:
        for task in map(int, os.listdir("/proc/self/task")):
            if task not in writing:
                os.sched_setscheduler(task, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        return False
    return True


def _seconds(call: Callable[[], object]) -> float:
    """Seconds of ``call``, started on all ranks together."""
    dist.barrier()
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
