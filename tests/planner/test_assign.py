"""Which GPU becomes which rank."""

from dataclasses import replace
from time import process_time

import pytest
from hypothesis import given, settings

from ds_lgamp.cost.assignment import Demand, Slot
from ds_lgamp.planner.assign import as_launched, assign, ranked
from ds_lgamp.schedule.spec import Hierarchy
from tests.planner.islands import TWO, cluster, island, jobs

PARAMETERS = Demand(2, 4, 1, data_bytes=(10**8, 10**8), hop_bytes=(10**6, 0))
ACTIVATIONS = Demand(2, 4, 1, data_bytes=(10**6, 10**6), hop_bytes=(10**8, 0))


def names(assignment, ranks):
    return [assignment.slots[rank].node for rank in ranks]


def test_data_parallel_groups_stay_in_islands_if_parameters_are_most_of_the_bytes():
    found = assign(TWO, PARAMETERS)
    assert found.data_group_kinds == ("island", "island") and found.hop_kinds == ("between", "between")
    assert names(found, found.data_group(0)) == ["east-0", "east-0", "east-1", "east-1"]


def test_pipelines_stay_on_nodes_if_activations_are_most_of_the_bytes():
    found = assign(TWO, ACTIVATIONS)
    assert found.hop_kinds == ("node", "node") and found.data_group_kinds == ("between", "between")


def test_the_busiest_link_decides_the_seconds():
    found = assign(TWO, PARAMETERS)
    # Inside an island a ring of four sends 10^8 bytes from node to node, and the other way round from the other node.
    assert found.seconds["island"] == pytest.approx(1e8 / (1e9 / 8))
    # Two pipelines leave each node. The gradients come back at the same time.
    assert found.seconds["between"] == pytest.approx(2 * 1e6 / (1e8 / 8))
    assert found.bytes_sent == {"node": 4 * 10**8, "island": 4 * 10**8, "between": 4 * 2 * 10**6}


def test_the_order_that_a_plan_has_chosen_comes_first():
    cheapest, *others = ranked(TWO, PARAMETERS)
    for other in others:
        assert assign(TWO, replace(PARAMETERS, order=other.order)).slots == other.slots
    assert assign(TWO, replace(PARAMETERS, order="of another cluster")).slots == cheapest.slots


@pytest.mark.parametrize("replicated", [False, True])
def test_with_hierarchical_shards_only_what_peers_send_crosses_islands(replicated):
    """One pipeline rank of eight data-parallel ranks. Each sends 10^8 bytes, 10^6 of them to its peer."""
    demand = Demand(1, 8, 1, (10**8,), (0,), hierarchy=Hierarchy(4, replicated), peer_bytes=(10**6,))
    found = assign(TWO, demand)
    assert found.bytes_sent == {"node": 4 * 99 * 10**6, "island": 4 * 99 * 10**6, "between": 8 * 10**6}
    # Two GPUs of a node send to their peers at once.
    assert found.seconds["between"] == pytest.approx(2 * 1e6 / (1e8 / 8))


def test_a_node_of_hierarchical_shards_stays_in_an_island():
    """Each island has room for three pipelines, so that one of three groups of two data-parallel ranks would cross."""
    odd = cluster(island("east", 3), island("west", 3))
    alike = Demand(2, 6, 1, data_bytes=(10**6, 10**6), hop_bytes=(10**8, 0))
    assert assign(odd, alike).data_group_kinds == ("between", "between")
    nodes = replace(alike, hierarchy=Hierarchy(2, replicated=False), peer_bytes=(10**5, 10**5))
    assert assign(odd, nodes).data_group_kinds == ("island", "island")


def test_cards_share_what_leaves_a_node():
    doubled = cluster(*(island(name, cards_per_node=2) for name in ("east", "west")))
    assert assign(doubled, PARAMETERS).seconds["island"] == pytest.approx(1e8 / (2e9 / 8))


def test_the_order_of_islands_avoids_the_slowest_pair():
    islands = [island(name, 1, 1) for name in "abc"]
    demand = Demand(3, 1, 1, data_bytes=(0, 0, 0), hop_bytes=(10**6, 10**6, 0))
    slow = {"islands": ["a", "b"], "bandwidth": "10 Mbit/s", "latency": "5 ms"}
    found = assign(cluster(*islands, pairs=[slow]), demand)
    assert names(found, found.pipeline(0)) == ["a-0", "c-0", "b-0"]


def test_gpus_of_one_speed_share_a_rank_where_bytes_leave_the_choice():
    unlike = cluster(island("slow", speed=1.0), island("fast", speed=2.0))
    free = Demand(2, 4, 1, data_bytes=(0, 0), hop_bytes=(0, 0), compute=1.0)
    found = assign(unlike, free)
    assert sorted(found.pipeline_speeds) == [1.0, 2.0] or sorted(found.data_speeds) == [1.0, 1.0, 2.0, 2.0]
    mixed = as_launched(unlike, free, unlike.slots[0::2] + unlike.slots[1::2])
    assert mixed.pipeline_speeds == (1.0, 1.0) and mixed.data_speeds == (1.0, 1.0, 2.0, 2.0)


def test_compute_that_is_divided_by_speed_may_outweigh_messages():
    """Two slow GPUs hold up half of the pipeline ranks, but only one of four data-parallel ranks."""
    unlike = cluster(island("slow", 1, speed=1.0), island("fast", 3, speed=2.0))
    assert assign(unlike, PARAMETERS).pipeline_speeds == (1.0, 2.0)
    assert assign(unlike, replace(PARAMETERS, compute=1000.0)).data_speeds == (1.0, 2.0, 2.0, 2.0)


def test_the_first_place_stays_rank_0_where_a_launcher_needs_it():
    for first in TWO.slots:
        found = assign(TWO, PARAMETERS, first)
        assert found.slots[0] == first and found.data_group_kinds == ("island", "island")
        for pipeline_rank in (0, 1):
            on_nodes = names(found, found.data_group(pipeline_rank))
            assert on_nodes[0] == on_nodes[1] and on_nodes[2] == on_nodes[3]


def test_of_many_islands_any_may_have_rank_0():
    """Every process of a job asks for this when it starts."""
    many, demand = twelve_islands()
    assert assign(many, demand, many.slots[-1]).slots[0] == many.slots[-1]


@pytest.mark.timing
def test_many_islands_are_assigned_in_seconds():
    many, demand = twelve_islands()
    began = process_time()
    assign(many, demand, many.slots[-1])
    assert process_time() - began < 5


def twelve_islands():
    islands = [island(f"island{number}", 1, 1) for number in range(12)]
    return cluster(*islands), Demand(12, 1, 1, data_bytes=(0,) * 12, hop_bytes=(10**6,) * 12)


@settings(max_examples=40, deadline=None)
@given(jobs())
def test_every_gpu_is_one_rank_and_no_order_is_cheaper_than_the_chosen_one(job):
    made, demand = job
    found = assign(made, demand)
    assert sorted(found.slots) == sorted(made.slots)
    assert found == assign(made, demand)
    chosen = sum(found.seconds.values())
    assert all(chosen <= sum(other.seconds.values()) * (1 + 1e-9) for other in ranked(made, demand))
    assert chosen <= sum(as_launched(made, demand, made.slots).seconds.values()) * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(jobs())
def test_tensor_parallel_ranks_share_a_node(job):
    made, demand = job
    for found in ranked(made, demand):
        for first in range(0, found.ranks, demand.tensor_ranks):
            assert found.kind(range(first, first + demand.tensor_ranks)) == "node"


@settings(max_examples=25, deadline=None)
@given(jobs())
def test_bytes_do_not_depend_on_the_order(job):
    made, demand = job
    totals = {sum(found.bytes_sent.values()) for found in ranked(made, demand)}
    assert len(totals) == 1


@settings(max_examples=25, deadline=None)
@given(jobs())
def test_groups_and_speeds_are_those_of_their_slots(job):
    made, demand = job
    found = assign(made, demand)
    speeds = {slot: made.islands[slot.island].speed for slot in made.slots}
    for rank, speed in enumerate(found.pipeline_speeds):
        width = demand.data_ranks * demand.tensor_ranks
        assert speed == min(speeds[slot] for slot in found.slots[rank * width : (rank + 1) * width])
    for rank, speed in enumerate(found.data_speeds):
        ranks = [one for tensor in range(demand.tensor_ranks) for one in found.pipeline(rank, tensor)]
        assert speed == min(speeds[found.slots[one]] for one in ranks)


def test_a_job_that_does_not_fill_the_cluster_is_refused():
    with pytest.raises(ValueError, match="2 pipeline x 2 data-parallel x 1 .* are 4, but cluster has 8 GPUs"):
        assign(TWO, replace(PARAMETERS, data_ranks=2))
    with pytest.raises(ValueError, match="4 tensor-parallel ranks share a node, but .* of island 'east' is 2"):
        assign(TWO, Demand(2, 1, 4, (0, 0), (0, 0)))


def test_transports_follow_the_ranks_of_a_group():
    west = island("west", outside_interface="eth9", nccl_network="IB")
    found = assign(cluster(island("east", interface="ib0"), west), PARAMETERS)
    east, other = found.data_group(0), found.data_group(1)
    assert found.transport(east).interface == "ib0" and found.transport(other).nccl_network == "IB"
    assert found.transport([east[0], east[1]]) is None
    assert found.transport([other[0], *east]).interface == "eth9"
    assert found.slots[0] == Slot(0, "east-0", 0)
