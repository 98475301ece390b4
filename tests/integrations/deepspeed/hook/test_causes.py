"""A rank that fails shows its error first, and the others name it, whatever the script does on its way out."""

import re
import socket
import subprocess
import sys
from itertools import product

import pytest

from testing import SCRIPTS
from testing.launching import free_port
from tests.integrations.deepspeed.hook.test_lifeline import environment_of
from tests.slow import slow_except

SCRIPT = SCRIPTS / "fails_in_finally.py"
HOST = socket.gethostname()
RANKS = 2
ENTRIES = {"run": (["-m", "ds_lgamp", "run"], []), "installed": ([], ["--install"])}
"""Words before and after the script."""
ERROR = "ValueError: the data are broken"
NAMES = rf"ds_lgamp: rank 1 on {HOST} failed \({ERROR}\)"
WAYS = ("finally", "with", "generator", "handler", "barrier")


def ended(kind: str, way: str, entry: str) -> list[tuple[int, str]]:
    """Returns the exit status and the output of every rank, without the name of the rank that torch puts before each
    line of a traceback."""
    port = free_port()
    before, after = ENTRIES[entry]
    words = [sys.executable, *before, str(SCRIPT), kind, way, *after]
    ranks = [
        subprocess.Popen(
            words,
            env=environment_of(rank, port) | {"WORLD_SIZE": str(RANKS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [
        (rank.returncode, re.sub(r"^\[rank\d\]: ?", "", output, flags=re.MULTILINE))
        for rank, output in zip(ranks, outputs)
    ]


def first_complaint(output: str) -> str:
    """Returns the first line of ``output`` that says that something is wrong, and what follows."""
    found = re.search(r"^(ds_lgamp: |Traceback )", output, re.MULTILINE)
    return "" if found is None else output[found.start() :]


CASES = list(product(["plain", "pipeline"], WAYS, ENTRIES))
SLOW = [("pipeline", "finally", "installed"), ("plain", "barrier", "run"), ("plain", "generator", "installed")]


@pytest.mark.parametrize(
    ("kind", "way", "entry"), slow_except([("plain", "finally", "run")], CASES, several=True, slow=SLOW)
)
def test_a_rank_that_fails_shows_its_error_first_and_the_others_name_it(kind, way, entry):
    (other, heard), (own, shown) = ended(kind, way, entry)
    assert other != 0 and own == 1, shown + heard
    first, *_ = re.split(r"^ds_lgamp: ", first_complaint(shown), flags=re.MULTILINE)
    assert first.startswith("Traceback") and f"\n{ERROR}\n" in first, shown
    assert re.match(NAMES, first_complaint(heard)), heard
    assert re.search(rf"{NAMES}.*; this rank, 0 on {HOST}, ends ", heard), heard
    assert "ended its script" not in shown + heard


@pytest.mark.slow
def test_data_of_a_pipeline_that_fail_are_shown_with_their_traceback():
    (other, heard), (own, shown) = ended("data", "finally", "run")
    assert other == own == 2
    assert re.search(rf"^ds_lgamp: the data of rank 1 failed: {ERROR}\nTraceback .*in fail$", shown, re.M | re.S), shown
    assert first_complaint(heard) == f"ds_lgamp: the data of rank 1 failed: {ERROR}\n"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "entry"), [("plain", "run"), ("pipeline", "installed")])
def test_a_rank_that_exits_because_of_an_error_keeps_its_status_and_the_others_name_the_error(kind, entry):
    (other, heard), (own, shown) = ended(kind, "exit", entry)
    assert other == 1 and own == 3, shown + heard
    assert re.match(NAMES, first_complaint(heard)), heard
