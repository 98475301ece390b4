"""Predicted steps: their parts, and how they change with the cluster and the configuration."""

import sys
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.planner.cluster import CLUSTERS, Efficiency, Link, named_cluster
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.hardware import Group, network_of
from ds_lgamp.planner.models import read_model
from ds_lgamp.planner.predict import Prediction, predict
from ds_lgamp.planner.work import Work, exact_seconds

MODEL = read_model("gpt3-175b")
PARTS = ("compute", "tensor_parallel", "bubble", "messages", "data_parallel", "gathers", "optimizer")
STOCK = Configuration(8, 8, 8, 1, 64, fused_attention=False, overlaps=False)
LAYERED = replace(STOCK, schedule="layered", chunks_per_rank=4, zero_stage=3, overlaps=True)


@st.composite
def configurations(draw) -> Configuration:
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "interleaved_1f1b", "layered"]))
    pipeline = draw(st.sampled_from([1, 2, 4, 8]))
    several = schedule in ("interleaved_1f1b", "layered")
    stage = draw(st.integers(0, 3))
    outer = stage >= 2 and schedule != "layered" and draw(st.booleans())
    return Configuration(
        data_ranks=draw(st.sampled_from([1, 2, 8, 64])),
        pipeline_ranks=pipeline,
        tensor_ranks=draw(st.sampled_from([1, 2, 8, 16])),
        micro_batch=draw(st.sampled_from([1, 2, 8])),
        micro_batches=pipeline * draw(st.integers(1, 8)),
        zero_stage=stage,
        schedule=schedule,
        chunks_per_rank=draw(st.sampled_from([1, 2, 4])) if several else 1,
        resident_chunks=draw(st.sampled_from([1, 2, 4])),
        recompute=draw(st.sampled_from(["full", "none"])),
        micro_batch_outer=outer,
        overlap_update=not outer and draw(st.booleans()),
        fused_attention=draw(st.booleans()),
        overlaps=draw(st.booleans()),
    )


def step(configuration: Configuration, cluster: str = "a100", **changes) -> Prediction:
    ready = named_cluster(cluster, configuration.gpus)
    return predict(MODEL, replace(ready, **changes), configuration)


@given(configurations(), st.sampled_from(CLUSTERS))
def test_parts_add_up_and_none_is_negative(configuration, cluster):
    found = step(configuration, cluster)
    parts = [getattr(found, part) for part in PARTS]
    assert min(parts) >= 0 and found.seconds == pytest.approx(sum(parts))
    assert 0 < found.mfu < 1


@given(
    configurations(),
    st.sampled_from(["peak", "memory_bandwidth", "inside", "between"]),
    st.floats(1, 4, exclude_min=True),
)
def test_better_hardware_is_never_slower(configuration, field, factor):
    ready = named_cluster("a100-25gbit", configuration.gpus)
    value = getattr(ready, field)
    better = Link(value.bandwidth * factor, value.latency) if isinstance(value, Link) else value * factor
    slow, fast = (
        predict(MODEL, cluster, configuration).seconds for cluster in (ready, replace(ready, **{field: better}))
    )
    assert fast <= slow * (1 + 1e-12)


@given(configurations())
def test_more_micro_batches_take_longer_and_use_the_gpus_no_worse(configuration):
    more = replace(configuration, micro_batches=2 * configuration.micro_batches)
    assert step(more).seconds > step(configuration).seconds
    assert step(more).mfu >= step(configuration).mfu * (1 - 1e-12)


@given(configurations())
def test_recomputation_takes_time(configuration):
    full, none = (step(replace(configuration, recompute=recompute)) for recompute in ("full", "none"))
    # On one pipeline rank a last chunk turns at once, and is the only one here.
    alone = configuration.schedule == "layered" and configuration.chunks == 1
    assert none.compute <= full.compute * (1 + 1e-9) if alone else none.compute < full.compute


def test_recomputation_adds_a_third_to_compute_and_half_to_tensor_parallel_collectives():
    full, none = step(STOCK), step(replace(STOCK, recompute="none"))
    assert full.compute / none.compute == pytest.approx(4 / 3, rel=0.03)
    assert full.tensor_parallel / none.tensor_parallel == pytest.approx(1.5, rel=0.05)


def test_the_bubble_is_that_of_the_schedule_if_the_ends_of_the_model_are_light():
    model = replace(MODEL, vocabulary_size=1)
    cluster = named_cluster("a100", STOCK.gpus)
    busy = predict(model, cluster, STOCK)
    ideal = busy.compute + busy.tensor_parallel
    assert busy.bubble / ideal == pytest.approx(7 / 64, rel=0.02)
    interleaved = predict(model, cluster, replace(STOCK, schedule="interleaved_1f1b", chunks_per_rank=4))
    assert interleaved.bubble / ideal == pytest.approx(7 / 64 / 4, rel=0.02)
    # Fewer micro-batches than ranks: t * ((N-1) * max(M, P) + M + P - 1)
    few = predict(model, cluster, replace(LAYERED, micro_batches=4))
    assert few.bubble / (few.compute + few.tensor_parallel) == pytest.approx((3 * 8 + 4 + 7 - 16) / 16, rel=0.05)


def test_chunks_divide_the_bubble_of_different_ranks():
    """The last rank has the head, so the first micro-batch passes the other ranks in less time."""
    places = [replace(LAYERED, data_ranks=1, zero_stage=0, chunks_per_rank=chunks) for chunks in (1, 4)]
    one, four = map(step, places)
    assert four.bubble == pytest.approx(one.bubble / 4)


def test_the_slowest_rank_sets_the_pace():
    # The last rank has the head, so every micro-batch takes longer. What the other ranks do meanwhile is unchanged.
    wide = predict(replace(MODEL, vocabulary_size=512000), named_cluster("a100", STOCK.gpus), STOCK)
    assert wide.compute > 1.15 * step(STOCK).compute and wide.bubble == pytest.approx(step(STOCK).bubble, rel=0.01)


ALONE = replace(LAYERED, pipeline_ranks=1, data_ranks=64)
"""Without messages."""


def waits(configuration: Configuration) -> Prediction:
    """Returns a step on a network so slow that compute hides nothing worth counting."""
    return step(configuration, between=Link(1e4, 1e-9))


def test_layered_stage_3_moves_the_same_for_any_number_of_micro_batches_and_micro_batches_outside_do_not():
    outer = replace(ALONE, schedule="1f1b", chunks_per_rank=1, micro_batch_outer=True, overlaps=False)
    for configuration, factor in ((ALONE, 1), (outer, 2)):
        few, many = (waits(replace(configuration, micro_batches=number)) for number in (32, 64))
        assert many.gathers == pytest.approx(factor * few.gathers, rel=1e-3)
        assert many.data_parallel == pytest.approx(factor * few.data_parallel, rel=1e-3)


@pytest.mark.parametrize(("chunks", "resident", "gathers"), [(4, 2, 6), (4, 1, 7), (4, 4, 4), (1, 2, 1)])
def test_a_layered_step_gathers_each_chunk_twice_but_for_those_resident_at_the_turn(chunks, resident, gathers):
    configuration = replace(ALONE, chunks_per_rank=chunks)
    held = replace(configuration, resident_chunks=chunks)
    exposed = waits(replace(configuration, resident_chunks=resident)).gathers
    assert exposed == pytest.approx(waits(held).gathers * gathers / chunks, rel=1e-3)


def test_groups_of_micro_batches_gather_and_reduce_anew():
    whole, groups = waits(ALONE), waits(replace(ALONE, micro_batch_group=16))
    # K(2N - 2B) + B gathers of 4 chunks, 2 of them resident, in 4 groups
    assert groups.gathers / whole.gathers == pytest.approx((4 * 4 + 2) / 6, rel=1e-3)
    assert groups.data_parallel / whole.data_parallel == pytest.approx(4, rel=1e-3)


def test_with_one_resident_chunk_no_gather_hides():
    one, two = (step(replace(ALONE, resident_chunks=number)) for number in (1, 2))
    assert two.gathers == pytest.approx(one.gathers / 7) and two.gathers > 0


@given(configurations().filter(lambda drawn: drawn.schedule == "layered" and drawn.resident_chunks > 1))
def test_a_layered_step_takes_what_the_clock_says(configuration):
    """On the clock, embedding and head make the first and the last chunk longer than others, and messages share the
    network card with collectives."""
    cluster = named_cluster("a100-100gbit", configuration.gpus)
    told, exact = (way(MODEL, cluster, configuration) for way in (predict, exact_seconds))
    assert told.seconds == pytest.approx(exact, rel=0.1)


ALIKE = Configuration(1, 1, 1, 1, 8, schedule="layered", chunks_per_rank=8)
CROWDED = Configuration(2, 32, 8, 1, 512, 1, schedule="layered", recompute="none")


@pytest.mark.parametrize(
    ("configuration", "words", "tolerance"),
    [
        # One rank alone: nothing waits.
        (ALIKE, 51200, 1e-3),
        # No message travels beside the gathers and the reduction of a rank's only chunk.
        (CROWDED, 51200, 0.01),
        # The last rank is much slower than those before it, and computes nothing twice.
        (replace(ALIKE, pipeline_ranks=8, chunks_per_rank=1), 512000, 0.08),
    ],
)
def test_examples_are_close_to_the_clock(configuration, words, tolerance):
    model = replace(MODEL, vocabulary_size=words)
    cluster = named_cluster("a100-25gbit", configuration.gpus)
    told, exact = (way(model, cluster, configuration) for way in (predict, exact_seconds))
    assert told.seconds == pytest.approx(exact, rel=tolerance)


def test_a_slow_network_costs_layered_less_than_stock():
    stock = replace(STOCK, overlaps=True, zero_stage=1)
    layered = replace(LAYERED, zero_stage=1)
    lost = [step(way, "a100-100gbit").seconds - step(way, "a100").seconds for way in (stock, layered)]
    assert lost[1] < lost[0] / 2


def test_messages_of_several_chunks_need_a_network_that_carries_them():
    few, many = (step(replace(LAYERED, zero_stage=0, chunks_per_rank=chunks), "a100-10gbit") for chunks in (2, 6))
    assert many.messages > 5 * few.messages


@pytest.mark.parametrize(("stage", "parts"), [(0, 1), (1, 8), (3, 8)])
def test_the_layered_schedule_sums_the_shards_of_tied_embeddings(stage, parts):
    """In 4 bytes, over two nodes."""
    ready = named_cluster("a100-25gbit", 512)
    network = network_of(ready, 512, Efficiency())
    size = 4 * MODEL.vocabulary_size * MODEL.hidden_size / 8 / parts
    work = Work(MODEL, ready, replace(LAYERED, zero_stage=stage))
    assert work.tied_sum == pytest.approx(network.all_reduce(Group(1, 2), size))


def test_a_partitioned_update_is_shorter():
    assert step(replace(STOCK, zero_stage=1)).optimizer == pytest.approx(step(STOCK).optimizer / 8)


def test_scores_that_are_not_stored_cost_no_time():
    assert step(replace(STOCK, fused_attention=True)).compute < 0.97 * step(STOCK).compute


def test_tensor_ranks_beyond_a_node_are_slow():
    inside, beyond = replace(STOCK, data_ranks=8, tensor_ranks=8), replace(STOCK, data_ranks=4, tensor_ranks=16)
    assert step(beyond).tensor_parallel > 2.5 * step(inside).tensor_parallel


def test_a_small_model_waits_for_the_host_to_launch_kernels():
    small = replace(read_model("gpt2"), sequence_length=64)
    configuration = Configuration(1, 1, 1, 1, 4)
    half, whole = (
        predict(small, replace(named_cluster("a100", 1), efficiency={"launch_seconds": seconds}), configuration)
        for seconds in (20e-6, 40e-6)
    )
    assert whole.compute == pytest.approx(2 * half.compute, rel=0.05)


def test_measured_constants_replace_the_fitted_ones():
    half = Efficiency().matmul / 2
    assert step(STOCK, efficiency={"matmul": half}).compute > 1.6 * step(STOCK).compute


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_ranks": 5}, "tensor_ranks is 5; it must divide the 96 attention_heads"),
        ({"data_ranks": 9}, "needs 576 GPUs; a100 has 512"),
        ({"pipeline_ranks": 128, "data_ranks": 1, "tensor_ranks": 1}, "96 layers cannot form 128 chunks"),
        ({"zero_stage": 4}, "zero_stage is 4"),
        ({"schedule": "breadth"}, "schedule is 'breadth'"),
        ({"recompute": "some"}, "recompute is 'some'"),
        ({"micro_batches": 0}, "micro_batches is 0"),
    ],
)
def test_what_cannot_run_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        predict(MODEL, named_cluster("a100", 512), replace(STOCK, **changes))


def test_a_prediction_takes_few_calls():
    """A search makes thousands of predictions. A call takes about a quarter of a microsecond."""
    cluster, model = named_cluster("a100", 3072), read_model("megatron-1t")
    configuration = Configuration(6, 64, 8, 1, 512, schedule="interleaved_1f1b", chunks_per_rank=2)
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        predict(model, cluster, configuration)
    finally:
        sys.setprofile(None)
    assert calls["call"] < 3_000


@given(configurations().filter(lambda drawn: drawn.schedule == "layered"))
def test_updates_one_by_one_hide_behind_waits_for_gathers_but_for_the_first(configuration):
    at_step, one_by_one = (step(replace(configuration, overlap_update=way)) for way in (False, True))
    first = at_step.optimizer / configuration.chunks_per_rank
    assert one_by_one.optimizer == pytest.approx(max(first, at_step.optimizer - at_step.gathers))
    assert one_by_one.gathers == at_step.gathers


@pytest.mark.parametrize(("cluster", "stage"), [("a100", 1), ("a100-25gbit", 1), ("a100-25gbit", 3)])
def test_updates_one_by_one_save_what_the_clock_says(cluster, stage):
    """Eight chunks on one pipeline rank. The closed form knows waits for gathers only."""
    configuration = Configuration(16, 1, 8, 1, 8, stage, "layered", 8)
    ready = named_cluster(cluster, configuration.gpus)
    saved = []
    for way in (predict, exact_seconds):
        told = [way(MODEL, ready, replace(configuration, overlap_update=overlap)) for overlap in (False, True)]
        at_step, one_by_one = (each.seconds if isinstance(each, Prediction) else each for each in told)
        saved.append((at_step - one_by_one) / at_step)
    assert saved[0] == pytest.approx(saved[1], abs=0.01) and min(saved) >= -1e-9


def test_updates_of_stock_deepspeed_do_not_go_one_by_one():
    with pytest.raises(ValueError, match="overlap_update is True, but with micro_batch_outer stock DeepSpeed updates"):
        replace(LAYERED, schedule="1f1b", chunks_per_rank=1, micro_batch_outer=True, overlap_update=True)
