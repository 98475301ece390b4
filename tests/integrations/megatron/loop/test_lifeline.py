"""A rank that dies or stands still in a loop of Megatron-core ends the others."""

import ctypes
import os
import re
import signal
import socket
import time

import pytest
import torch.distributed as dist

from testing.ranks import started_ranks
from tests.integrations.megatron.training_loop import Place, Training, prepare_process

HOST = socket.gethostname()
PLACES = {"one pipeline": Place(2, 2, "layered"), "no pipeline": Place(1, 2, "layered", data_ranks=2)}


def trains_and_dies(place, folder):
    os.dup2(os.open(folder / str(dist.get_rank()), os.O_CREAT | os.O_WRONLY), 2)
    Training(place).train()
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    # In C code that no broken connection ends, as kernels of NCCL.
    ctypes.CDLL(None).pause()


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_dead_rank_ends_the_others_and_is_named(place, tmp_path):
    arguments = PLACES[place], tmp_path
    with started_ranks(2, trains_and_dies, *arguments, before_init=prepare_process) as (ranks, _):
        ranks[0].join(120)
        assert ranks[0].exitcode == 1
        assert (
            f"rank 1 on {socket.gethostname()} died; this rank, 0 on {socket.gethostname()}, ends"
            in (tmp_path / "0").read_text()
        )


LIMIT = 6.0


def trains_and_stops(place, folder, where):
    """Rank 1 stops in its third batch, in the model or in the optimizer's step, which belongs to no batch."""
    rank = dist.get_rank()
    os.dup2(os.open(folder / str(rank), os.O_CREAT | os.O_WRONLY), 2)
    training = Training(place)
    settings = training.forward_backward._settings.model_copy(update={"hang_timeout": LIMIT})
    training.forward_backward._settings = settings
    training.run_batch(0)
    training.run_batch(0)
    dist.barrier()
    (folder / f"{rank} begins").touch()
    if rank == 1 and where == "model":
        training.forward_step = lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP)
    training.run_batch(0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    training.optimizer.step()
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "where"), [("one pipeline", "model"), ("one pipeline", "optimizer"), ("no pipeline", "model")]
)
def test_a_rank_that_stops_ends_the_others_and_is_named(place, where, tmp_path):
    arguments = PLACES[place], tmp_path, where
    with started_ranks(2, trains_and_stops, *arguments, before_init=prepare_process) as (ranks, _):
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("* begins"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ranks[0].join(LIMIT + 15)
        said = (tmp_path / "0").read_text()
        assert ranks[0].exitcode == 1, said
    stood = r"outside of a batch after batch 3" if where == "optimizer" else r".* of batch 3"
    assert re.search(rf"rank 0 has waited \d+ s {stood} for .*; rank 1 does not answer since", said), said
