"""Over a slow network, a step whose exchanges overlap is as much shorter as the clock says."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_lgamp.schedule.costs import Durations, sized_costs
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from testing.namespaces import NetworkUnavailable, throttled_network
from testing.ranks import run_on_ranks
from tests.runtime.one_rank import one_rank
from tests.runtime.test_turns import Exchange, spec_of, step

RATE, BYTES_PER_SECOND = "200mbit", 200e6 / 8
SECONDS = 0.03
"""Of each compute, and of each exchange. A compute waits, so that two ranks may share a core."""
MICRO_BATCHES, LAYERS, EXCHANGES, REPETITIONS = 4, 2, 2, 3


class Waiting(nn.Module):
    """A layer with divided experts whose computes are waits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        for _ in range(EXCHANGES):
            time.sleep(SECONDS)
            hidden = Exchange.apply(hidden)
        return hidden * self.scale


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        time.sleep(SECONDS)
        return hidden * self.scale


def seconds_on_rank() -> dict[bool, float]:
    """Returns the seconds of a step whose exchanges overlap, and of one whose do not, the least of several."""
    # Half of the message stays on this rank.
    hidden = torch.ones(2, int(SECONDS * BYTES_PER_SECOND / 4))
    executor = one_rank([[*(Waiting() for _ in range(LAYERS)), Last()], [nn.Identity()]])
    times: dict[bool, list[float]] = {True: [], False: []}
    for overlaps in [True, False] * REPETITIONS:
        dist.barrier()
        start = time.perf_counter()
        step(executor, spec_of(MICRO_BATCHES, overlaps), lambda _: hidden)
        times[overlaps].append(time.perf_counter() - start)
    return {overlaps: min(each) for overlaps, each in times.items()}


def on_clock(overlaps: bool) -> float:
    spec, exchanges = spec_of(MICRO_BATCHES, overlaps), LAYERS * EXCHANGES
    exchange = exchanges * SECONDS
    forward = exchange + (exchanges + 1) * SECONDS
    # A backward only exchanges, and the last chunk does nothing.
    of_chunk = Durations(forward, exchange, recompute=forward, exchange=exchange, exchanges=exchanges)
    return simulate(spec, build_program(spec), sized_costs(spec, of_chunk, [1, 0])).step_time


@pytest.mark.timing
def test_a_step_gets_shorter_by_what_the_clock_says():
    try:
        with throttled_network(2, RATE) as network:
            ranks = run_on_ranks(2, seconds_on_rank, before_init=network.enter)
    except NetworkUnavailable as reason:
        pytest.skip(str(reason))
    beside, after = (max(found[overlaps] for found in ranks) for overlaps in (True, False))
    assert beside / after == pytest.approx(on_clock(True) / on_clock(False), abs=0.08)
