"""What links carry, compared with the planner's network of alike nodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.cost.assignment import Demand
from ds_lgamp.planner.assign import as_launched
from ds_lgamp.planner.cluster import Link
from ds_lgamp.planner.hardware import Group, Network
from ds_lgamp.planner.load import hop_of, ring
from tests.planner.islands import TWO, cluster, island

GBIT = 1e9 / 8


@given(st.sampled_from([1, 2, 4]), st.sampled_from([2, 4]), st.integers(1, 10**9))
def test_one_island_takes_as_long_as_the_planners_ring(inside, nodes, size):
    """Groups of ``inside`` GPUs on each of ``nodes`` nodes with four GPUs."""
    data_ranks = inside * nodes
    one = cluster(island("all", nodes, 4))
    pipeline_ranks = 4 // inside
    # Data-parallel neighbours share a node, as in the planner's groups.
    slots = [slot for rank in range(pipeline_ranks) for slot in one.slots if slot.gpu // inside == rank]
    demand = Demand(pipeline_ranks, data_ranks, 1, (size,) * pipeline_ranks, (0,) * pipeline_ranks)
    network = Network(Link(float("inf"), 0.0), Link(GBIT / 4, 0.0), gpus=4, crowding=0.0)
    # A ring's member sends what a gather of size * n / (n - 1) bytes sends.
    whole = size * data_ranks / (data_ranks - 1)
    seconds = network.all_gather(Group(inside, nodes), whole)
    assert as_launched(one, demand, slots).seconds["island"] == pytest.approx(seconds)


def test_a_ring_visits_all_ranks_of_a_node_before_the_next_node():
    alternating = TWO.slots[0::2] + TWO.slots[1::2]
    found = as_launched(TWO, Demand(1, 8, 1, (1,), (0,)), alternating)
    nodes = [found.slots[rank].node for rank in ring(found, found.data_group(0))]
    assert nodes == sorted(nodes)
    assert found.bytes_sent == {"node": 4, "island": 2, "between": 2}


def test_gpus_of_a_node_have_a_link_each():
    inside = {"bandwidth": "1 GB/s", "latency": "1 us"}
    one = cluster(island("all", 1, 4), inside=inside)
    demand = Demand(1, 4, 1, (10**9,), (0,))
    assert as_launched(one, demand, one.slots).seconds == {"node": 1.0, "island": 0.0, "between": 0.0}


def test_messages_of_one_pipeline_rank_go_nowhere():
    demand = Demand(1, 8, 1, (0,), (10**9,))
    assert sum(as_launched(TWO, demand, TWO.slots).bytes_sent.values()) == 0


def test_nodes_of_an_island_share_its_uplink():
    """Each of two nodes sends 100 MB to the other island, over 100 Mbit/s of its own."""
    demand = Demand(2, 2, 1, (0, 0), (10**8, 0))
    alone, shared = (
        as_launched(made, demand, made.slots).seconds["between"]
        for made in (
            cluster(island("east", 2, 1, **uplink), island("west", 2, 1)) for uplink in ({}, {"uplink": "50 Mbit/s"})
        )
    )
    assert alone == pytest.approx(1e8 / (1e8 / 8)) and shared == pytest.approx(2e8 / (5e7 / 8))


def test_a_pipeline_with_fewer_micro_batches_sends_less():
    two = cluster(island("east", 2, 1), island("west", 2, 1))
    demand = Demand(2, 2, 1, (0, 0), (800, 0), micro_batch_shares=(6, 2))
    found = as_launched(two, demand, two.slots)
    # Results go there and gradients come back.
    assert found.bytes_sent["between"] == 2 * (800 + round(800 * 2 / 6))
    # Over the uplink of their island both together take less than twice as long as the first one.
    narrow = cluster(island("east", 2, 1, uplink="100 Mbit/s"), island("west", 2, 1))
    link = hop_of(narrow, as_launched(narrow, demand, narrow.slots), demand, 0, 1)
    assert link.bandwidth == pytest.approx(1e8 / 8 / (1 + 2 / 6))
