"""The planner knows backwards in two parts: their time on the clock, their memory, when they pay, and how to ask for
them."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ds_lgamp.config import LgampConfig
from ds_lgamp.planner.activations import chunk_bytes_of
from ds_lgamp.planner.candidates import ways_to_split
from ds_lgamp.planner.cluster import Cluster, Link
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.memory import default_software, memory
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.predict import predict
from ds_lgamp.planner.search import Plan, search
from ds_lgamp.planner.work import Work, exact_seconds
from ds_lgamp.planner.write import ds_config, method_of
from tests.planner.configurations import configurations, models
from tests.slow import examples

MODEL = replace(Model.gpt("medium", 16, 2048, 16, 1024, 50304), tied_embeddings=False)
WHOLE = Configuration(1, 4, 1, 1, 8, schedule="layered", chunks_per_rank=4, recompute="none")
SPLIT = replace(WHOLE, split_backward=4)
VEE = replace(SPLIT, schedule="zbv", chunks_per_rank=2)


def cluster(between=25e9, memory=80e9):
    """Nodes of one GPU."""
    return Cluster("here", 64, 1, 300e12, memory, 2e12, Link(200e9, 5e-6), Link(between, 1e-5))


def test_gradients_of_weights_take_almost_half_of_a_backward():
    costs = Work(MODEL, cluster(), SPLIT).costs()
    for backward, later in list(zip(costs.backward, costs.weights_backward))[1:-1]:
        assert 0.4 * backward < later < 0.5 * backward
    assert not Work(MODEL, cluster(), WHOLE).costs().weights_backward


def test_only_a_head_that_computes_all_rows_at_once_leaves_its_weight_for_the_second_part():
    whole, in_pieces = (Work(MODEL, cluster(), replace(SPLIT, micro_batch=size)).costs() for size in (1, 4))
    assert whole.weights_backward[-1] > 1.2 * whole.weights_backward[1]
    assert in_pieces.weights_backward[-1] == in_pieces.weights_backward[1]


@pytest.mark.parametrize("of", [SPLIT, VEE], ids=["layered", "zbv"])
def test_a_step_takes_the_clocks_seconds_and_has_a_shorter_bubble(of):
    whole, split = (predict(MODEL, cluster(), one, on_clock=True) for one in (replace(of, split_backward=0), of))
    assert split.seconds == pytest.approx(exact_seconds(MODEL, cluster(), of), rel=1e-9)
    assert split.compute == whole.compute and split.bubble < 0.7 * whole.bubble


@settings(max_examples=examples(150), deadline=None)
@given(models(), configurations(in_parts=True), st.sampled_from([1e8, 1e9, 25e9]))
def test_what_does_not_wait_for_other_ranks_remains(model, configuration, between):
    """So a search need not run what cannot be the fastest."""
    ways = ways_to_split(model, configuration)
    assume(ways and not (configuration.schedule == "zbv" and model.tied_embeddings))
    whole = predict(model, cluster(between), configuration, on_clock=True)
    plan = Plan(configuration, whole, memory(model, configuration), None)
    for way in ways:
        split = predict(model, cluster(between), way)
        exact = exact_seconds(model, cluster(between), way)
        assert split.seconds == pytest.approx(exact, rel=1e-9) and min(split.parts.values()) >= 0
        assert plan.without_waits <= 1.001 * exact, method_of(way)


def test_the_first_part_leaves_inputs_of_products_and_gradients_of_their_results():
    """6 h per token of a layer's attention, and 2 h and twice 4 h of its feed-forward part, in 16 bits."""
    (first, *chunks, last) = chunk_bytes_of(MODEL, SPLIT, default_software(SPLIT))
    assert first.waiting == 0 and {each.waiting for each in chunks} == {2 * 1024 * 16 * 2048}
    assert last.waiting == chunks[0].waiting + 2 * 1024 * (2048 + 50304), "the head's product leaves logits' gradients"
    assert all(each.waiting == 0 for each in chunk_bytes_of(MODEL, WHOLE, default_software(WHOLE)))


def test_fewer_backwards_that_wait_need_less_memory():
    recomputing = replace(WHOLE, recompute="full", micro_batches=32)
    needed = [memory(MODEL, replace(recomputing, split_backward=most)).total for most in (0, 1, 4)]
    assert needed[0] < needed[1] < needed[2]


def test_the_memory_of_a_vee_does_not_grow_with_micro_batches():
    short, long = (memory(MODEL, replace(VEE, micro_batches=micro_batches)) for micro_batches in (16, 64))
    assert short.total - short.batch == long.total - long.batch


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pipeline_ranks": 1}, "fills waits for other pipeline ranks, but pipeline_ranks is 1"),
        ({"tensor_ranks": 2}, "which such ranks share, but tensor_ranks is 2"),
        ({"offload": "optimizer", "zero_stage": 1}, "but offload is 'optimizer'"),
        ({"micro_batch_outer": True}, "stock DeepSpeed does not know, but micro_batch_outer is True"),
        ({"split_backward": -1}, "split_backward is -1"),
    ],
)
def test_impossible_ways_are_refused(changes, why):
    with pytest.raises(ValueError, match=why):
        replace(SPLIT, **changes)


def test_models_that_gain_nothing_are_refused_and_not_tried():
    experts, tied = replace(MODEL, experts=4), replace(MODEL, tied_embeddings=True)
    with pytest.raises(ValueError, match="split_backward is 4, but the experts of medium"):
        predict(experts, cluster(), SPLIT)
    with pytest.raises(ValueError, match="schedule is 'zbv', .* those of medium are tied"):
        predict(tied, cluster(), VEE)
    stock = replace(WHOLE, schedule="1f1b", chunks_per_rank=1)
    assert not ways_to_split(experts, stock) and not ways_to_split(MODEL, replace(stock, pipeline_ranks=1))
    assert {way.schedule for way in ways_to_split(tied, stock)} == {"1f1b"}
    assert {way.schedule for way in ways_to_split(MODEL, stock)} == {"1f1b", "zbv"}
    assert [way.split_backward for way in ways_to_split(MODEL, WHOLE)] == [4, 2, 1]


@pytest.fixture(scope="module")
def plans():
    """Of a model that is too large for one GPU, on a slow network."""
    return search(MODEL, cluster(5e9, 22e9), 64)


def test_a_search_proposes_it_where_the_clock_says_that_it_takes_less_time(plans):
    slow = cluster(5e9, 22e9)
    split = [plan for plan in plans if plan.configuration.split_backward]
    assert split
    for plan in split:
        of, seconds = plan.configuration, plan.prediction.seconds
        assert seconds == pytest.approx(exact_seconds(MODEL, slow, of), rel=1e-9) and plan.memory.fits(slow)
        alike = [one for one in plans if ranks_of(one) == ranks_of(plan) and not one.configuration.split_backward]
        assert all(seconds < one.prediction.seconds for one in alike)


def ranks_of(plan):
    of = plan.configuration
    return of.data_ranks, of.pipeline_ranks, of.tensor_ranks, of.micro_batch


def test_a_search_adds_no_second_parts_that_do_not_suit():
    found = search(MODEL, cluster(5e9, 22e9), 64, best=1, suits=lambda one: not one.split_backward)
    assert found and not any(plan.configuration.split_backward for plan in found)


def test_the_block_asks_for_it():
    untied = replace(MODEL, layers=32)
    assert ds_config(untied, SPLIT)["ds_lgamp"]["split_backward"] is True
    assert ds_config(untied, replace(SPLIT, split_backward=2))["ds_lgamp"]["split_backward"] == 2
    assert "split_backward" not in ds_config(untied, WHOLE)["ds_lgamp"]
    written = LgampConfig(**ds_config(untied, VEE)["ds_lgamp"])
    assert (written.schedule, written.chunks_per_rank, written.split_backward) == ("zbv", 2, True)
