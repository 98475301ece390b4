"""A configuration's memory is that of the project's formula, which follows programs.

test_memory_measured.py compares it with training.
"""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_lgamp.planner.activations import Software, layer_bytes
from ds_lgamp.planner.cluster import Cluster, Link
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.memory import (
    batch_bytes,
    default_software,
    fits,
    followed,
    least,
    memory,
    units_of,
)
from ds_lgamp.planner.model import Model
from ds_lgamp.schedule.spec import STATE_BLOCK
from tests.planner.configurations import configurations, models
from tests.slow import slow_except

LARGEST_DEVIATION = 0.04
MODEL = Model.gpt("small", 8, 1024, 16, 1024, 50304)


DENSE_AT_FIRST = replace(Model.gpt("drawn", 8, 1024, 8, 1024, 1000), experts=16, dense_layers=3, dense_size=1024)
"""On five pipeline ranks, the third one is the first with two layers of experts."""
SMALL_GROUPS = Configuration(1, 2, 1, 1, 5, schedule="layered", resident_chunks=1, micro_batch_group=1)


@settings(max_examples=200)
@given(models(), configurations(in_parts=True), st.booleans())
@example(Model.gpt("drawn", 8, 128, 8, 1024, 1000), SMALL_GROUPS, False)
@example(Model.gpt("drawn", 8, 128, 8, 1024, 1000), replace(SMALL_GROUPS, micro_batches=40), False)
@example(DENSE_AT_FIRST, Configuration(1, 5, 1, 1, 5), False)
def test_memory_is_that_of_the_program_of_the_rank_that_needs_most(model, configuration, all_to_all):
    software = replace(default_software(configuration), all_to_all=all_to_all)
    batch, ranks = batch_bytes(model, configuration, software), range(configuration.pipeline_ranks)
    told = memory(model, configuration, software)
    assert told.total == max(followed(model, configuration, rank, software).peak for rank in ranks) + batch


@pytest.mark.parametrize(
    ("schedule", "chunks", "group"),
    [("layered", 8, None), ("layered", 8, 4), ("layered", 1, None), ("interleaved_1f1b", 4, None), ("1f1b", 1, None)],
)
@pytest.mark.parametrize("recompute", ["full", "none"])
@pytest.mark.parametrize("micro_batches", slow_except([258, 1030], [258, 520, 1030]))
def test_memory_of_a_long_step_is_that_of_its_program(schedule, chunks, group, recompute, micro_batches):
    """Although the search does not follow all of it."""
    model = Model.gpt("deep", 16, 1024, 16, 1024, 1000)
    configuration = Configuration(
        2, 2, 1, 1, micro_batches, 1, schedule, chunks, recompute=recompute, micro_batch_group=group
    )
    software = default_software(configuration)
    told, batch = memory(model, configuration), batch_bytes(model, configuration, software)
    assert told.total == max(followed(model, configuration, rank, software).peak for rank in (0, 1)) + batch


@pytest.mark.parametrize(
    ("schedule", "chunks", "group"),
    slow_except(
        [("layered", 4, None), ("zbv", 2, None)],
        [("layered", 4, None), ("zbv", 2, None), ("layered", 4, 8), ("interleaved_1f1b", 4, None), ("1f1b", 1, None)],
        several=True,
    ),
)
@pytest.mark.parametrize("recompute", ["full", "none"])
def test_so_it_is_if_backwards_have_two_parts(schedule, chunks, group, recompute):
    model = Model.gpt("deep", 16, 1024, 16, 1024, 1000)
    of = Configuration(2, 4, 1, 1, 520, 1, schedule, chunks, recompute=recompute, micro_batch_group=group)
    of = replace(of, split_backward=4)
    software = default_software(of)
    told, batch = memory(model, of), batch_bytes(model, of, software)
    assert told.total == max(followed(model, of, rank, software).peak for rank in range(4)) + batch


@given(models(), configurations(in_parts=True))
def test_no_configuration_needs_less_than_it_holds_between_steps(model, configuration):
    needed = memory(model, configuration)
    assert needed.weights + needed.batch <= least(model, configuration) <= needed.total


@given(models(), configurations(in_parts=True), st.sampled_from([0.5, 1.0, 2.0]))
def test_a_configuration_fits_if_its_memory_does(model, configuration, share):
    needed = memory(model, configuration)
    cluster = Cluster("here", 1, 8, 1e12, share * needed.total, 1e12, Link(1e9, 1e-6), Link(1e9, 1e-6))
    assert fits(model, configuration, cluster) == needed.fits(cluster) == (share >= 1)


@pytest.mark.parametrize("stage", range(4))
def test_gradients_that_wait_for_the_next_step_count_beside_its_first_forwards(stage):
    """In a deep model they are more than what the last backward leaves, so the rank needs more at stage 0."""
    deep = Model.gpt("deep", 16, 1024, 16, 1024, 1000)
    at_once = Configuration(2, 1, 1, 8, 1, stage, "layered", 16)
    postponed = replace(at_once, overlap_update=True)
    told, software = memory(deep, postponed), default_software(postponed)
    assert told.total == followed(deep, postponed, 0, software).peak + batch_bytes(deep, postponed, software)
    assert stage > 0 or told.total > memory(deep, at_once).total


@pytest.mark.slow
@settings(max_examples=200)
@given(models(), configurations(in_parts=True))
def test_programs_that_post_receives_on_arrival_need_no_more(model, configuration):
    """Beside a GPU a rank posts a receive when its message has been sent, so fewer are posted."""
    software = default_software(configuration)
    message = layer_bytes(model, configuration.micro_batch, configuration.tensor_ranks, software).result
    for rank in range(configuration.pipeline_ranks):
        told = followed(model, configuration, rank, software).peak
        right = followed(model, configuration, rank, software, receives_on_arrival=True).peak
        assert told >= right - max(LARGEST_DEVIATION * right, 3 * message)


@given(models(), configurations(in_parts=True))
def test_units_have_all_parameters(model, configuration):
    configuration = replace(configuration, tensor_ranks=1)
    ranks = range(configuration.pipeline_ranks)
    units = [unit for rank in ranks for unit in units_of(model, configuration, rank)]
    once = sum(unit.parameters / unit.copies for unit in units)
    # Gaps end units or, where blocks of state share a scale, tensors: those of layers, and six beside them.
    tensors = sum(number * len(kind.tensors_in_layer) for number, kind in model.kinds) + 6
    gaps = STATE_BLOCK * tensors if configuration.state == "8bit" else 32 * len(units)
    assert model.parameters <= once <= model.parameters + gaps


@given(configurations(in_parts=True))
def test_a_program_recomputes_if_its_configuration_does(configuration):
    assert configuration.spec.recomputes == (configuration.recompute == "full")


def test_stock_zero_3_passes_one_micro_batch_through_all_layers():
    """It gathers two of 8 layers at a time, and stores the inputs of one micro-batch only."""
    stock = Configuration(8, 1, 1, 1, 16, zero_stage=3, micro_batch_outer=True)
    layered = Configuration(8, 1, 1, 1, 16, zero_stage=3, schedule="layered", chunks_per_rank=8)
    alike = memory(MODEL, replace(layered, micro_batch_group=1))
    assert memory(MODEL, stock) == alike
    inputs = 2 * 1024 * 1024
    assert memory(MODEL, layered).stored == alike.stored + 15 * 7 * inputs
    assert alike.gathered_weights == pytest.approx(
        2 * (2 * MODEL.layer_parameters + MODEL.embedding_parameters), rel=0.01
    )


def test_kinds_add_up_and_weights_of_16_bits_have_masters():
    needs = memory(MODEL, Configuration(1, 1, 1, 1, 1))
    assert sum(needs) == needs.total + needs.pipeline_rank == needs.total
    assert needs.weights == 2 * needs.master_weights // 4 == 2 * needs.optimizer_state // 8
    assert needs.weights == pytest.approx(2 * MODEL.parameters, rel=1e-4)


def test_tensor_parallel_ranks_divide_matrices():
    alone, divided = (memory(MODEL, Configuration(1, 1, ranks, 1, 1), Software(fused=True)) for ranks in (1, 8))
    replicated = 2 * (MODEL.position_embeddings + 8 * 6) * MODEL.hidden_size
    assert divided.weights == pytest.approx((alone.weights - replicated) / 8 + replicated, rel=0.01)


def test_a_gpu_lacks_what_its_memory_does_not_hold():
    def cluster(gigabytes):
        return Cluster("here", 1, 8, 1e12, gigabytes * 1e9, 1e12, Link(1e9, 1e-6), Link(1e9, 1e-6))

    needs = memory(MODEL, Configuration(1, 1, 1, 1, 1))
    assert needs.missing(cluster(80)) == 0 and needs.fits(cluster(80))
    assert needs.missing(cluster(1)) == needs.total - 1e9 > 0 and not needs.fits(cluster(1))
