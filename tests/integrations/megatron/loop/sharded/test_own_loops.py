"""Loops of one's own at stages 2 and 3: what they may set, call and build as with Megatron-core's own wrapper."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.config import ConfigError
from testing.ranks import run_on_ranks
from tests.integrations.megatron.training_loop import STOCK, Place, Training, prepare_process

SHARDED = Place(1, 2, "layered", zero_stage=3)
WHOLE = Place(1, 1, STOCK)


def steps(training):
    return [(step.loss, step.norm) for step in training.train()]


def assert_alike(found, expected):
    assert found == [pytest.approx(step, rel=1e-5) for step in expected]


def test_settings_for_the_distributed_optimizer_may_stay():
    run_on_ranks(1, train_with_its_settings, before_init=prepare_process)


def train_with_its_settings():
    options = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    assert_alike(steps(Training(SHARDED._replace(options=tuple(options.items())))), steps(Training(WHOLE)))


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("optimizer_cpu_offload", True, "^optimizer_cpu_offload is True: optimizer states stay on the device; remove"),
        ("check_for_large_grads", True, "^check_for_large_grads is True beside zero_optimization.stage 2 or 3: it"),
        ("gradient_accumulation_fusion", True, "^gradient_accumulation_fusion is True beside zero_optimization.stage"),
    ],
)
def test_what_shards_cannot_honour_is_refused_without_megatron_lms_arguments(setting, value, said):
    run_on_ranks(1, build_with, setting, value, said, before_init=prepare_process)


def build_with(setting, value, said):
    with pytest.raises(ConfigError, match=said):
        Training(SHARDED._replace(options=((setting, value),)))


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


def test_a_batch_that_would_add_to_the_gradients_of_the_last_one_is_refused():
    run_on_ranks(2, run_two_batches_for_a_step, before_init=prepare_process)


def run_two_batches_for_a_step():
    training = Training(SHARDED._replace(data_ranks=2))
    training.run_batch(0)
    with torch.no_grad():
        training.run_batch(0, forward_only=True)
    with pytest.raises(ConfigError, match="^the last batch has left gradients, .*; call optimizer.step or zero_grad"):
        training.run_batch(1)
    assert_alike(steps(training), steps(Training(WHOLE._replace(data_ranks=2))))


def test_the_wrapper_takes_what_megatron_cores_takes():
    run_on_ranks(1, wrap_and_call, before_init=prepare_process)


def wrap_and_call():
    from megatron.core.process_groups_config import ProcessGroupCollection

    from ds_lgamp.integrations.megatron.loop.sharded.model import ShardedChunk

    training = Training(SHARDED)
    first = training.models[0]
    groups = ProcessGroupCollection.use_mpu_process_groups()
    again = ShardedChunk(first.config, first.ddp_config, first.module, disable_bucketing=True, pg_collection=groups)
    assert again.dp_cp_group is first.dp_cp_group and again.tp_group is first.tp_group
    for model in training.models:
        model.enable_forward_pre_hook()
        model.start_param_sync()
        model.disable_forward_pre_hook(param_sync=False)
    assert_alike(steps(training), steps(Training(WHOLE)))


def test_a_rank_may_have_nothing_to_train():
    run_on_ranks(1, train_frozen_chunks, before_init=prepare_process)


def train_frozen_chunks():
    class Frozen(Training):
        def build(self, virtual):
            models = super().build(virtual)
            for model in models:
                model.requires_grad_(False)
            return models

    training = Frozen(SHARDED)
    assert training.optimizer.step() == (True, 0.0, None)


def test_a_parameter_of_two_chunks_is_refused():
    run_on_ranks(1, share_a_norm, before_init=prepare_process)


def share_a_norm():
    class Sharing(Training):
        def build(self, virtual):
            models = super().build(virtual)
            first, last = (model.module.decoder for model in models)
            last.layers[0].input_layernorm = first.layers[0].input_layernorm
            return models

    with pytest.raises(ConfigError, match="of chunk 1 on this rank is also a parameter of chunk 0, .*; put modules"):
        Sharing(SHARDED)


def test_a_tied_embedding_that_is_frozen_at_one_end_of_a_pipeline_is_refused():
    run_on_ranks(2, freeze_one_end, before_init=prepare_process)


def freeze_one_end():
    class HalfFrozen(Training):
        def build(self, virtual):
            models = super().build(virtual)
            if dist.get_rank() == 0:
                models[0].module.embedding.requires_grad_(False)
            return models

    with pytest.raises(ConfigError, match="^requires_grad of the tied embedding is False on one .*; freeze the weight"):
        HalfFrozen(SHARDED._replace(pipeline_ranks=2))


def test_embedders_on_all_pipeline_ranks_are_refused():
    run_on_ranks(2, condition, before_init=prepare_process)


def condition():
    class Conditioned(Training):
        def config_of(self, virtual):
            config = super().config_of(virtual)
            config.has_cond_embedder = True
            return config

    with pytest.raises(
        ConfigError, match="^has_cond_embedder is True beside zero_optimization.stage 2 or 3, .*; set s"
    ):
        Conditioned(SHARDED._replace(pipeline_ranks=2))


def test_a_pipeline_rank_may_have_no_parameters():
    run_on_ranks(2, train_below_a_bare_head, before_init=prepare_process)


def train_below_a_bare_head():
    stock, whole, sharded = (
        steps(BelowABareHead(Place(2, 1, schedule, tied=False, zero_stage=stage)))
        for schedule, stage in ((STOCK, 0), ("1f1b", 0), ("1f1b", 3))
    )
    assert_alike(whole, stock)
    assert_alike(sharded, stock)


class BelowABareHead(Training):
    """The second pipeline rank only makes a loss of the first one's result."""

    def build(self, virtual):
        models = super().build(virtual)
        if dist.get_rank() == 1:
            return [type(models[0])(self.config, models[0].ddp_config, BareHead())]
        return models


class BareHead(torch.nn.Module):
    model_type, pre_process, share_embeddings_and_output_weights = "any", False, False

    def set_input_tensor(self, inputs):
        (self.hidden,) = inputs

    def forward(self, *_, **__):
        return self.hidden.square().mean(dim=2).T
