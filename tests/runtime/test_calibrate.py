"""A calibration measures links where there are several ranks."""

import torch

from ds_lgamp.runtime import calibrate
from testing.ranks import run_on_ranks


def measured():
    calibrate.COPIED, calibrate.SQUARES = {"cpu": 1 << 16}, {"cpu": (16, 64)}
    return calibrate.calibrate(torch.device("cpu"))


def test_ranks_agree_on_what_was_measured():
    first, second = run_on_ranks(2, measured)
    assert first.nodes == second.nodes == 1 and first.ranks_per_node == second.ranks_per_node == 2
    assert (first.flops, first.memory_bandwidth) == (second.flops, second.memory_bandwidth)
    assert first.between is None
    assert 1e6 < first.inside.bandwidth < 1e12 and 0 < first.inside.latency < 0.1
    assert first.gather_inside > 0
