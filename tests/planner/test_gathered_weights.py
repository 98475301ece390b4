"""The planner knows gathered weights that wait on the host: their time, their memory, when they pay, and how to ask for
them."""

from dataclasses import replace

import pytest

from ds_lgamp.planner.cluster import Cluster, Host, Link
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.memory import memory
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.predict import predict
from ds_lgamp.planner.search import search
from ds_lgamp.planner.work import Work, exact_seconds
from ds_lgamp.planner.write import ds_config, method_of

MODEL = Model.gpt("medium", 16, 2048, 16, 1024, 50304)
PLAIN = Configuration(4, 1, 1, 1, 4, zero_stage=3, schedule="layered", chunks_per_rank=16)
STORING = replace(PLAIN, stores_weights=True)
METHOD = "layered, gathered weights on the host"


def cluster(between, memory=8e9, bus=25e9):
    """Four nodes of one GPU."""
    return Cluster("here", 4, 1, 300e12, memory, 2e12, Link(200e9, 5e-6), Link(between, 1e-5), host=Host(bus=bus))


def test_on_a_slow_network_a_step_is_shorter_by_the_second_gathers():
    slow = cluster(1e9)
    plain, storing = (predict(MODEL, slow, of) for of in (PLAIN, STORING))
    assert storing.seconds == pytest.approx(exact_seconds(MODEL, slow, STORING), rel=1e-9)
    gathers = sum(Work(MODEL, slow, PLAIN).costs().gather[:-2])
    assert plain.seconds - gathers == pytest.approx(storing.seconds, rel=0.1)


def test_the_bus_copies_whole_chunks():
    costs = Work(MODEL, cluster(1e9), STORING).costs()
    assert costs.weights[1] == pytest.approx(
        4 * Work(MODEL, cluster(1e9), replace(STORING, offload="optimizer")).costs().load[1]
    )
    assert not Work(MODEL, cluster(1e9), PLAIN).costs().weights


def test_the_host_holds_the_chunks_that_are_gathered_again():
    plain, storing = memory(MODEL, PLAIN), memory(MODEL, STORING)
    assert plain.host == 0 and storing._replace(host=0) == plain
    assert storing.host == pytest.approx(2 * 14 / 16 * MODEL.layers * MODEL.layer_parameters, rel=0.15)


def test_a_search_proposes_it_where_the_bus_is_faster():
    """Among plans without pipelines, which need stage 3 here."""

    def best(bus):
        found = search(MODEL, cluster(1e9, bus=bus), 16, best=1, suits=lambda one: one.pipeline_ranks == 1)
        return next(plan.configuration for plan in found if plan.configuration.zero_stage == 3)

    assert method_of(best(25e9)) == METHOD
    assert not best(1e8).stores_weights


def test_the_block_asks_for_it():
    assert ds_config(MODEL, STORING)["ds_lgamp"]["regather"] == "host"
    assert "regather" not in ds_config(MODEL, PLAIN)["ds_lgamp"]


@pytest.mark.parametrize("changes", [{"zero_stage": 2}, {"schedule": "1f1b", "chunks_per_rank": 1}])
def test_impossible_ways_are_refused(changes):
    with pytest.raises(ValueError, match="stores_weights is True"):
        replace(STORING, **changes)


def test_a_search_adds_no_copies_that_do_not_suit():
    plans = search(MODEL, cluster(1e9), 16, suits=lambda one: one.pipeline_ranks == 1 and not one.stores_weights)
    assert plans and not any(plan.configuration.stores_weights for plan in plans)
