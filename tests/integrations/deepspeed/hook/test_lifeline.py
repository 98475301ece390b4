"""However a script is started, a rank that dies ends the others, without the help of a launcher."""

import os
import socket
import subprocess
import sys
from itertools import product

import pytest

from testing import SCRIPTS
from testing.launching import ON_CPU, free_port
from tests.slow import slow_except

SCRIPT = SCRIPTS / "waits_for_ever.py"
RANKS = 3
ENTRIES = {"run": (["-m", "ds_lgamp", "run"], []), "installed": ([], ["--install"])}
"""Words before and after the script."""
DIED = f"ds_lgamp: rank 2 on {socket.gethostname()} died; this rank, {{rank}} on {socket.gethostname()}, ends"
FAILED = (
    f"ds_lgamp: rank 2 on {socket.gethostname()} failed (ArithmeticError: the script is in trouble); "
    f"this rank, {{rank}} on {socket.gethostname()}, ends"
)


def started(entry: str, end: str) -> list[tuple[int, str]]:
    """Returns the exit status and the output of every rank."""
    port = free_port()
    before, after = ENTRIES[entry]
    words = [sys.executable, *before, str(SCRIPT), end, *after]
    ranks = [
        subprocess.Popen(
            words, env=environment_of(rank, port), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs)]


def environment_of(rank: int, port: int) -> dict[str, str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return {**os.environ, **ON_CPU, **{name: str(value) for name, value in place.items()}}


ENDS = {"kill": (-9, DIED), "raise": (1, FAILED)}


@pytest.mark.parametrize(
    ("entry", "end"),
    slow_except([], list(product(ENTRIES, ENDS)), several=True, slow=[("run", "kill"), ("installed", "raise")]),
)
def test_a_rank_that_ends_badly_ends_the_others_and_is_named(entry, end):
    status, sentence = ENDS[end]
    *others, (own, _) = started(entry, end)
    assert own == status
    for rank, (ended, output) in enumerate(others):
        assert ended == 1, output
        assert sentence.format(rank=rank) in output


@pytest.mark.parametrize(
    ("entry", "end"),
    slow_except(
        [],
        [("run", "return"), ("installed", "return"), ("installed", "destroy")],
        several=True,
        slow=[("installed", "destroy")],
    ),
)
def test_a_rank_that_ends_well_ends_no_other(entry, end):
    for status, output in started(entry, end):
        assert status == 0, output
        assert "ends" not in output
