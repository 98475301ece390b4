"""Ranks that die while the others wait in C code that no broken connection ends, as kernels of NCCL do."""

import logging
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ds_lgamp.watch import guard, lifeline
from ds_lgamp.watch import this_rank as module
from ds_lgamp.watch.this_rank import this_rank
from testing.ranks import run_on_ranks, shared_number, started_ranks
from tests.slow import slow_except
from tests.watch.ends import HOST, SECONDS, Idle, assert_ended, begin, died, wait_for_ever


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def end_well(clock, phase):
    """Leaves, and ends the process once the test has reached ``phase``."""
    reach(clock, phase)
    dist.destroy_process_group()
    this_rank.leave()
    os._exit(0)


def reach(clock, phase):
    while clock.value < phase:
        time.sleep(0.02)


def know(ranks):
    """Waits until this rank holds connections to ``ranks`` and no others."""
    while {member.rank for member in list(this_rank.lifeline._neighbours.members.values())} != ranks:
        time.sleep(0.02)


def some_are_killed(folder, killed):
    if begin(folder) in killed:
        kill()
    wait_for_ever()


@pytest.mark.parametrize("killed", slow_except([(2,)], [(2,), (0,), (1, 2), (0, 3)]))
def test_a_killed_rank_ends_the_others_and_is_named(killed, tmp_path):
    with started_ranks(4, some_are_killed, tmp_path, killed) as (ranks, _):
        assert_ended(ranks, tmp_path, died(*killed), sorted({0, 1, 2, 3} - set(killed)))


def one_fails(folder):
    if begin(folder) == 1:
        this_rank.fail("ArithmeticError: the layer is in trouble")
        os._exit(1)
    wait_for_ever()


@pytest.mark.slow
def test_a_rank_that_fails_tells_the_others_why(tmp_path):
    with started_ranks(3, one_fails, tmp_path) as (ranks, _):
        verdict = f"rank 1 on {HOST} failed (ArithmeticError: the layer is in trouble)"
        assert_ended(ranks, tmp_path, [verdict], [0, 2])


def one_ends_with_an_error(folder):
    """As the interpreter ends a script that has no hook for its errors."""
    if begin(folder) == 1:
        sys.last_value = ArithmeticError("the layer is in trouble")
        this_rank.end()
        os._exit(1)
    wait_for_ever()


@pytest.mark.slow
def test_a_rank_whose_interpreter_ends_because_of_an_error_says_no_goodbye_but_why(tmp_path):
    with started_ranks(3, one_ends_with_an_error, tmp_path) as (ranks, _):
        verdict = f"rank 1 on {HOST} failed (ArithmeticError: the layer is in trouble)"
        assert_ended(ranks, tmp_path, [verdict], [0, 2])


def one_catches_its_error(folder):
    """Rank 1 announces an error. Returns whom rank 0 blames before rank 1 has caught it, and rank 2 afterwards."""
    rank, blamed = begin(folder), ""
    for fails in (True, False):
        if rank == 1:
            this_rank.announce("ArithmeticError: the layer is in trouble") if fails else this_rank.leave()
        else:
            while this_rank.a_rank_fails != fails:
                time.sleep(0.02)
            blamed = this_rank.news() if fails == (rank == 0) else blamed
        dist.barrier()
    return blamed


@pytest.mark.slow
def test_an_announced_error_is_to_blame_until_the_script_has_caught_it(tmp_path):
    first, _, last = run_on_ranks(3, one_catches_its_error, tmp_path)
    expected = f"ds_lgamp: rank 1 on {HOST} failed (ArithmeticError: the layer is in trouble); this rank, 0 on {HOST}"
    assert first.startswith(expected) and last == ""


def a_failure_follows(folder, clock):
    if begin(folder) == 1:
        kill()
    reach(clock, 1)
    os.write(2, this_rank.fail("RuntimeError: Connection closed by peer").encode())
    os._exit(1)


@pytest.mark.slow
def test_a_rank_that_fails_because_another_died_names_that_one(tmp_path):
    clock = shared_number()
    with started_ranks(3, a_failure_follows, tmp_path, clock) as (ranks, _):
        ranks[1].join()
        clock.value = 1
        assert_ended(ranks, tmp_path, died(1), [0, 2])


def some_leave(folder, clock):
    """Ranks 0 and 1 leave, one after the other, and then rank 3 dies."""
    rank = begin(folder)
    if rank < 2:
        end_well(clock, phase=rank + 1)
    reach(clock, 2)
    know({2: {3, 4}, 3: {2}, 4: {2}}[rank])
    (folder / f"{rank} is ready").touch()
    reach(clock, 3)
    if rank == 3:
        kill()
    wait_for_ever()


@pytest.mark.slow
def test_a_rank_that_ends_well_ends_no_other_and_a_later_death_does(tmp_path):
    clock = shared_number()
    with started_ranks(5, some_leave, tmp_path, clock) as (ranks, _):
        for rank in (0, 1):
            clock.value = rank + 1
            ranks[rank].join(SECONDS)
            assert ranks[rank].exitcode == 0
        deadline = time.monotonic() + SECONDS
        while len(list(tmp_path.glob("* is ready"))) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        clock.value = 3
        assert_ended(ranks, tmp_path, died(3), [2, 4])


def a_failure_follows_a_goodbye(folder, clock):
    """Rank 1 leaves. Rank 2 then fails, as a collective of gloo does where a connection ends."""
    if begin(folder) == 1:
        end_well(clock, phase=0)
    reach(clock, 1)
    if dist.get_rank() == 2:
        os.write(2, this_rank.fail("RuntimeError: Connection closed by peer").encode())
        os._exit(1)
    wait_for_ever()


def test_a_rank_that_left_is_named_where_another_fails_because_of_it(tmp_path):
    clock = shared_number()
    with started_ranks(3, a_failure_follows_a_goodbye, tmp_path, clock) as (ranks, _):
        ranks[1].join()
        clock.value = 1
        assert_ended(ranks[:1], tmp_path, [f"rank 2 on {HOST} failed (RuntimeError: Connection closed by peer)"], [0])
    assert "; rank 1 left at " in (tmp_path / "0").read_text()


def the_first_leaves_and_a_failure_follows(folder, clock):
    if begin(folder) == 0:
        end_well(clock, phase=0)
    reach(clock, 1)
    os.write(2, this_rank.fail("RuntimeError: Connection closed by peer").encode())
    os._exit(1)


def test_a_rank_that_fails_because_the_first_left_names_that_one(tmp_path):
    clock = shared_number()
    with started_ranks(2, the_first_leaves_and_a_failure_follows, tmp_path, clock) as (ranks, _):
        ranks[0].join()
        clock.value = 1
        ranks[1].join()
    assert (tmp_path / "1").read_text().startswith("ds_lgamp: rank 0 left at ")


class WaitsForEver:
    """A dataset whose loader never returns. A file tells the process of the loader."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self):
        return 1

    def __getitem__(self, index):
        part = self.folder / "part"
        part.write_text(str(os.getpid()))
        part.rename(self.folder / "loader")
        wait_for_ever()


def one_with_a_loader_is_killed(folder):
    if begin(folder) == 1:
        loader = iter(DataLoader(WaitsForEver(folder), num_workers=1, multiprocessing_context="fork"))
        while not (folder / "loader").exists():
            time.sleep(0.02)
        assert loader
        kill()
    wait_for_ever()


@pytest.mark.slow
def test_a_loader_of_data_that_outlives_its_rank_does_not_hide_its_death(tmp_path):
    with started_ranks(3, one_with_a_loader_is_killed, tmp_path) as (ranks, _):
        try:
            assert_ended(ranks, tmp_path, died(1), [0, 2])
        finally:
            os.kill(int((tmp_path / "loader").read_text()), signal.SIGKILL)


def one_is_killed_at_the_second_start(folder, restarted):
    rank = begin(folder)
    this_rank.leave()
    if restarted:
        # As in the new processes of torchrun: nothing is left but what the store keeps.
        this_rank._starts = 0
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"}
    if rank == 0:
        time.sleep(0.5)
    for _ in range(2):
        this_rank.start()
    dist.barrier()
    if rank == 1:
        kill()
    wait_for_ever()


@pytest.mark.slow
@pytest.mark.parametrize("restarted", [False, True])
def test_ranks_may_start_their_lifeline_again(restarted, tmp_path):
    with started_ranks(3, one_is_killed_at_the_second_start, tmp_path, restarted) as (ranks, _):
        assert_ended(ranks, tmp_path, died(1), [0, 2])


def works_without():
    """Returns the warnings of a rank that cannot reach the hub, after two batches and more time than one may take."""
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    module.logger.addHandler(handler)
    module.own_address = lambda store: "nowhere.invalid"
    for _ in range(2):
        this_rank.start()
    guard._LATER, executor = 1.0, Idle()
    for _ in range(2):
        with this_rank.whereabouts.in_batch(executor, "a step", True, 3.0):
            pass
    time.sleep(5.5)
    dist.barrier()
    return warnings


def test_a_rank_that_cannot_reach_the_others_warns_and_goes_on():
    first, second = run_on_ranks(2, works_without)
    (warning,) = second
    assert warning.startswith(f"ds_lgamp: rank 1 on {HOST} cannot reach rank 0 on {HOST} at nowhere.invalid:")
    assert not first


COLLECTIVES = 100


def wakes_of_its_thread():
    """Returns how often the thread had been switched before the ranks communicated, and after it."""
    this_rank.start()
    dist.barrier()
    status = Path(f"/proc/self/task/{this_rank.lifeline._thread.native_id}/status")

    def wakes():
        return sum(int(line.split()[1]) for line in status.read_text().splitlines() if "ctxt_switches" in line)

    before = None
    while before != (now := wakes()):
        # The other rank may still be joining.
        before = now
        time.sleep(0.5)
    for _ in range(COLLECTIVES):
        dist.all_reduce(torch.ones(8))
    after = wakes()
    this_rank.leave()
    return before, after


def test_the_thread_sleeps_while_ranks_communicate():
    for before, after in run_on_ranks(2, wakes_of_its_thread):
        # On a busy machine the thread may still wake for the end of its start.
        assert 0 < before <= after < before + COLLECTIVES / 10


def starts_alone():
    this_rank.start()
    return this_rank.lifeline


def test_a_rank_without_others_has_no_lifeline():
    assert run_on_ranks(1, starts_alone) == [None]


def leaves_while_it_handles_an_error():
    this_rank.start()
    dist.barrier()
    try:
        raise ArithmeticError
    except ArithmeticError:
        this_rank.leave()
        stays = this_rank.lifeline is not None
    this_rank.leave()
    return stays, this_rank.lifeline


def test_a_rank_says_no_goodbye_while_it_handles_an_error():
    assert run_on_ranks(2, leaves_while_it_handles_an_error) == [(True, None)] * 2


def a_verdict_finds_a_full_connection(folder, clock):
    """Rank 0 has so much to say to rank 1, which is stopped, that the system takes a part of it only."""
    if begin(folder) == 0:
        reach(clock, 1)
        (neighbour,) = this_rank.lifeline._neighbours.members
        while not neighbour.has_unsent:
            neighbour.send("padding " + "x" * 10_000)
        lifeline._FAREWELL = SECONDS
        (folder / "full").touch()
        reach(clock, 2)
        this_rank.fail("ArithmeticError: the layer is in trouble")
        os._exit(1)
    wait_for_ever()


def test_a_verdict_arrives_behind_what_the_system_cut_short(tmp_path):
    clock = shared_number()
    with started_ranks(2, a_verdict_finds_a_full_connection, tmp_path, clock) as (ranks, _):
        while not (tmp_path / "1").exists():
            time.sleep(0.02)
        time.sleep(1)
        os.kill(ranks[1].pid, signal.SIGSTOP)
        clock.value = 1
        while not (tmp_path / "full").exists():
            time.sleep(0.02)
        clock.value = 2
        # Rank 0 waits for half a second for news, before it has a verdict to send.
        time.sleep(1)
        os.kill(ranks[1].pid, signal.SIGCONT)
        assert_ended(ranks, tmp_path, [f"rank 0 on {HOST} failed (ArithmeticError: the layer is in trouble)"], [1])
