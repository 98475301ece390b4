"""Reductions of half-precision gradients end in full precision."""

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.partition.collectives import start_reduce_scatter
from tests.ranks import run_on_ranks

SMALL = 2.0**-9
"""1 + SMALL has no bf16."""


def reduced():
    own = torch.tensor([1.0, SMALL] if dist.get_rank() == 0 else [SMALL, 1.0], dtype=torch.bfloat16)
    return start_reduce_scatter(own, dist.group.WORLD, torch.float32)()


def test_a_sum_of_bf16_is_not_rounded_to_bf16():
    for part in run_on_ranks(2, reduced):
        assert part.dtype == torch.float32
        assert part.item() == pytest.approx(1 + SMALL, abs=0)
