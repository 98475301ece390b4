"""A rank that stands still is named also if the others have done their part of a batch, or have yet to begin it."""

import os
import re
import socket
import time

import pytest
import torch.distributed as dist

import ds_lgamp
from testing.chaos.doors import UnderDeepSpeed
from testing.deepspeed_rank import prepare_rank
from testing.ranks import started_ranks
from tests.slow import slow_except

HOST = socket.gethostname()
LIMIT, MORE = 4.0, 15.0
TOLD = {
    **{"pipeline_ranks": 2, "zero_stage": 0, "schedule": "layered", "micro_batches": 1, "layers": 2},
    **{"hang_timeout": LIMIT, "asynchronous_save": False},
}


def begun(folder, door, meet):
    """Trains one step. Returns the training."""
    os.dup2(os.open(folder / str(dist.get_rank()), os.O_CREAT | os.O_WRONLY), 2)
    ds_lgamp.install()
    prepare_rank()
    training = UnderDeepSpeed({**TOLD, "door": door}, meet)
    training.train()
    training.evaluate()
    dist.barrier()
    (folder / f"{dist.get_rank()} begins").touch()
    return training


def stands_still(folder, door, culprit, where):
    met = set()

    def meet(place):
        if place in met:
            time.sleep(1000)

    training = begun(folder, door, meet)
    if dist.get_rank() == culprit:
        met.add(where.partition(" ")[0])
    meet("before")
    training.evaluate()
    dist.barrier()


def wait_until_all_begin(folder, ranks):
    deadline = time.monotonic() + 120
    while len(list(folder.glob("* begins"))) < len(ranks):
        assert time.monotonic() < deadline and not any(rank.exitcode for rank in ranks)
        time.sleep(0.05)


CASES = [
    ("pipeline", 0, "before evaluation", "outside of a batch after an evaluation after step 1"),
    ("pipeline", 1, "forward of evaluation", "in F1.0"),
    ("plain", 1, "forward of evaluation", r"in F1.\d"),
]


@pytest.mark.parametrize(("door", "culprit", "where", "named"), slow_except(CASES[:1], CASES, several=True))
def test_a_rank_that_stands_still_at_the_edge_of_a_batch_is_named(door, culprit, where, named, tmp_path):
    """Before the batch ranks agree on it; behind its program the loss or the outputs travel."""
    with started_ranks(2, stands_still, tmp_path, door, culprit, where) as (ranks, _):
        wait_until_all_begin(tmp_path, ranks)
        ranks[1 - culprit].join(LIMIT + MORE)
        said = (tmp_path / str(1 - culprit)).read_text()
        assert ranks[1 - culprit].exitcode == 1, said
    blamed = rf"; rank {culprit} stands {named} for \d+ s and waits for no rank; this rank, {1 - culprit} on {HOST}, "
    assert re.search(blamed, said), said


def saves_on_rank_0(folder):
    training = begun(folder, "pipeline", lambda place: None)
    if dist.get_rank() == 0:
        training.save(folder)
    dist.barrier()


@pytest.mark.slow
def test_a_script_that_saves_on_rank_0_alone_is_told_so(tmp_path):
    """All ranks wait outside of a batch, in calls that never meet."""
    with started_ranks(2, saves_on_rank_0, tmp_path) as (ranks, _):
        wait_until_all_begin(tmp_path, ranks)
        for rank in ranks:
            rank.join(LIMIT + MORE)
        said = [(tmp_path / str(rank)).read_text() for rank in range(2)]
        assert [rank.exitcode for rank in ranks] == [1, 1], said
    for text in said:
        assert re.search(r"waiting for \w+ with ranks 0, 1; so ranks (0, 1|1, 0) wait for each other", text)
    assert "training.save(folder)" in said[0] and "in save_checkpoint" in said[0], said
