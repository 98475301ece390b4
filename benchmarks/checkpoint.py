"""How fast checkpoints are written and read, and what a save costs training: ``python -m benchmarks run checkpoint``.

Ours and plain torch.distributed.checkpoint (DCP) write and read the same numbers in as many files, in turns. DCP has
each rank's range as an ordinary tensor under a name of its own; ours has it as boxes of tensors under global names,
with checksums, and makes the checkpoint appear at once. Both wait until files are on the disk, and read what the
system still holds in memory. Rates are those of the rank that takes longest.

The step during a save is of virtual compute (every chunk sleeps) with real collectives, at ZeRO stage 3: ranks train
while their threads write. What trains goes first, by a higher real-time priority, as if the thread that writes had a
core of its own: what is left is what it takes of the interpreter's lock and of the memory.
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
from ds_lgamp.checkpoint.saver import THREADS, Saver
from ds_lgamp.checkpoint.shard import FlatShard
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
"""Without a save, between two saves."""


class State(NamedTuple):
    """What is saved: units whose parameters lie one after another in flat storage, of which each rank has a part."""

    units: int = 6
    shapes: tuple[tuple[int, ...], ...] = ((4096, 1024), (4096,), (1024, 4096), (1024,))
    """Of a unit's parameters, which are fp32; each has optimizer state."""

    @property
    def unit_numel(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def megabytes(self) -> float:
        """Of all ranks."""
        return 4e-6 * self.units * len(KINDS) * self.unit_numel


STATE = State()


class Files(NamedTuple):
    """Seconds one rank took to write and to read everything, by contender and repetition."""

    save: dict[str, list[float]]
    load: dict[str, list[float]]


class Steps(NamedTuple):
    """Seconds by repetition: steps without a save and during one, and the call that begins it."""

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
    """Times files at every number of ranks, then steps."""
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
    """The rows and targets of one number of ranks."""
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
    """The rows and the target of steps."""
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
    """This rank's ranges of all tensors, of random numbers."""
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
    """What a checkpoint has beside its tensors."""
    parameters = {
        f"{unit}.{index}": {"shape": list(shape), "group": 0}
        for unit in range(state.units)
        for index, shape in enumerate(state.shapes)
    }
    return encode({**example().state, "parameters": parameters})


def _time_files(directory: Path, state: State, repetitions: int) -> Files:
    """The contenders alternate; a first round is not counted."""
    files = Files({OURS: [], PLAIN: []}, {OURS: [], PLAIN: []})
    tensors, saver = shards(state), Saver(asynchronous=False, keep_last=None)
    rest = no_tensors(state)
    plain = {f"{dist.get_rank()}/{name}": shard.values.clone() for name, shard in tensors.items()}
    targets = {name: FlatShard(s.shape, s.start, torch.empty_like(s.values)) for name, s in tensors.items()}
    plain_targets = {name: torch.empty_like(values) for name, values in plain.items()}
    path = directory / "saved"

    def load() -> None:
        saver.load(folders.reader(path, folders.read_state(path)), targets)

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
    """Steps without a save and during one alternate; a first round is not counted."""
    prepare_rank()
    pipeline = Executed(training, "layered", zero_stage=3)
    tensors, saver = shards(state), Saver(asynchronous=True, keep_last=1)
    rest = no_tensors(state)
    steps = Steps([], [], [])
    for repetition in range(repetitions + 1):
        tag = f"step{repetition}"
        if repetition:
            # The thread that writes exists and keeps what it has.
            steps = steps._replace(precise=_go_first())
        steps.alone.append([_seconds(pipeline.step) for _ in range(STEPS)])
        steps.call.append(_seconds(lambda tag=tag: saver.save(directory, tag, tensors, rest, publish_latest=True)))
        during = []
        while not all(everyone(folders.read_latest(directory) == tag)):
            during.append(_seconds(pipeline.step))
        saver.wait()
        # The save ended some time in the last one.
        steps.saving.append(during[:-1] or during)
    return steps._replace(alone=steps.alone[1:], saving=steps.saving[1:], call=steps.call[1:])


def _go_first() -> bool:
    """Puts all threads of this rank but those that write ahead of others; whether this user may."""
    writing = {thread.native_id for thread in threading.enumerate() if thread.name.startswith(THREADS)}
    try:
        for task in map(int, os.listdir("/proc/self/task")):
            if task not in writing:
                os.sched_setscheduler(task, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        return False
    return True


def _seconds(call: Callable[[], object]) -> float:
    """Begun on all ranks together."""
    dist.barrier()
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
