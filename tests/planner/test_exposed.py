"""What the network adds to a step."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_lgamp.cost.assignment import Demand
from ds_lgamp.planner.assign import assign
from ds_lgamp.planner.island_search import exposed
from ds_lgamp.planner.load import load
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.spec import Hierarchy, ProgramSpec
from tests.planner.islands import cluster, island

SPEC = ProgramSpec(place_chunks("modular", 4, 2), "layered", 4, 4, zero_stage=3, resident_chunks=2, recomputes=False)
DEMAND = Demand(2, 2, 1, data_bytes=(10**8, 10**8), hop_bytes=(8 * 10**5, 4 * 10**5))
PARAMETERS = [10**6] * 4


def times(spec=SPEC, demand=DEMAND, flops=(10**9,) * 4, peak="1 TFLOP/s", **fields):
    made = cluster(island("east", 2, 1), island("west", 2, 1), **({"peak": peak} if peak else {}), **fields)
    return exposed(made, assign(made, DEMAND), demand, spec, PARAMETERS, flops)


def test_collectives_alone_take_as_long_as_their_bytes_and_rounds():
    """One pipeline rank, one chunk at a time: nothing overlaps but the two directions of the links."""
    spec = ProgramSpec((0, 0), "layered", 1, 1, zero_stage=3, resident_chunks=1)
    demand = Demand(1, 2, 1, (10**8,), (0,))
    one = cluster(island("east", 2, 1))
    found = exposed(one, assign(one, demand), demand, spec, [1, 1], [None, None])
    collectives = 2 * 2 - 1 + 2
    assert found.network == pytest.approx(1e8 / (1e9 / 8) + collectives * 1e-4, rel=0.2)
    assert found.step is None and found.exposed is None


def test_with_hierarchical_shards_the_slow_network_carries_what_peers_send():
    """Two chunks of two islands of two ranks. Each chunk's gathers and reduction stay inside; a gather and a sum of it
    go between."""
    made, hierarchy = cluster(island("east", 2, 1), island("west", 2, 1)), Hierarchy(2, replicated=False)
    spec = ProgramSpec((0, 0), "layered", 1, 1, zero_stage=3, resident_chunks=1, hierarchy=hierarchy)
    alike = Demand(1, 4, 1, (10**8,), (0,))
    nodes = replace(alike, hierarchy=hierarchy, peer_bytes=(10**7,))
    plain, found = (
        exposed(made, assign(made, demand), demand, own, [1, 1], [None, None]).network
        for demand, own in ((alike, replace(spec, hierarchy=None)), (nodes, spec))
    )
    near, between = 9e7 / (1e9 / 8), 1e7 / (1e8 / 8)
    assert max(near, between) < found < near + between + 0.1
    assert plain > 1e8 / (1e8 / 8)


def test_long_compute_hides_most_of_the_network():
    short, long = times(peak="1000 TFLOP/s"), times(peak="1 GFLOP/s")
    assert short.exposed == pytest.approx(short.network, rel=0.05)
    assert long.exposed < 0.7 * long.network
    assert long.step > 4 * 4 * 3 / 2


def test_without_a_peak_or_operations_only_the_network_is_known():
    for unknown in (times(peak=None), times(flops=(None, 1, 1, 1))):
        assert unknown.step is None and unknown.network == times().network


def test_a_slow_island_computes_longer():
    made = [cluster(island("east", 2, 1), island("west", 2, 1, speed=speed), peak="1 GFLOP/s") for speed in (1.0, 0.5)]
    steps = [exposed(one, assign(one, DEMAND), DEMAND, SPEC, PARAMETERS, (10**9,) * 4).step for one in made]
    assert steps[1] > 1.5 * steps[0]


def test_latency_of_the_slow_network_counts_for_every_hop_that_nothing_hides():
    pair = {"islands": ["east", "west"], "bandwidth": "100 Mbit/s"}
    silent, one = replace(DEMAND, data_bytes=(0, 0)), replace(SPEC, micro_batches=1, micro_batch_group=1)
    near, far = (times(one, silent, pairs=[{**pair, "latency": latency}]) for latency in ("1 ms", "101 ms"))
    # The micro-batch crosses three borders forwards and three backwards.
    assert far.network - near.network == pytest.approx(6 * 0.1, rel=0.05)


HIERARCHY = Hierarchy(2, replicated=False)
BY_NODES = replace(SPEC, placement=(0,) * 4, hierarchy=HIERARCHY, defers_gathers=True, updates="next_step")


def test_shards_of_nodes_send_between_islands_what_peers_send():
    """Two islands of a node each, which have fast links inside."""
    made = cluster(island("east", 1, 2), island("west", 1, 2))
    everywhere = Demand(1, 4, 1, (10**8,), (0,))
    by_nodes = replace(everywhere, hierarchy=HIERARCHY, peer_bytes=(10**7,))
    moved = [load(made, assign(made, demand), demand).bytes_sent for demand in (everywhere, by_nodes)]
    # One ring of four ranks crosses to the other island and back. Two rings of peers cross with all that they carry.
    assert [sent["between"] for sent in moved] == [2 * 10**8, 4 * 10**7]
    assert moved[1]["node"] == 4 * 9 * 10**7
    slow, fast = (
        exposed(made, assign(made, demand), demand, spec, PARAMETERS, [None] * 4).network
        for demand, spec in ((everywhere, replace(BY_NODES, hierarchy=None)), (by_nodes, BY_NODES))
    )
    bandwidth, latency = 1e8 / 8, 5e-3
    # The cards of a node carry what both its ranks send to peers. Of 4 refreshes and 4 sums each waits for one message.
    assert fast == pytest.approx(2 * 10**7 / bandwidth + 8 * latency, rel=0.3)
    assert slow > 10**8 / bandwidth > 3 * fast


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 4), st.sampled_from(["layered", "1f1b"]), st.integers(0, 3), st.integers(0, 10**9)
)
def test_the_network_adds_no_more_than_it_takes_alone(ranks, micro_batches, schedule, stage, size):
    chunks = ranks if schedule == "1f1b" else 2 * ranks
    spec = ProgramSpec(place_chunks("modular", chunks, ranks), schedule, micro_batches, micro_batches, stage, 2)
    made = cluster(island("east", ranks, 1), island("west", ranks, 1), peak="1 GFLOP/s")
    demand = Demand(ranks, 2, 1, (size,) * ranks, (size // 10,) * ranks)
    found = exposed(made, assign(made, demand), demand, spec, [1] * chunks, [10**8] * chunks)
    assert -1e-9 <= found.exposed <= found.network * (1 + 1e-6) + 1e-9
