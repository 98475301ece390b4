"""The search looks at every way to train, and returns the best of them."""

from dataclasses import replace
from itertools import product
from time import process_time

import pytest

from ds_lgamp.cli.plan_search import reasons
from ds_lgamp.planner.candidates import candidates, divisors
from ds_lgamp.planner.cluster import named_cluster
from ds_lgamp.planner.memory import memory
from ds_lgamp.planner.models import read_model
from ds_lgamp.planner.predict import bandwidth_needed, predict, scaled, seconds_over_bandwidth, with_bandwidth
from ds_lgamp.planner.search import NothingFits, best_by_method, search
from ds_lgamp.planner.work import exact_seconds
from ds_lgamp.planner.write import method_of
from tests.slow import slow_except

MODEL = read_model("llama-8b")
CLUSTER = named_cluster("a100-25gbit", 16)
SMALL = read_model("gpt2")
THIN = replace(MODEL, layers=8)


def whole(configuration):
    """Whether backwards have one part."""
    return not configuration.split_backward


@pytest.fixture(scope="module")
def plans():
    return search(MODEL, CLUSTER, 32, best=5)


def test_candidates_use_the_whole_cluster_and_the_whole_batch():
    found = list(candidates(MODEL, CLUSTER, 32))
    assert len(found) == len(set(found)) > 100
    assert {one.gpus for one in found} == {16} and {one.sequences for one in found} == {32}
    assert {method_of(one) for one in found} == {"1f1b", "interleaved_1f1b", "layered", "ZeRO-2", "ZeRO-3"}
    assert {one.zero_stage for one in found} == {0, 1, 2, 3} and {one.recompute for one in found} == {"full", "none"}


@pytest.mark.parametrize(
    ("objective", "gpus"), slow_except([("time", 4)], [*product(("time", "memory"), (4, 8))], several=True)
)
def test_no_candidate_that_fits_is_better_than_the_best_plan_of_its_method(objective, gpus):
    node = named_cluster("a100-25gbit", gpus)
    best = best_by_method(search(SMALL, node, 2 * gpus, objective))
    for one in candidates(SMALL, node, 2 * gpus):
        needed = memory(SMALL, one)
        if needed.fits(node):
            if objective == "time":
                assert predict(SMALL, node, one, on_clock=True).seconds >= best[method_of(one)].prediction.seconds
            else:
                assert needed.total >= best[method_of(one)].memory.total


def test_layered_plans_take_the_clocks_seconds_and_their_parts_add_up():
    """Two nodes also have plans with shards of nodes, and two GPUs plans with state on the host."""
    for model, cluster, sequences in ((SMALL, CLUSTER, 32), (MODEL, named_cluster("a100-25gbit", 2), 8)):
        plans = search(model, cluster, sequences, best=5)
        layered = [
            plan
            for plan in plans
            if plan.configuration.schedule == "layered" and not plan.configuration.micro_batch_outer
        ]
        assert layered
        for plan in layered:
            exact = exact_seconds(model, cluster, plan.configuration)
            assert plan.prediction.seconds == pytest.approx(exact, rel=1e-9)
            assert plan.dollars == pytest.approx(exact * plan.configuration.gpus * cluster.price, rel=1e-9)
            assert min(plan.prediction.parts.values()) >= 0


@pytest.mark.parametrize(
    ("model", "cluster", "sequences", "suits", "tried"),
    [
        (THIN, "h100-100gbit", 16, whole, ("MOST_CLOCKED", 0)),
        (SMALL, "h100-10gbit", 32, whole, ("MOST_WITH_NODES", 1)),
        (SMALL, "h100-10gbit", 32, lambda _: True, ("MOST_IN_PARTS", 0)),
    ],
    ids=["on the clock", "with shards of nodes", "with backwards in two parts"],
)
def test_what_is_tried_beyond_the_formula_finds_faster_plans(monkeypatch, model, cluster, sequences, suits, tried):
    found = search(model, named_cluster(cluster, 16), sequences, best=1, suits=suits)[0]
    monkeypatch.setattr(f"ds_lgamp.planner.search.{tried[0]}", tried[1])
    without = search(model, named_cluster(cluster, 16), sequences, best=1, suits=suits)[0]
    assert found.prediction.seconds < without.prediction.seconds


def test_the_best_plan_does_not_depend_on_how_many_are_returned():
    """Shards of nodes are tried for as many layouts, and so are backwards in two parts."""
    slow = named_cluster("h100-10gbit", 16)
    for suits in (whole, lambda _: True):
        (one, *_), several = (search(SMALL, slow, 32, best=best, suits=suits) for best in (1, 10))
        assert one == several[0]


def test_a_plan_that_suits_is_the_best_of_those(plans):
    def alone(configuration):
        return configuration.tensor_ranks == configuration.pipeline_ranks == 1

    found = search(MODEL, CLUSTER, 32, best=3, suits=alone)
    assert all(alone(plan.configuration) for plan in found)
    assert found[0].prediction.seconds >= plans[0].prediction.seconds


def test_plans_are_sorted_and_the_best_of_every_method_follows(plans):
    seconds = [plan.prediction.seconds for plan in plans[:5]]
    assert seconds == sorted(seconds)
    assert {"layered", "1f1b", "ZeRO-3"} <= best_by_method(plans).keys()
    assert all(plan.memory.fits(CLUSTER) for plan in plans)


def test_cost_may_leave_nodes_unused():
    node = named_cluster("a100-25gbit", 2)
    (cheapest, *_), (fastest, *_) = (search(SMALL, node, 8, objective, best=5) for objective in ("cost", "time"))
    assert cheapest.dollars < fastest.dollars and cheapest.prediction.seconds > fastest.prediction.seconds
    assert cheapest.configuration.gpus < node.gpus
    with pytest.raises(ValueError, match="price is missing in the cluster"):
        search(MODEL, replace(CLUSTER, price=None), 32, "cost")


def test_what_does_not_fit_is_told_with_what_is_missing():
    with pytest.raises(
        NothingFits, match=r"nothing fits: .* needs \S+ GB per GPU, \S+ GB more than there are; most is"
    ):
        search(MODEL, replace(named_cluster("a100", 2), memory=1e9), 4)
    with pytest.raises(NothingFits, match="batch_size is 7: no layout of 16 GPUs"):
        search(replace(MODEL, layers=1), named_cluster("a100", 16), 7)
    with pytest.raises(ValueError, match="objective is 'speed'; use one of time, cost, memory"):
        search(MODEL, CLUSTER, 32, "speed")


def test_at_the_bandwidth_that_is_needed_a_step_loses_what_is_asked(plans):
    configuration = best_by_method(plans)["ZeRO-3"].configuration
    needed = bandwidth_needed(MODEL, CLUSTER, configuration, 0.05)
    ideal, told = seconds_over_bandwidth(MODEL, CLUSTER, configuration, [1e13, needed])
    assert told / ideal == pytest.approx(1.05, abs=0.004)
    assert predict(MODEL, with_bandwidth(CLUSTER, needed / 2), configuration).seconds > told
    inside = replace(configuration, data_ranks=8, tensor_ranks=1)
    assert bandwidth_needed(MODEL, CLUSTER, inside) is None, "one node needs no network"


def test_the_step_over_the_bandwidth_of_a_layered_plan_goes_through_the_seconds_of_the_plan(plans):
    plan = best_by_method(plans)["layered"]
    (told,) = seconds_over_bandwidth(MODEL, CLUSTER, plan.configuration, [CLUSTER.between.bandwidth])
    assert told == pytest.approx(plan.prediction.seconds, rel=1e-12)
    assert predict(MODEL, CLUSTER, plan.configuration).seconds != pytest.approx(told, rel=0.001)


def test_reasons_name_the_other_method_and_the_largest_loss(plans):
    against, limit = reasons(plans)
    best, other, *_ = best_by_method(plans).values()
    assert against.startswith(f"{best.method} takes") and other.method in against
    assert "MFU" in limit
    (alone,) = reasons(plans[:1])
    assert alone == limit


@pytest.mark.parametrize("longer", [1.0, 1.004])
def test_plans_as_fast_as_each_other_are_not_told_apart(longer, plans):
    best, other, *_ = best_by_method(plans).values()
    close = replace(other, prediction=scaled(best.prediction, longer * best.prediction.seconds))
    sentence, _ = reasons([best, close])
    assert sentence == f"{best.method} takes about as long as the best plan with {other.method}."


def test_divisors_are_ascending():
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36] and divisors(1) == [1]


@pytest.mark.timing
def test_a_trillion_parameters_on_10240_gpus_take_less_than_a_minute_of_one_core():
    begin = process_time()
    plans = search(read_model("megatron-1t"), named_cluster("a100", 10240), 5120)
    assert process_time() - begin < 60
    assert plans[0].configuration.gpus == 10240
