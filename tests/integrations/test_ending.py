"""How a script that calls ``ds_lgamp.install()`` ends, with an unhandled error and without one."""

import os
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.integrations.user_script import failures_end_the_process
from ds_lgamp.watch.this_rank import this_rank
from testing import SCRIPTS
from testing.ranks import shared_number, started_ranks
from tests.slow import chosen, slow_except

SCRIPT = SCRIPTS / "ends_in_many_ways.py"
TRACEBACK = "ArithmeticError: the script is in trouble"
WAYS = {
    # exit status, printed text, whether the interpreter exited in the normal way
    "raise": (1, TRACEBACK, False),
    "handler waits": (1, f"{TRACEBACK}.*WAITS", False),
    "refused": (2, "ds_lgamp: schedule is 'layerd'; use 'layered'", False),
    "own hook": (1, f"OWN HOOK\n.*{TRACEBACK}", False),
    "later hook": (1, f"LATER HOOK\n.*{TRACEBACK}", False),
    "caught": (0, TRACEBACK, True),
    "before init": (1, TRACEBACK, True),
    "alone": (1, TRACEBACK, True),
    "uninstalled": (1, TRACEBACK, True),
    "interrupted": (-2, "KeyboardInterrupt", True),
    "exit": (3, "", True),
    "failed save": (1, "CheckpointError: step3 could not be saved", False),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory, request):
    """Returns the folder with the output of every way to end that a test asks for."""
    folder = tmp_path_factory.mktemp("ends")
    subprocess.run(
        [sys.executable, SCRIPT, folder, *sorted(chosen(request, "way"))], check=True, timeout=300, env=os.environ
    )
    return folder


@pytest.mark.parametrize("way", slow_except(["raise", "handler waits", "alone", "failed save"], list(WAYS)))
def test_only_an_unhandled_error_of_a_rank_among_others_ends_it_at_once(ended, way):
    status, message, orderly = WAYS[way]
    output = (ended / way).read_text()
    assert int((ended / f"{way}.status").read_text()) == status, output
    begin, _, end = message.partition(".*")
    assert begin in output and end in output and output.count(TRACEBACK) == (TRACEBACK in message), output
    assert ("ORDERLY EXIT" in output) == orderly, output
    # One that waits keeps those from running that were registered before it.
    assert output.count("EXIT HANDLER") == (way not in ("handler waits", "failed save")), output
    assert (ended / f"{way}.log").read_text() == "the last line"
    if way == "refused":
        assert "Traceback" not in output


def cannot_save(folder, clock):
    """Both ranks raise what happened to rank 0, but it does so later."""
    rank = dist.get_rank()
    os.dup2(os.open(folder / str(rank), os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = os.fdopen(2, "w")
    this_rank.start()
    dist.barrier()
    while rank == 0 and clock.value == 0:
        time.sleep(0.01)
    with failures_end_the_process():
        raise CheckpointError("step3 could not be saved (rank 0: OSError: no space left)")


def test_an_error_that_all_ranks_raise_is_blamed_on_none_that_ends_first(tmp_path):
    clock = shared_number()
    with started_ranks(2, cannot_save, tmp_path, clock) as (ranks, _):
        ranks[1].join(60)
        clock.value = 1
        ranks[0].join(60)
        assert [rank.exitcode for rank in ranks] == [1, 1]
    said = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert all("CheckpointError: step3 could not be saved (rank 0: OSError: no space left)" in text for text in said)
    assert "rank 1" not in "".join(said)
