"""Jobs of the host's thread: who waits for one waits for what it leaves to the disk too, and the thread does not."""

import threading

import pytest
import torch

from ds_lgamp.partition import host
from ds_lgamp.partition.host import HostThread

SECONDS = 30


def test_a_waiter_waits_for_the_write_and_the_next_job_does_not():
    thread, written, order = HostThread(torch.device("cpu")), threading.Event(), []

    def write():
        assert written.wait(SECONDS)
        order.append("written")

    first = thread.start(lambda: write)
    thread.start(lambda: order.append("next")).wait()
    waiting = threading.Thread(target=first.wait, daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive() and order == ["next"]
    written.set()
    waiting.join(SECONDS)
    assert not waiting.is_alive() and order == ["next", "written"]


def test_the_thread_does_not_wait_for_itself():
    """Its garbage collection may delete an engine, which waits for its jobs."""
    thread, queued, jobs = HostThread(torch.device("cpu")), threading.Event(), []
    jobs.append(thread.start(lambda: queued.wait(SECONDS) and jobs[1].wait()))
    jobs.append(thread.start(lambda: None))
    queued.set()
    waiting = threading.Thread(target=jobs[1].wait, daemon=True)
    waiting.start()
    waiting.join(SECONDS)
    assert not waiting.is_alive()


def test_an_error_of_the_write_is_raised_by_every_waiter():
    def write():
        raise OSError("full")

    job = HostThread(torch.device("cpu")).start(lambda: write)
    for _ in range(2):
        with pytest.raises(OSError, match="full"):
            job.wait()


def test_after_a_failed_job_no_other_one_runs():
    thread, ran = HostThread(torch.device("cpu")), []

    def fail():
        raise ValueError("no luck")

    jobs = [thread.start(fail), thread.start(lambda: ran.append(1))]
    for job in jobs:
        with pytest.raises(ValueError, match="no luck"):
            job.wait()
    assert not ran


def test_the_thread_has_the_device_of_its_rank(monkeypatch):
    """Otherwise its first event would make a context on the first device of the node."""
    made = []
    monkeypatch.setattr(host, "use_device", lambda device: made.append((device, threading.current_thread().name)))
    HostThread(torch.device("cuda", 3), "updates").start(lambda: None).wait()
    assert made == [(torch.device("cuda", 3), "updates")]


def test_only_the_thread_itself_computes_with_its_number_of_threads():
    """Neither the program nor threads that begin later do: the data of a script, for instance."""

    def numbers(thread):
        seen = []
        thread.start(lambda: seen.append(torch.get_num_threads())).wait()
        return seen[0]

    before = torch.get_num_threads()
    updating = HostThread(torch.device("cpu"), threads=before + 2)
    assert numbers(updating) == before + 2
    assert torch.get_num_threads() == before
    assert numbers(HostThread(torch.device("cpu"))) == before
    # A first computation does not take torch's number.
    updating.start(lambda: torch.ones(1_000_000).add_(1).zero_).wait()
    assert numbers(updating) == before + 2
