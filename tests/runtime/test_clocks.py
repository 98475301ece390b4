"""Ranks agree on a moment, whatever their clocks show."""

import time

import torch.distributed as dist

from ds_lgamp.partition.agreement import machine
from ds_lgamp.runtime.clocks import common_zero
from testing.ranks import run_on_ranks

AHEAD = 1000.0
"""Seconds by which the second rank's clock is ahead, as that of another machine may be."""


def zeros():
    """Returns the common moment of ranks on one machine; and that of two machines, on the clock of both ranks, with the
    seconds that it took."""
    together = common_zero(machine())
    ahead = AHEAD * dist.get_rank()
    begun = time.perf_counter()
    apart = common_zero(f"machine {dist.get_rank()}", lambda: time.perf_counter() + ahead)
    return together, apart - ahead, time.perf_counter() - begun


def test_ranks_on_one_machine_have_one_clock_and_others_ask():
    (first, own, took), (second, other, _) = run_on_ranks(2, zeros)
    assert first == second
    assert own != other
    assert abs(own - other) < took
