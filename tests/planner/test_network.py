"""Seconds of messages and collectives."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.planner.cluster import Efficiency, Link, named_cluster
from ds_lgamp.planner.hardware import Group, Network, group_of, network_of

IDEAL = Efficiency(inside=1, between=1, crowding=0)
FREE = Network(Link(100.0, 0.0), Link(10.0, 0.0), gpus=8, crowding=0)
groups = st.builds(Group, st.sampled_from([1, 2, 4, 8]), st.integers(1, 64))
sizes = st.floats(0, 1e9)


@pytest.mark.parametrize(
    ("size", "stride", "group"),
    [
        (8, 1, Group(8, 1)),
        (16, 1, Group(8, 2)),
        (4, 8, Group(1, 4)),
        (32, 2, Group(4, 8)),
        (2, 2, Group(2, 1)),
        (1, 64, Group(1, 1)),
    ],
)
def test_ranks_fill_a_node_before_the_next(size, stride, group):
    assert group_of(named_cluster("a100", 512), 512, size, stride) == group


@given(st.integers(1, 48), st.sampled_from([1, 2, 3, 4, 6, 8, 16]), st.integers(1, 6))
def test_groups_that_straddle_nodes_have_no_more_members_on_a_node_than_the_worst_of_them(size, stride, groups):
    gpus, per_node = size * stride * groups, 8
    group = group_of(named_cluster("a100", 512), gpus, size, stride)
    assert group.size == size
    for first in range(0, gpus, size * stride):
        nodes = Counter((first + member * stride) // per_node for member in range(size))
        assert group.inside <= min(nodes.values()) or group.nodes == 1 == len(nodes)
        assert group.nodes >= len(nodes)


def test_a_group_with_one_member_on_each_node_uses_no_link_inside():
    slow_inside = Network(Link(1.0, 0.0), Link(10.0, 0.0), 8, 1.0)
    assert slow_inside.bandwidth(Group(1, 4)) == 10 and slow_inside.bandwidth(Group(8, 4)) == 1


@given(groups, sizes)
def test_a_sum_is_a_reduce_scatter_and_a_gather(group, size):
    assert FREE.all_reduce(group, size) == pytest.approx(2 * FREE.all_gather(group, size))
    assert FREE.reduce_scatter(group, size) == FREE.all_gather(group, size)


def test_inside_a_node_each_member_sends_all_parts_but_one():
    assert FREE.all_gather(Group(4, 1), 400.0) == pytest.approx(3.0)


def test_members_on_one_node_use_their_shares_of_the_cards_together():
    assert FREE.all_gather(Group(1, 2), 400.0) == pytest.approx(20)
    # 7/8 of the bytes at 40 per second
    assert FREE.all_gather(Group(4, 2), 400.0) == pytest.approx(350 / 40)


def test_gpus_share_the_cards_of_their_node():
    fast, slow = (network_of(named_cluster(name, 16), 16, IDEAL) for name in ("a100-100gbit", "a100-10gbit"))
    assert fast.between.bandwidth == pytest.approx(100e9 / 8 / 8) == pytest.approx(10 * slow.between.bandwidth)
    alone = network_of(named_cluster("a100-100gbit", 1), 1, IDEAL)
    assert alone.between.bandwidth == pytest.approx(100e9 / 8)


def test_a_group_beside_others_of_its_node_is_slower_than_one_that_has_it_for_itself():
    cluster = named_cluster("a100", 8)
    alone, beside = (network_of(cluster, gpus, Efficiency(crowding=1)) for gpus in (2, 8))
    assert beside.bandwidth(Group(2, 1)) == pytest.approx(alone.bandwidth(Group(2, 1)) / 4)


def test_nothing_moves_in_a_group_of_one():
    for move in (FREE.all_gather, FREE.all_reduce, FREE.reduce_scatter):
        assert move(Group(1, 1), 1e9) == 0


@given(groups, sizes, st.floats(1, 3), st.sampled_from(["inside", "between"]))
def test_more_bandwidth_is_never_slower(group, size, factor, which):
    slow = network_of(named_cluster("a100", 512), 512, IDEAL)
    link = getattr(slow, which)
    fast = Network(**{**vars(slow), which: Link(link.bandwidth * factor, link.latency)})
    for move in ("all_gather", "all_reduce"):
        assert getattr(fast, move)(group, size) <= getattr(slow, move)(group, size)
    assert fast.message(True, size) <= slow.message(True, size)


def test_small_sums_over_many_nodes_take_a_tree():
    network = network_of(named_cluster("a100", 1024), 1024, IDEAL)
    group = Group(8, 128)
    assert network.all_reduce(group, 8) < network.all_gather(group, 8)
