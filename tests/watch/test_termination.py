"""Ranks that SIGTERM ends say what they know first, whatever their main threads do."""

import ctypes
import faulthandler
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch.distributed as dist

from ds_lgamp.watch.launcher import Termination
from ds_lgamp.watch.this_rank import this_rank
from testing.ranks import run_on_ranks, started_ranks
from tests.slow import slow_except
from tests.watch.ends import HOST, SECONDS, assert_ended, begin, died, wait_for_ever

BOUND = 20
"""Seconds in which SIGTERM ends a rank, also on a busy machine. Launchers kill ranks after 30."""


def is_ready(folder, rank):
    (folder / f"{rank} is ready").touch()


def wait_until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def await_ready(folder, count):
    wait_until(lambda: len(list(folder.glob("* is ready"))) == count)


def terminate(ranks, *which):
    for rank in which:
        # It may have ended.
        with suppress(ProcessLookupError):
            os.kill(ranks[rank].pid, signal.SIGTERM)


def assert_terminated(ranks, folder, among, words="was terminated (SIGTERM) outside of a batch"):
    """Checks that SIGTERM ends the ranks ``among``, and that each says these ``words`` about itself and no others."""
    deadline = time.monotonic() + BOUND
    for rank in among:
        ranks[rank].join(max(0, deadline - time.monotonic()))
        assert ranks[rank].exitcode == -signal.SIGTERM, f"rank {rank} ends with {ranks[rank].exitcode}"
        expected = f"ds_lgamp: this rank, {rank} on {HOST}, {words}\n" if words else ""
        assert (folder / str(rank)).read_text() == expected


def waits(folder):
    is_ready(folder, begin(folder))
    wait_for_ever()


@pytest.mark.parametrize("culprit", slow_except([1], [0, 1]))
def test_a_rank_that_is_terminated_names_the_one_that_died(culprit, tmp_path):
    """Even where SIGTERM is faster than the news."""
    others = sorted({0, 1, 2} - {culprit})
    with started_ranks(3, waits, tmp_path) as (ranks, _):
        await_ready(tmp_path, 3)
        terminate(ranks, *others)
        time.sleep(0.3)
        ranks[culprit].kill()
        assert_ended(ranks, tmp_path, died(culprit), others, -signal.SIGTERM, BOUND)


@pytest.mark.parametrize("order", slow_except([(0, 1)], [(0, 1), (1, 0)]))
def test_ranks_that_are_terminated_one_after_the_other_blame_none(order, tmp_path):
    with started_ranks(2, waits, tmp_path) as (ranks, _):
        await_ready(tmp_path, 2)
        for rank in order:
            terminate(ranks, rank)
            time.sleep(0.4)
        assert_terminated(ranks, tmp_path, order)


@pytest.mark.slow
@pytest.mark.parametrize("alone", [0, 1])
def test_a_rank_that_is_terminated_alone_ends_the_others_and_is_named(alone, tmp_path):
    with started_ranks(3, waits, tmp_path) as (ranks, _):
        await_ready(tmp_path, 3)
        terminate(ranks, alone)
        assert_terminated(ranks, tmp_path, [alone])
        assert_ended(ranks, tmp_path, died(alone), sorted({0, 1, 2} - {alone}))


@pytest.mark.slow
def test_a_rank_that_was_terminated_first_is_named_by_those_that_are_terminated_for_it(tmp_path):
    with started_ranks(2, waits, tmp_path) as (ranks, _):
        await_ready(tmp_path, 2)
        os.kill(ranks[0].pid, signal.SIGSTOP)
        terminate(ranks, 1)
        assert_terminated(ranks, tmp_path, [1])
        terminate(ranks, 0)
        os.kill(ranks[0].pid, signal.SIGCONT)
        assert_ended(ranks, tmp_path, died(1), [0], -signal.SIGTERM, BOUND)


@pytest.mark.slow
def test_sigterm_ends_a_rank_at_once_that_has_spoken(tmp_path):
    with started_ranks(2, waits, tmp_path) as (ranks, _):
        await_ready(tmp_path, 2)
        ranks[0].kill()
        wait_until((tmp_path / "1").read_text)
        terminate(ranks, 1)
        ranks[1].join(1)
        assert_ended(ranks, tmp_path, died(0), [1], -signal.SIGTERM)


@pytest.mark.slow
def test_sigterm_that_comes_again_does_not_delay_the_end(tmp_path):
    with started_ranks(2, waits, tmp_path) as (ranks, _):
        await_ready(tmp_path, 2)
        for _ in range(5):
            terminate(ranks, 0, 1)
            time.sleep(0.4)
        assert [rank.exitcode for rank in ranks] == [-signal.SIGTERM] * 2


def calls_the_handler_before():
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *arguments: before(*arguments))


own_alarm, own_bell = socket.socketpair()
own_alarm.setblocking(False)


def writes_signals_elsewhere():
    signal.set_wakeup_fd(own_alarm.fileno())


MAIN = {
    "runs Python code": lambda: None,
    "has a handler that calls the one before": calls_the_handler_before,
    "writes signals elsewhere": writes_signals_elsewhere,
}


def runs_python_code(folder, main):
    rank = begin(folder)
    MAIN[main]()
    is_ready(folder, rank)
    while True:
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("main", MAIN)
def test_a_main_thread_that_gets_sigterm_itself_leaves_the_end_to_the_lifeline(main, tmp_path):
    with started_ranks(2, runs_python_code, tmp_path, main) as (ranks, _):
        await_ready(tmp_path, 2)
        terminate(ranks, 0, 1)
        assert_terminated(ranks, tmp_path, [0, 1])


def sleeps(*_):
    time.sleep(SECONDS)


def fails(*_):
    raise ArithmeticError


def has_a_thread_that(folder, does):
    """Once its thread does so, the rank is ready."""
    rank = begin(folder)

    def look(*_):
        is_ready(folder, rank)
        does()

    this_rank.lifeline._look = look
    if does is sleeps:
        sleeps()
    wait_for_ever()


@pytest.mark.slow
@pytest.mark.parametrize("does", [sleeps, fails])
def test_sigterm_ends_a_rank_whose_lifeline_is_out_of_order(does, tmp_path):
    """The main thread loses patience with a thread that hangs, and a thread that fails has given SIGTERM back."""
    with started_ranks(2, has_a_thread_that, tmp_path, does) as (ranks, _):
        await_ready(tmp_path, 2)
        time.sleep(0.3)
        terminate(ranks, 0, 1)
        for rank in ranks:
            rank.join(BOUND)
            assert rank.exitcode == -signal.SIGTERM


handled = []


def take_note(*_):
    handled.append(time.monotonic())


def set_handler():
    signal.signal(signal.SIGTERM, take_note)


def set_handler_of_a_library():
    faulthandler.register(signal.SIGTERM, open(os.devnull, "w"))


def keeps(set_it, first):
    """SIGTERM comes while there is a lifeline, and afterwards. Returns whether Python knows the script's handler then,
    and how often that was called."""
    if first:
        set_it()
    this_rank.start()
    dist.barrier()
    if not first:
        set_it()
    is_known = []
    for _ in range(2):
        is_known.append(signal.getsignal(signal.SIGTERM) == take_note)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.5)
        dist.barrier()
        this_rank.leave()
    return is_known, len(handled)


@pytest.mark.parametrize(
    ("set_it", "first", "calls"),
    slow_except(
        [(set_handler, False, 2)],
        [(set_handler, True, 2), (set_handler, False, 2), (set_handler_of_a_library, True, 0)],
        several=True,
    ),
)
def test_a_handler_of_the_script_stays_and_alone_decides(set_it, first, calls):
    assert run_on_ranks(2, keeps, set_it, first) == [([calls > 0] * 2, calls)] * 2


def writes_signals_to_its_own_file(first):
    """Returns whether SIGTERM has its default action after the start of the lifeline, and both after its end."""
    if first:
        writes_signals_elsewhere()
    this_rank.start()
    dist.barrier()
    if not first:
        writes_signals_elsewhere()
    has_default = [signal.getsignal(signal.SIGTERM) == signal.SIG_DFL]
    this_rank.leave()
    has_default.append(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    return *has_default, signal.set_wakeup_fd(-1) == own_alarm.fileno()


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_a_file_of_the_script_for_signals_stays(first):
    assert run_on_ranks(2, writes_signals_to_its_own_file, first) == [(first, True, True)] * 2


def with_a_child(fork):
    """Terminates a child. Returns how it ends within the time that a rank takes to end, and lives on itself."""
    this_rank.start()
    dist.barrier()
    ready, telling = os.pipe()
    child = fork()
    if child == 0:
        os.write(telling, b"!")
        wait_for_ever()
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    time.sleep(1.5)
    ended, end = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    dist.barrier()
    this_rank.leave()
    return end


def fork_as_a_library_does():
    return ctypes.PyDLL(None).fork()


def test_sigterm_ends_a_forked_process_at_once_and_not_its_rank():
    assert run_on_ranks(2, with_a_child, os.fork) == [signal.SIGTERM] * 2


@pytest.mark.slow
def test_sigterm_to_a_process_that_a_library_has_forked_does_not_end_the_rank():
    """Such a process still has the handler of its parent, as with any handler in Python."""
    assert run_on_ranks(2, with_a_child, fork_as_a_library_does) == [0] * 2


def leaves_and_waits(folder):
    rank = begin(folder)
    this_rank.leave()
    assert (signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)) == (signal.SIG_DFL, -1)
    is_ready(folder, rank)
    wait_for_ever()


@pytest.mark.slow
def test_a_rank_that_has_left_has_the_default_action(tmp_path):
    with started_ranks(2, leaves_and_waits, tmp_path) as (ranks, _):
        await_ready(tmp_path, 2)
        terminate(ranks, 0, 1)
        assert_terminated(ranks, tmp_path, [0, 1], words="")


def exit_status_of(act):
    """Returns the exit status of a forked process that does no more than this."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(act())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def has_come_to_the_parent_alone():
    termination = Termination()
    noticed = []
    for _ in range(2):
        termination._alarm.send(bytes([0]))
        noticed += exit_status_of(termination.has_come), termination.has_come()
    return noticed == [False, True] * 2


def test_a_forked_process_takes_no_note_of_what_came_to_its_parent():
    assert exit_status_of(has_come_to_the_parent_alone) == 1


def test_another_thread_than_the_main_one_changes_nothing():
    termination = Termination()
    with ThreadPoolExecutor() as threads:
        threads.submit(termination.catch).result()
    assert (signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)) == (signal.SIG_DFL, -1)
    termination.close()


def outlives_sigterm():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    Termination().end()


def test_a_process_that_outlives_sigterm_ends_all_the_same():
    """As the first one of a container does."""
    assert exit_status_of(outlives_sigterm) == 128 + signal.SIGTERM
