"""Several ranks, on one GPU if there are not as many: their layouts, and what NCCL needs for them."""

import os
from typing import NamedTuple

from deepspeed.accelerator import get_accelerator

from benchmarks.gpt.process import prepare_process
from benchmarks.gpu_day.environment import nccl_version

NEEDED = (2, 30)
"""The first NCCL that puts several ranks on one GPU, if ``NCCL_MULTI_RANK_GPU_ENABLE`` is 1."""


class Layout(NamedTuple):
    """Pipeline and data-parallel ranks."""

    pipeline_ranks: int
    data_ranks: int

    @property
    def ranks(self) -> int:
        return self.pipeline_ranks * self.data_ranks

    def __str__(self) -> str:
        return f"P{self.pipeline_ranks} W{self.data_ranks}"


LAYOUTS = (Layout(2, 1), Layout(1, 2), Layout(2, 2))


def shares(ranks: int) -> bool:
    """Whether so many ranks have to share the first GPU."""
    return get_accelerator().device_count() < ranks


def too_old(ranks: int) -> str | None:
    """Says why NCCL cannot run so many ranks, several on one GPU; None if it can, or if they are on the CPU."""
    if get_accelerator().device_name() == "cpu" or not shares(ranks) or nccl_version() >= NEEDED:
        return None
    return f"NCCL {'.'.join(map(str, nccl_version()))} < {'.'.join(map(str, NEEDED))}"


def share_device(rank: int, ranks: int = 1, connections: int | None = None) -> None:
    """Prepares a rank before CUDA and its process group start. Every rank gets a GPU if there are enough.

    Args:
        rank: the rank.
        ranks: how many there are.
        connections: hardware queues of the device for this process; None for CUDA's default.
    """
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    if shares(ranks):
        # NCCL asks for this, so that the kernels of all ranks find room on the GPU.
        os.environ["NCCL_MAX_CTAS"] = "4"
    if connections is not None:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(connections)
    prepare_process(rank, device=0 if shares(ranks) else None)
