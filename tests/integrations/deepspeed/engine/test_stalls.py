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


def stands_still(folder, door, culprit, where):
    rank = dist.get_rank()
    os.dup2(os.open(folder / str(rank), os.O_CREAT | os.O_WRONLY), 2)
    ds_lgamp.install()
    prepare_rank()
    met = set()

    def meet(place):
        if place in met:
            time.sleep(1000)

    training = UnderDeepSpeed({**TOLD, "door": door}, meet)
    training.train()
    training.evaluate()
    dist.barrier()
    (folder / f"{rank} begins").touch()
    if rank == culprit:
        met.add(where.partition(" ")[0])
    meet("before")
    training.evaluate()
    dist.barrier()


CASES = [
    ("pipeline", 0, "before evaluation", "outside of a batch after an evaluation after step 1"),
    ("pipeline", 1, "forward of evaluation", "in F1.0"),
    ("plain", 1, "forward of evaluation", r"in F1.\d"),
]


@pytest.mark.parametrize(("door", "culprit", "where", "named"), slow_except(CASES[:1], CASES, several=True))
def test_a_rank_that_stands_still_at_the_edge_of_a_batch_is_named(door, culprit, where, named, tmp_path):
    """Before the batch ranks agree on it; behind its program the loss or the outputs travel."""
    with started_ranks(2, stands_still, tmp_path, door, culprit, where) as (ranks, _):
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("* begins"))) < 2:
            assert time.monotonic() < deadline and not any(rank.exitcode for rank in ranks)
            time.sleep(0.05)
        ranks[1 - culprit].join(LIMIT + MORE)
        said = (tmp_path / str(1 - culprit)).read_text()
        assert ranks[1 - culprit].exitcode == 1, said
    blamed = rf"; rank {culprit} stands {named} for \d+ s and waits for no rank; this rank, {1 - culprit} on {HOST}, "
    assert re.search(blamed, said), said
