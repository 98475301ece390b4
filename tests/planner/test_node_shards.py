"""The planner knows shards of nodes: their times, their memory, when they pay, and how to ask for them."""

from dataclasses import replace

import pytest

from ds_lgamp.planner.cluster import Cluster, Efficiency, Link
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.hardware import Group, network_of
from ds_lgamp.planner.memory import batch_bytes, default_software, followed, memory
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.predict import predict
from ds_lgamp.planner.search import search
from ds_lgamp.planner.work import Work, exact_seconds
from ds_lgamp.planner.write import describe, ds_config
from ds_lgamp.schedule.spec import Hierarchy

MODEL = Model.gpt("medium", 16, 2048, 16, 1024, 50304)
PLAIN = Configuration(8, 1, 1, 1, 4, zero_stage=3, schedule="layered", chunks_per_rank=16)
REFRESHED, REPLICATED = (replace(PLAIN, hierarchy=Hierarchy(4, replicated)) for replicated in (False, True))


def cluster(between, memory=80e9):
    """Two nodes of four GPUs."""
    return Cluster("here", 2, 4, 300e12, memory, 2e12, Link(200e9, 5e-6), Link(between, 1e-5))


def test_what_travels_between_nodes_is_one_nth_of_a_chunk():
    here = cluster(1e9)
    network = network_of(here, 8, Efficiency())
    moved = Work(MODEL, here, REFRESHED).collectives(2e9)
    node, peers = Group(4, 1), Group(1, 2)
    assert moved.gather == network.all_gather(node, 4e9) and moved.reduce == network.reduce_scatter(node, 4e9)
    assert moved.refresh == moved.combine == network.all_gather(peers, 1e9)
    moved = Work(MODEL, here, REPLICATED).collectives(2e9)
    assert (moved.refresh, moved.combine) == (0, network.all_reduce(peers, 1e9))
    assert Work(MODEL, here, PLAIN).collectives(2e9).combine == 0


def test_on_a_slow_network_between_nodes_a_step_is_shorter_and_the_clock_agrees():
    slow = cluster(1e9)
    plain = predict(MODEL, slow, PLAIN).seconds
    for of in (REFRESHED, REPLICATED):
        seconds = predict(MODEL, slow, of).seconds
        assert seconds < 0.8 * plain
        assert seconds == pytest.approx(exact_seconds(MODEL, slow, of), rel=1e-9)


def test_memory_is_that_of_the_program_and_grows_from_no_nodes_to_replicas():
    totals = []
    for of in (PLAIN, REFRESHED, REPLICATED):
        software = default_software(of)
        told = memory(MODEL, of)
        right = followed(MODEL, of, 0, software).peak + batch_bytes(MODEL, of, software)
        assert told.total == pytest.approx(right, rel=0.03)
        totals.append((told.weights, told.optimizer_state, told.total))
    (weights, state, least), (kept, same, more), (also, double, most) = totals
    assert (kept, also, same, double) == (2 * weights, 2 * weights, state, 2 * state) and least < more < most


def test_the_search_returns_the_best_of_them_if_they_fit():
    """Pipelines across the slow network may be faster still."""
    slow = cluster(1e9)
    found = {plan.method: plan for plan in search(replace(MODEL, layers=2), slow, 8, best=1)}
    for method, key in (("layered hpZ", "zero_hpz_partition_size"), ("layered MiCS", "mics_shard_size")):
        of = found[method].configuration
        ranks = of.hierarchy.node_ranks
        assert ranks * of.tensor_ranks == 4 and f"shards of {ranks} ranks" in describe(of)
        assert ds_config(MODEL, of)["zero_optimization"] == {"stage": 3, key: ranks}
        alone = predict(replace(MODEL, layers=2), slow, replace(of, hierarchy=None)).seconds
        assert found[method].prediction.seconds < alone
    kinds = sorted(("layered hpZ", "layered MiCS"), key=lambda method: found[method].memory.total)
    tight = replace(slow, memory=found[kinds[0]].memory.total)
    plans = search(replace(MODEL, layers=2), tight, 8, best=1)
    assert kinds[0] in {plan.method for plan in plans} and all(plan.memory.fits(tight) for plan in plans)
    assert not found[kinds[1]].memory.fits(tight)


def test_files_ask_for_them_by_deepspeeds_keys():
    assert ds_config(MODEL, REFRESHED)["zero_optimization"] == {"stage": 3, "zero_hpz_partition_size": 4}
    assert ds_config(MODEL, REPLICATED)["zero_optimization"] == {"stage": 3, "mics_shard_size": 4}
    assert ds_config(MODEL, PLAIN)["zero_optimization"] == {"stage": 3}


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_nodes_that_do_not_divide_the_data_ranks_are_refused(ranks):
    with pytest.raises(ValueError, match=f"hierarchy.node_ranks is {ranks}; use a divisor of the 8 data_ranks"):
        replace(PLAIN, hierarchy=Hierarchy(ranks, False))
