"""Ranks that end, for tests of what they say last. Every rank writes to a file of its own."""

import ctypes
import os
import socket
import time

import torch.distributed as dist

from ds_lgamp.watch.standing import Neighbours
from ds_lgamp.watch.this_rank import this_rank

HOST = socket.gethostname()
SECONDS = 30
"""The time in which a dead rank must have ended the others."""


class Idle:
    """An executor without a program."""

    program, row, doing, current, neighbours = (), 0, "", None, Neighbours((), ())

    def __init__(self):
        self.begun = set()


def wait_for_ever():
    """Waits as a call of CUDA does: in C, without the interpreter, whatever signals come."""
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    for _ in range(2):
        lock(mutex)


def begin(folder):
    """Starts the lifeline and writes standard error to a file of this rank. Returns the rank."""
    rank = dist.get_rank()
    os.dup2(os.open(folder / str(rank), os.O_CREAT | os.O_WRONLY), 2)
    this_rank.start()
    dist.barrier()
    return rank


def died(*ranks):
    return [f"rank {rank} on {HOST} died" for rank in ranks]


def assert_ended(ranks, folder, verdicts, among, status=1, seconds=SECONDS):
    """Checks that the ranks ``among`` end with ``status``, and that each reports one of the ``verdicts`` once."""
    deadline = time.monotonic() + seconds
    for rank in among:
        ranks[rank].join(max(0, deadline - time.monotonic()))
        assert ranks[rank].exitcode == status, f"rank {rank} ends with {ranks[rank].exitcode}"
        lines = (folder / str(rank)).read_text().splitlines()
        said = [line for line in lines if f"; this rank, {rank} on {HOST}, ends " in line]
        assert len(said) == 1 and any(said[0].startswith(f"ds_lgamp: {verdict};") for verdict in verdicts), lines
