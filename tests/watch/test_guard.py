"""The guard of a rank, a process that ends it if no thread of it gets the interpreter: when it does, and when not."""

import ctypes
import math
import os
import signal
import time

import pytest
import torch.distributed as dist

from ds_lgamp.watch import guard
from ds_lgamp.watch.guard import Guard
from ds_lgamp.watch.this_rank import this_rank
from ds_lgamp.watch.whereabouts import FIRST_BATCH
from testing.processes import is_alive, wait
from testing.ranks import started_ranks
from tests.watch.test_watch import LIMIT, running


def test_the_guard_hears_every_new_limit_and_of_the_same_one_now_and_then(monkeypatch):
    heard = []
    monkeypatch.setattr(guard.os, "write", lambda file, line: heard.append(float(line)))
    own = Guard("rank 0")
    own.arm(LIMIT, 0.0)
    assert not heard
    own.begin()
    for now, limit in ((0.0, LIMIT), (1.0, LIMIT), (2.0, math.inf), (3.0, LIMIT), (4.0, LIMIT), (8.0, LIMIT)):
        own.arm(limit, now)
    process = own._process
    own.disarm()
    own.disarm()
    assert heard == [LIMIT + 10, math.inf, LIMIT + 10, LIMIT + 10, math.inf] and process.returncode == 0


def waits_in_a_batch_until_told(folder):
    """Rank 1 reads its data for a while, and rank 0 waits for it."""
    os.dup2(os.open(folder / f"{dist.get_rank()} says", os.O_CREAT | os.O_WRONLY), 2)
    guard._LATER = 1.0
    this_rank.start()
    dist.barrier()
    executor = running("F1.0", "activation")
    executor.begun.add(True)
    with this_rank.whereabouts.in_batch(executor, "step 1", True, PAUSED_LIMIT):
        (folder / f"{dist.get_rank()} waits").write_text(str(os.getpid()))
        if dist.get_rank() == 0:
            dist.barrier()
        while dist.get_rank() == 1 and not (folder / "go on").exists():
            time.sleep(0.05)
    if dist.get_rank() == 1:
        dist.barrier()


PAUSED_LIMIT = 10.0


@pytest.mark.slow
def test_ranks_that_were_suspended_for_longer_than_the_limit_go_on(tmp_path):
    with started_ranks(2, waits_in_a_batch_until_told, tmp_path) as (ranks, results):
        while len(list(tmp_path.glob("* waits"))) < 2:
            time.sleep(0.05)
        for rank in ranks:
            os.kill(rank.pid, signal.SIGSTOP)
        time.sleep(PAUSED_LIMIT + 3)
        for rank in ranks:
            os.kill(rank.pid, signal.SIGCONT)
        # Long enough for a round of questions.
        time.sleep(4)
        (tmp_path / "go on").touch()
        assert all(results.get(timeout=60)[1] for _ in ranks)
    assert not any("this rank, " in file.read_text() for file in tmp_path.glob("* says"))


def keeps_the_interpreter():
    """Does so from the first batch on, before any thread could look at it. Returns if nothing ends it."""
    guard._LATER = 1.0
    this_rank.start()
    dist.barrier()
    with this_rank.whereabouts.in_batch(running("F1.0", ""), "step 1", True, 1 / FIRST_BATCH):
        ctypes.PyDLL(None).sleep(20)


def test_a_rank_that_keeps_the_interpreter_from_its_first_batch_on_ends():
    with started_ranks(2, keeps_the_interpreter) as (ranks, _):
        for rank in ranks:
            rank.join(60)
            assert rank.exitcode == -signal.SIGKILL


def forks(folder):
    """Leaves a forked process behind that knows nothing of the guard, and ends."""
    this_rank.start()
    dist.barrier()
    (folder / f"{dist.get_rank()} is guarded").write_text(str(this_rank.lifeline.stalls._guard._process.pid))
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    (folder / f"{dist.get_rank()} forked").write_text(str(child))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_guard_ends_with_its_rank_though_a_forked_process_goes_on(tmp_path):
    with started_ranks(2, forks, tmp_path) as (ranks, _):
        for rank in ranks:
            rank.join(60)
    guards = [int(file.read_text()) for file in tmp_path.glob("* is guarded")]
    wait(lambda: not any(map(is_alive, guards)), 20)
    for file in tmp_path.glob("* forked"):
        os.kill(int(file.read_text()), signal.SIGKILL)
    assert len(guards) == 2 and not any(map(is_alive, guards))
