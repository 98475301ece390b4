"""The planner knows recompute "auto": what pipeline ranks keep, their memory and time, when a search proposes it, and
how to ask for it."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ds_lgamp.cli.plan_search import as_json, print_table
from ds_lgamp.config import LgampConfig
from ds_lgamp.cost.budget import space_left
from ds_lgamp.planner.activations import chunk_bytes_of
from ds_lgamp.planner.candidates import keeping, may_keep, ranks_of, without_recomputing
from ds_lgamp.planner.cluster import Cluster, Link
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.memory import batch_bytes, default_software, followed, memory
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.predict import predict
from ds_lgamp.planner.search import search
from ds_lgamp.planner.work import exact_seconds
from ds_lgamp.planner.write import describe, ds_config, method_of
from tests.planner.configurations import configurations, models
from tests.slow import examples

MODEL = replace(Model.gpt("medium", 16, 2048, 16, 1024, 50304), tied_embeddings=False)
FULL = Configuration(1, 2, 1, 1, 8, schedule="layered", chunks_per_rank=4)
NONE = replace(FULL, recompute="none")


def cluster(between=25e9, memory=80e9):
    """Nodes of one GPU."""
    return Cluster("here", 64, 1, 300e12, memory, 2e12, Link(200e9, 5e-6), Link(between, 1e-5))


def half_way(model=MODEL, full=FULL, share=0.5):
    """Returns bytes between what recomputing everything takes and what recomputing nothing takes."""
    least, most = (memory(model, one).total for one in (full, without_recomputing(full)))
    return int(least + share * (most - least))


@settings(max_examples=examples(150), deadline=None)
@given(models(), configurations(), st.floats(0, 1))
def test_ranks_keep_what_fits_and_their_step_takes_no_longer(model, drawn, share):
    full = replace(drawn, recompute="full")
    assume(may_keep(model, full))
    room = half_way(model, full, share)
    # Without room, ds_lgamp recomputes everything, under schedules of others too.
    auto, wide, narrow = (keeping(model, full, each) for each in (room, 1 << 60, 0))
    assert narrow.recomputed_pairs == full.recomputed_pairs
    assert memory(model, auto).total <= max(room, memory(model, full).total)
    assert memory(model, wide).total == memory(model, without_recomputing(full)).total and not wide.recomputed_pairs
    for between in (1e8, 25e9):
        most, some, least = (exact_seconds(model, cluster(between), one) for one in (narrow, auto, wide))
        assert least <= 1.001 * some and some <= 1.001 * most, describe(auto)


def test_a_kept_pair_takes_what_it_takes_without_recomputation():
    auto, none = (chunk_bytes_of(MODEL, one, default_software(one)) for one in (keeping(MODEL, FULL, 1), NONE))
    *turning, at_once = zip(auto, none)
    assert all(both.kept == alone != both for both, alone in turning)
    assert at_once[0] == at_once[1], "the last chunk is never recomputed"


def test_every_rank_is_followed_to_the_end_of_a_long_step(monkeypatch):
    """Other plans need none of that."""
    monkeypatch.setattr("ds_lgamp.planner.memory.MOST_FOLLOWED", 8)
    most = []
    for micro_batches, share in ((12, 0.1), (24, 0.5)):
        full = replace(FULL, pipeline_ranks=4, micro_batches=micro_batches)
        auto = keeping(MODEL, full, half_way(full=full, share=share))
        software = default_software(auto)
        of_ranks = [followed(MODEL, auto, rank, software).peak for rank in range(4)]
        assert memory(MODEL, auto).total == max(of_ranks) + batch_bytes(MODEL, auto, software)
        most.append(of_ranks.index(max(of_ranks)))
    assert most[0] == 2, "a rank that needs less in other plans"


def test_late_chunks_are_kept_first():
    """They wait shortest for their backwards."""
    auto = keeping(MODEL, FULL, half_way())
    last = FULL.chunks - 2
    assert {(last, micro_batch) for micro_batch in range(8)} <= auto.kept
    assert 0 < auto.recomputed_pairs < 8 * last
    assert auto.recomputed_pairs == sum(8 * auto.recomputed_share(chunk) for chunk in range(FULL.chunks))


@pytest.mark.parametrize("schedule", ["layered", "1f1b", "interleaved_1f1b"])
def test_a_step_takes_the_clocks_seconds_and_computes_for_as_long_as_its_pairs_say(schedule):
    ranks, chunks = (8, 1) if schedule == "1f1b" else (2, 4)
    full = replace(FULL, schedule=schedule, pipeline_ranks=ranks, chunks_per_rank=chunks)
    auto = keeping(MODEL, full, half_way(full=full))
    assert 0 < auto.recomputed_pairs < full.recomputed_pairs
    told = predict(MODEL, cluster(), auto)
    assert told.seconds == pytest.approx(exact_seconds(MODEL, cluster(), auto), rel=1e-9)
    assert min(told.parts.values()) >= 0
    least, most = (predict(MODEL, cluster(), replace(full, recompute=one)).compute for one in ("none", "full"))
    assert least <= told.compute < most


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tensor_ranks": 2}, "ranks that share no layer, but tensor_ranks is 2; use 'full' or 'none'"),
        ({"data_ranks": 2, "expert_ranks": 2}, "but expert_ranks is 2"),
        ({"micro_batch_outer": True}, "but micro_batch_outer is True"),
        ({"split_backward": 2}, "for whole backwards of ranks .* but split_backward is 2"),
        ({"recompute": "full", "kept": frozenset({(0, 0)})}, "recompute is 'full', but kept has 1 pairs; use 'auto'"),
    ],
)
def test_what_the_engine_refuses_is_refused(changes, why):
    with pytest.raises(ValueError, match=why):
        replace(FULL, **{"recompute": "auto", **changes})


def test_what_recomputes_by_layers_or_in_a_long_program_is_not_tried():
    assert may_keep(MODEL, FULL) and not may_keep(MODEL, NONE)
    assert not may_keep(MODEL, replace(FULL, micro_batches=10_000))
    assert not may_keep(replace(MODEL, experts=4, divided_by="megatron"), FULL)
    assert may_keep(replace(MODEL, experts=4, divided_by="autoep"), FULL)


LONG = replace(MODEL, sequence_length=4096, position_embeddings=4096)
SLOW = replace(cluster(5e9, 16e9), nodes=8)


@pytest.fixture(scope="module")
def plans():
    """Of a model whose activations are too large for a GPU."""
    return search(LONG, SLOW, 16)


def test_a_search_proposes_it_where_nothing_else_of_its_layout_is_as_fast(plans):
    found = [plan for plan in plans if plan.configuration.recompute == "auto"]
    assert any(plan.method == "layered" for plan in found)
    for plan in found:
        of, seconds = plan.configuration, plan.prediction.seconds
        assert seconds == pytest.approx(exact_seconds(LONG, SLOW, of), rel=1e-9)
        assert plan.memory.total <= space_left(16 * 10**9) and not memory(LONG, without_recomputing(of)).fits(SLOW)
        full = replace(of, recompute="full", kept=frozenset())
        assert memory(LONG, full).fits(SLOW) and seconds < predict(LONG, SLOW, full, on_clock=True).seconds
        if of.schedule != "layered":
            assert plan.method == f"{of.schedule}, recompute auto"
            alike = [one for one in plans if ranks_of(one.configuration) == ranks_of(of) and one not in found]
            assert all(seconds < one.prediction.seconds for one in alike)
    without = search(LONG, SLOW, 16, suits=lambda of: of.recompute != "auto")
    assert not any(plan.configuration.recompute == "auto" for plan in without)
    fastest, alone = (
        next(plan.prediction.seconds for plan in each if plan.method == "layered") for each in (plans, without)
    )
    assert fastest < 0.98 * alone


def test_table_and_json_say_how_many_forwards_are_recomputed(plans, capsys):
    print_table(LONG, SLOW, plans, None)
    table = capsys.readouterr().out
    assert "recompute: of auto, how many of all forwards" in table.replace(" \n", " ")
    for plan in as_json(LONG, SLOW, plans, None)["plans"]:
        assert "kept" not in plan and ("recomputed_pairs" in plan) == (plan["recompute"] == "auto")
        if plan["recompute"] == "auto":
            pairs = plan["pipeline_ranks"] * plan["chunks_per_rank"] * plan["micro_batches"]
            assert 0 < plan["recomputed_pairs"] < pairs and f"auto {plan['recomputed_pairs']}/{pairs}" in table


def test_the_block_asks_for_it():
    auto = keeping(MODEL, FULL, half_way())
    written = LgampConfig(**ds_config(MODEL, auto)["ds_lgamp"])
    assert (written.recompute, written.recompute_memory) == ("auto", None)
    assert describe(auto).endswith(f"{auto.recomputed_pairs} of 64 forwards recomputed")
    assert "recomputed_pairs" not in FULL.to_json() and "kept" not in FULL.to_json()
    assert method_of(auto) == "layered"
