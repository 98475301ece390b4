"""A run whose ranks are all killed goes on from its live state, to the bit, and loses one step at most."""

import random
import signal
import time

import pytest

from testing.ranks import run_on_ranks, shared_number, started_ranks
from tests.integrations.deepspeed.checkpoint.live_runs import (
    CASES,
    TORN,
    die_while_writing,
    resume,
    train_until_killed,
)

SECONDS = 120


def killed(folder, cases, steps=3):
    """Kills all ranks at a random time after ``steps`` steps. Returns how many steps they have made."""
    done = shared_number()
    with started_ranks(2, train_until_killed, folder, cases, done) as (ranks, results):
        deadline = time.monotonic() + SECONDS
        while done.value < steps:
            assert all(process.is_alive() for process in ranks), results.get()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.2))
        for process in ranks:
            process.kill()
    return done.value


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return killed(folder, CASES), run_on_ranks(2, resume, folder, CASES)


@pytest.mark.parametrize("case", list(CASES))
def test_a_killed_run_goes_on_to_the_bit_and_loses_one_step_at_most(resumed, case):
    done, ranks = resumed
    for rank in ranks:
        begun, own, expected = rank[case]
        assert done - 1 <= begun <= done + 1
        assert own == expected
