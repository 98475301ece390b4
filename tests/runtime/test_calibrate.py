"""A calibration measures links where there are several ranks."""

import torch
import torch.distributed as dist

from ds_lgamp.runtime import node
from testing.ranks import run_on_ranks


def measured():
    node.COPIED, node.SQUARES = {"cpu": 1 << 16}, {"cpu": (16, 64)}
    return node.calibrate(torch.device("cpu"))


def test_ranks_agree_on_what_was_measured():
    first, second = run_on_ranks(2, measured)
    assert first.nodes == second.nodes == 1 and first.ranks_per_node == second.ranks_per_node == 2
    assert (first.flops, first.memory_bandwidth) == (second.flops, second.memory_bandwidth)
    assert first.between is None
    assert 1e6 < first.inside.bandwidth < 1e12 and 0 < first.inside.latency < 0.1
    assert first.gather_inside > 0


def test_a_host_is_measured_by_copies_and_updates(monkeypatch):
    monkeypatch.setattr(node, "COPIED", {"cpu": 1 << 16})
    monkeypatch.setattr(node, "UPDATED", 1 << 12)
    threads = torch.get_num_threads()
    found = node.host_rates(torch.device("cpu"))
    assert 1e6 < found.bus < 1e13 and 1e5 < found.memory_bandwidth < 1e13 and torch.get_num_threads() == threads


def measured_on_alternating_nodes():
    node.node_name = lambda: f"node {dist.get_rank() % 2}"
    pairs, link = [], node._link
    node._link = lambda first, second, device: pairs.append((first, second)) or link(first, second, device)
    return measured(), pairs


def test_ranks_may_go_round_nodes_of_unequal_sizes():
    """Ranks 0 and 2 are on one node, rank 1 on another."""
    for found, pairs in run_on_ranks(3, measured_on_alternating_nodes):
        assert (found.nodes, found.ranks_per_node) == (2, 2) and pairs == [(0, 2), (0, 1)]
        assert found.gather_inside > 0 and found.between is not None
