"""Measured nodes become islands."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_lgamp.planner.cluster import Link
from ds_lgamp.planner.islands import Node, cluster_text, islands_of, parse_islands

GBIT = 1e9 / 8


def node(name="n", gpus=2, network="ethernet", flops=1e12, interface="eth0"):
    return Node(name, gpus, network, flops, interface)


def links(sites, fast=GBIT, slow=GBIT / 10):
    """Returns links between nodes at ``sites``: ``fast`` between those at the same one."""
    return {
        frozenset(pair): Link(fast if sites[pair[0]] == sites[pair[1]] else slow, 1e-3)
        for pair in combinations(range(len(sites)), 2)
    }


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.floats(3, 100), st.randoms(use_true_random=False))
def test_nodes_at_a_site_are_an_island_at_any_rates_that_differ_and_scatter(sites, ratio, chance):
    several = [site for site in sites if sites.count(site) > 1]
    measured = {
        pair: Link(link.bandwidth * chance.uniform(0.85, 1.15), link.latency)
        for pair, link in links(sites, GBIT, GBIT / ratio).items()
    }
    found = islands_of([node() for _ in sites], measured)
    assert sorted(member for island in found for member in island) == list(range(len(sites)))
    for island in found:
        # Nodes alone at their sites have no fast link: such may share an island.
        assert len({sites[member] for member in island} & set(several)) <= 1
    for site in several:
        members = {number for number, own in enumerate(sites) if own == site}
        assert any(members <= set(island) for island in found)


@pytest.mark.parametrize("field", [{"network": "roce"}, {"gpus": 4}, {"flops": 2e12}], ids=str)
def test_different_nodes_are_no_island_however_fast_their_link(field):
    nodes = [node(), node(**field), node()]
    assert islands_of(nodes, links([0, 0, 0])) == [[0, 2], [1]]


def test_speeds_that_scatter_count_as_equal():
    assert islands_of([node(), node(flops=1.2e12)], links([0, 0])) == [[0, 1]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            node,
            gpus=st.sampled_from([1, 2]),
            network=st.sampled_from(["infiniband", "roce", "ethernet"]),
            flops=st.sampled_from([1e12, 3e12, None]),
            interface=st.sampled_from([None, "eth0", "ens3"]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.data(),
)
def test_what_is_written_can_be_read(nodes, data):
    nodes = [one._replace(name=f"n{number}") for number, one in enumerate(nodes)]
    rates = st.floats(1e5, 1e11)
    measured = {
        frozenset(pair): Link(data.draw(rates), data.draw(st.floats(1e-6, 1e-2)))
        for pair in combinations(range(len(nodes)), 2)
    }
    cluster = parse_islands(cluster_text(nodes, measured, data.draw(st.sampled_from([None, Link(1e11, 1e-6)]))))
    assert set(cluster.nodes) == {one.name for one in nodes}
    assert cluster.gpus == sum(one.gpus for one in nodes)
    for one in nodes:
        island = cluster.islands[cluster.nodes[one.name]]
        assert island.network == one.network and island.gpus_per_node == one.gpus


def test_a_file_names_rates_speeds_and_interfaces():
    nodes = [
        node("a0", network="infiniband"),
        node("a1", network="infiniband"),
        node("b0", flops=3e12, interface="ens3"),
        node("b1", flops=3e12, interface="ens3"),
    ]
    cluster = parse_islands(cluster_text(nodes, links([0, 0, 1, 1]), None))
    east, west = cluster.islands
    assert (east.speed, west.speed) == (1.0, 3.0) and cluster.peak == 1e12
    assert east.transport.nccl_network == "IB" and west.transport.nccl_network is None
    assert [cluster.outside(island).interface for island in (0, 1)] == ["eth0", "ens3"]
    assert cluster.transport.nccl_network == "Socket"
    assert east.link.bandwidth == pytest.approx(GBIT) and cluster.between.bandwidth == pytest.approx(GBIT / 10)
    assert not cluster.pairs


def test_pairs_of_islands_with_another_rate_are_listed():
    measured = links([0, 0, 1, 1, 2, 2])
    for pair in measured:
        if len(pair & {0, 1}) == 1 and pair & {4, 5}:
            measured[pair] = Link(GBIT / 100, 1e-2)
    cluster = parse_islands(cluster_text([node(f"n{number}") for number in range(6)], measured, None))
    assert list(cluster.pairs) == [frozenset((0, 2))]
    assert cluster.link(0, 2).bandwidth == pytest.approx(GBIT / 100)
    assert cluster.link(1, 2).bandwidth == pytest.approx(GBIT / 10)
