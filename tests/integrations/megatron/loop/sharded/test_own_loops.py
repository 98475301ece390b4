"""Loops of one's own at stages 2 and 3: what they may set, call and build as with Megatron-core's own wrapper."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from testing.ranks import run_on_ranks
from tests.integrations.megatron.training_loop import STOCK, Place, Training, prepare_process

SHARDED = Place(1, 2, "layered", zero_stage=3)
WHOLE = Place(1, 1, STOCK)


def steps(training):
    return [(step.loss, step.norm) for step in training.train()]


def assert_alike(found, expected):
    assert found == [pytest.approx(step, rel=1e-5) for step in expected]


def test_whole_models_may_be_evaluated_beside_sharded_ones_that_train():
    run_on_ranks(2, train_beside_a_teacher, before_init=prepare_process)


def train_beside_a_teacher():
    place = SHARDED._replace(pipeline_ranks=2, zero_stage=2)
    training = Training(place)
    students, training.place = training.models, place._replace(zero_stage=0)
    teachers = training.build(place.chunks_per_rank)
    losses = []
    found = []
    for _ in range(2):
        training.models = teachers
        with torch.no_grad():
            losses.append(training.run_batch(0, forward_only=True))
        training.models = students
        found.append(steps(training))
    uninterrupted = Training(place)
    assert_alike(found[0] + found[1], steps(uninterrupted) + steps(uninterrupted))
    assert losses[0] == losses[1] == pytest.approx(found[0][0][0], rel=1e-5)


def test_models_of_several_sizes_take_turns_in_a_pipeline():
    run_on_ranks(2, take_turns, before_init=prepare_process)


def take_turns():
    place = Place(2, 2, "layered")
    small = Training(place)
    large = Training(place._replace(options=(("hidden_size", 48), ("variable_seq_lengths", True))))
    # One schedule runs both.
    small.forward_backward = large.forward_backward
    for _ in range(2):
        for training in (small, large):
            with torch.no_grad():
                assert training.run_batch(0, forward_only=True) == training.run_batch(0, forward_only=True)


def test_a_script_scales_gradients_by_what_it_says():
    run_on_ranks(2, scale_gradients, before_init=prepare_process)


def scale_gradients():
    plain, scaled = (Training(place._replace(data_ranks=2)) for place in (WHOLE, SHARDED))
    scaled.config.finalize_model_grads_func = partial(finalize_and_scale, 0.25)
    assert steps(scaled)[0][1] == pytest.approx(steps(plain)[0][1] / 4, rel=1e-5)


def finalize_and_scale(factor, models, *tokens, **options):
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(models, *tokens, **options)
    for model in models:
        model.scale_gradients(factor)


def test_gradients_of_sums_over_tokens_are_sums_where_the_loss_function_counts_no_tokens():
    run_on_ranks(2, train_without_counts, before_init=prepare_process)


def train_without_counts():
    stock, ours = (
        steps(Training(place._replace(data_ranks=2, options=(("calculate_per_token_loss", True),))))
        for place in (WHOLE, SHARDED)
    )
    assert_alike(ours, stock)


def test_gradients_that_megatron_core_averages_over_tensor_parallel_ranks_are_averages():
    run_on_ranks(2, average_norms_of_layers, before_init=prepare_process)


def average_norms_of_layers():
    stock, ours = (
        steps(AveragingNorms(place._replace(tensor_ranks=2, options=(("hidden_size", 64),))))
        for place in (WHOLE, SHARDED)
    )
    assert_alike(ours, stock)


class AveragingNorms(Training):
    """Every tensor-parallel rank computes another gradient of the norms."""

    def build(self, virtual):
        models = super().build(virtual)
        for model in models:
            for name, parameter in model.named_parameters():
                if "layernorm" in name:
                    parameter.average_gradients_across_tp_domain = True
                    parameter.register_hook(lambda gradient: gradient * (1 + dist.get_rank()))
        return models
