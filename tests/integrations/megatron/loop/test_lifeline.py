"""A rank that dies in a loop of Megatron-core ends the others."""

import ctypes
import os
import signal
import socket

import pytest
import torch.distributed as dist

from testing.ranks import started_ranks
from tests.integrations.megatron.training_loop import Place, Training, prepare_process

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
        assert f"rank 1 on {socket.gethostname()} died; this rank, 0, ends" in (tmp_path / "0").read_text()
