"""Training goes on while a checkpoint is written. The next save, wait_for_all and the end of the process wait for
it."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ds_lgamp.checkpoint import saver as saver_module
from ds_lgamp.checkpoint.folder import read_latest
from ds_lgamp.checkpoint.ranges import FlatShard, ShardGroup
from ds_lgamp.checkpoint.saver import Saver, wait_for_all
from ds_lgamp.checkpoint.storage import ChecksummedWriter
from ds_lgamp.integrations.user_script import failures_end_the_process
from ds_lgamp.watch.this_rank import this_rank
from ds_lgamp.watch.whereabouts import FIRST_BATCH
from testing import SCRIPTS
from testing.ranks import run_on_ranks, started_ranks
from tests.checkpoint.saving import number_of, numbered_state, numbered_tensors
from tests.slow import slow_except
from tests.watch.ends import HOST, Idle, assert_ended, begin, wait_for_ever

SCRIPT = SCRIPTS / "saves_and_ends.py"
SLOW = 0.5
"""Seconds that a rank takes to write."""


def write_slowly(patch, meanwhile=lambda: None):
    """Slows every write of this rank down to ``SLOW`` seconds and calls ``meanwhile`` in the middle."""
    write_data = ChecksummedWriter.write_data

    def slow(self, plan, planner):
        time.sleep(SLOW / 2)
        meanwhile()
        time.sleep(SLOW / 2)
        return write_data(self, plan, planner)

    patch.setattr(ChecksummedWriter, "write_data", slow)


def save(saver, directory, number):
    """Saves. Returns the tensors."""
    tensors = numbered_tensors(number)
    saver.save(directory, f"step{number}", tensors, numbered_state(number), publish_latest=True)
    return tensors


def save_in_turns(directory):
    """Saves to one directory with two savers in turn, as two engines would."""
    savers = [Saver(asynchronous=True, keep_last=1) for _ in range(2)]
    for number in range(6):
        # Uses each tag twice.
        tag = f"step{number // 2}"
        savers[number % 2].save(directory, tag, numbered_tensors(number), numbered_state(number), publish_latest=True)
    wait_for_all()
    return sorted(path.name for path in directory.iterdir()), number_of(directory / "step2")


def wait_in_the_thread(directory):
    """Waits for the saver inside its own thread. The thread's garbage collection may delete an engine, which waits for
    its saver."""
    saver = Saver(asynchronous=True, keep_last=None)
    with pytest.MonkeyPatch.context() as patch:
        write_slowly(patch, meanwhile=saver.wait)
        save(saver, directory, 1)
        wait_for_all()
    return number_of(directory / "step1")


def save_and_train_on(directory):
    saver = Saver(asynchronous=True, keep_last=None)
    saver.save(directory, "step0", numbered_tensors(0), numbered_state(0), publish_latest=True)
    saver.wait()
    gates = [threading.Event(), threading.Event()]
    waits = [gate.wait for gate in gates]
    with pytest.MonkeyPatch.context() as patch:
        write_slowly(patch, meanwhile=lambda: waits.pop(0)())
        for shard in save(saver, directory, 1).values():
            shard.values.fill_(-1)
        found = [read_latest(directory)]
        threading.Timer(SLOW, gates[0].set).start()
        save(saver, directory, 2)
        found += [read_latest(directory), number_of(directory / "step1")]
        gates[1].set()
        wait_for_all()
    return [*found, read_latest(directory), number_of(directory / "step2")]


def test_the_next_save_waits_and_the_file_has_the_state_of_the_call(tmp_path):
    """The write of a save goes on when the call has returned: each is let go afterwards."""
    for found in run_on_ranks(2, save_and_train_on, tmp_path):
        assert found == ["step0", "step1", 1, "step2", 2]


def save_and_leave(folder):
    """Changes the working directory while a checkpoint is written in a folder that is relative to it."""
    saver, directory = Saver(asynchronous=True, keep_last=None), Path("checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_slowly(patch)
        save(saver, directory, 1)
        patch.chdir(folder.parent)
        saver.wait()
    return number_of(folder / directory / "step1"), read_latest(folder / directory)


def test_a_save_stays_where_it_began_if_the_working_directory_changes(tmp_path):
    assert run_on_ranks(1, save_and_leave, tmp_path) == [(1, "step1")]


def save_in_halves(directory):
    """Saves two ranges of every tensor, and changes them before they are written."""
    saver, tensors = Saver(asynchronous=True, keep_last=None), numbered_tensors(1)
    groups = {}
    for name, shard in tensors.items():
        begin, end = shard.values.tensor_split(2)
        middle = shard.start + begin.numel()
        groups[name] = ShardGroup([FlatShard(shard.shape, shard.start, begin), FlatShard(shard.shape, middle, end)])
    with pytest.MonkeyPatch.context() as patch:
        write_slowly(patch)
        saver.save(directory, "step1", groups, numbered_state(1), publish_latest=True)
        for shard in tensors.values():
            shard.values.fill_(-1)
        saver.wait()
    return number_of(directory / "step1")


def test_a_rank_may_save_several_ranges_of_a_tensor(tmp_path):
    assert run_on_ranks(2, save_in_halves, tmp_path) == [1, 1]


class Copies(TorchDispatchMode):
    """Counts the elements that are copied."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("copy_", "clone", "_to_copy"):
            self.elements += args[0].numel()
        return function(*args, **(kwargs or {}))


def count_copies(directory):
    counts = []
    for number, asynchronous in enumerate((False, True)):
        saver = Saver(asynchronous, keep_last=None)
        with Copies() as copies:
            tensors = save(saver, directory, number)
        state = sum(shard.values.numel() for shard in tensors.values())
        # Rounds, because the collectives copy a few elements.
        counts.append((round(copies.elements / state), read_latest(directory)))
        saver.wait()
    return counts


def test_a_save_that_is_not_asynchronous_copies_nothing_and_is_over_when_it_returns(tmp_path):
    assert run_on_ranks(1, count_copies, tmp_path) == [[(0, "step0"), (1, "step0")]]


def save_and_end(directory, end):
    """Ends the process while its thread writes, in the way that ``end`` names."""
    patch = pytest.MonkeyPatch()
    write_slowly(patch)
    save(Saver(asynchronous=True, keep_last=None), directory, 1)
    if end == "raise" or (end == "raise on one" and dist.get_rank() == 1):
        raise ArithmeticError("after the save")
    # Leaves the process group as it is.
    sys.exit()


@pytest.mark.parametrize(("end", "statuses"), [("return", [0, 0]), ("raise", [1, 1]), ("raise on one", [0, 1])])
def test_a_process_ends_when_its_checkpoint_is_on_the_disk(tmp_path, end, statuses):
    with started_ranks(2, save_and_end, tmp_path, end) as (ranks, _):
        for process in ranks:
            process.join(timeout=60)
        assert [process.exitcode for process in ranks] == statuses
    assert read_latest(tmp_path) == "step1" and number_of(tmp_path / "step1") == 1


def fail_during_a_save(directory, stuck):
    """Rank 1 fails while threads rest that nobody waits for. Rank 0 waits for rank 1 in C code, as in a batch; where
    it is ``stuck``, its thread writes nothing."""
    begin(directory)
    patch = pytest.MonkeyPatch()
    patch.setattr(saver_module, "REST", 1e9)
    if stuck and dist.get_rank() == 0:
        patch.setattr(ChecksummedWriter, "write_data", lambda *_: wait_for_ever())
    saver = Saver(asynchronous=True, keep_last=None)
    save(saver, directory, 1)
    executor = Idle()
    with failures_end_the_process(), this_rank.whereabouts.in_batch(executor, "step 1", True, LIMIT / FIRST_BATCH):
        if dist.get_rank() == 1:
            raise ArithmeticError("in a batch")
        with this_rank.whereabouts.waiting_for("a message"):
            wait_for_ever()


LIMIT = 8.0
FAILED = f"ds_lgamp: rank 1 on {HOST} failed (ArithmeticError: in a batch)"


def test_a_rank_that_fails_says_so_first_and_the_others_complete_its_checkpoint_in_haste(tmp_path):
    with started_ranks(2, fail_during_a_save, tmp_path, False) as (ranks, _):
        assert_ended(ranks, tmp_path, [FAILED.removeprefix("ds_lgamp: ")], [0], seconds=30)
        ranks[1].join(30)
        assert ranks[1].exitcode == 1
    assert "ArithmeticError: in a batch" in (tmp_path / "1").read_text()
    assert read_latest(tmp_path) == "step1" and number_of(tmp_path / "step1") == 1


def test_a_rank_that_fails_is_named_though_its_checkpoint_does_not_end(tmp_path):
    with started_ranks(2, fail_during_a_save, tmp_path, True) as (ranks, _):
        for process in ranks:
            process.join(LIMIT + 30)
            assert process.exitcode == 1
    first, second = (tmp_path.joinpath(str(rank)).read_text() for rank in range(2))
    assert f"{FAILED} and completes a checkpoint; this rank, 0 on {HOST}, ends" in first
    assert second.startswith("Traceback") and "ArithmeticError: in a batch" in second
    assert read_latest(tmp_path) is None


def save_until_one_dies(directory):
    saver = Saver(asynchronous=True, keep_last=None)
    save(saver, directory, 1)
    saver.wait()
    patch = pytest.MonkeyPatch()
    rank = dist.get_rank()
    # Rank 0 waits for the others when one dies. Rank 1 writes.
    if rank > 0:
        write_slowly(patch, (lambda: None) if rank == 1 else (lambda: os.kill(os.getpid(), signal.SIGKILL)))
    save(saver, directory, 2)
    saver.wait()


def test_a_rank_that_dies_during_a_save_does_not_leave_the_others_waiting(tmp_path):
    with started_ranks(3, save_until_one_dies, tmp_path) as (ranks, results):
        failed = dict((rank, said) for rank, succeeded, said in (results.get(timeout=30) for _ in range(2)))
        for process in ranks:
            process.join(timeout=10)
            assert process.exitcode is not None
    assert sorted(failed) == [0, 1]
    for said in failed.values():
        assert f"CheckpointError: {tmp_path / 'step2'} could not be saved" in said
    assert read_latest(tmp_path) == "step1" and not (tmp_path / "step2").exists()


ENDS = slow_except([], [("destroy", True), ("raise", True), ("return", False)], several=True, slow=[("raise", True)])


@pytest.mark.parametrize(("end", "asynchronous"), ENDS)
def test_an_unedited_script_leaves_whole_checkpoints_and_live_states_only_if_it_fails(tmp_path, end, asynchronous):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_allow_untested_optimizer": True,
        "ds_lgamp": {"asynchronous_save": asynchronous, "live_checkpoint": str(tmp_path / "live")},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = [SCRIPT, "--checkpoints", tmp_path, "--end", end, "--deepspeed_config", tmp_path / "config.json"]
    ended = subprocess.run(
        [*torchrun, "-m", "ds_lgamp", "run", *script], capture_output=True, text=True, timeout=120, env=os.environ
    )
    output = ended.stdout + ended.stderr
    assert (ended.returncode == 0) == (end != "raise"), output
    assert re.findall(r"SAVED (\S+) LOADED True", ended.stdout) == [str(not asynchronous)] * 2, output
    assert read_latest(tmp_path) == "global_step2"
    for tag in ("global_step1", "global_step2"):
        assert (tmp_path / tag / "state.json").exists() and "could not be saved" not in output
    assert bool(list((tmp_path / "live").iterdir())) == (end == "raise")


def save_to_a_stuck_disk(directory, asynchronous):
    """Returns what each rank says while the disk of rank 1 takes nothing for a while."""
    sync, saver, said = os.fsync, Saver(asynchronous, keep_last=None), []

    def stuck(descriptor):
        if dist.get_rank() == 1:
            time.sleep(SLOW)
        sync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver_module.logger, "warning", said.append)
        patch.setattr(saver_module, "_PATIENCE", SLOW / 4)
        patch.setattr(os, "fsync", stuck)
        save(saver, directory, 1)
        saver.wait()
    return said


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_waits_for_its_disk_says_so(tmp_path, asynchronous):
    first, second = run_on_ranks(2, save_to_a_stuck_disk, tmp_path, asynchronous)
    assert first == [] and 1 <= len(second) <= 3
    for said in second:
        assert re.match(rf"rank 1 on {HOST} has waited \d s for its disk to take its part of {tmp_path}/step1/", said)
    assert number_of(tmp_path / "step1") == 1


def test_two_savers_in_one_directory_take_turns(tmp_path):
    assert run_on_ranks(2, save_in_turns, tmp_path) == [(["latest", "step2"], 5)] * 2


def test_the_thread_does_not_wait_for_itself(tmp_path):
    assert run_on_ranks(2, wait_in_the_thread, tmp_path) == [1, 1]
