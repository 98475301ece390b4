"""Loops of one's own at stages 2 and 3: what they may set, call and build as with Megatron-core's own wrapper."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.config import ConfigError
from tests.integrations.megatron.training_loop import STOCK, Case, Place, Training

SHARDED = Place(1, 2, "layered", zero_stage=3)
WHOLE = Place(1, 1, STOCK)


def steps(training):
    return [(step.loss, step.norm) for step in training.train()]


def assert_alike(found, expected):
    assert found == [pytest.approx(step, rel=1e-5) for step in expected]


def train_with_its_settings():
    options = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    assert_alike(steps(Training(SHARDED._replace(options=tuple(options.items())))), steps(Training(WHOLE)))


def build_with(setting, value, said):
    with pytest.raises(ConfigError, match=said):
        Training(SHARDED._replace(options=((setting, value),)))


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


def scale_gradients():
    plain, scaled = (Training(place._replace(data_ranks=2)) for place in (WHOLE, SHARDED))
    scaled.config.finalize_model_grads_func = partial(finalize_and_scale, 0.25)
    assert steps(scaled)[0][1] == pytest.approx(steps(plain)[0][1] / 4, rel=1e-5)


def finalize_and_scale(factor, models, *tokens, **options):
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(models, *tokens, **options)
    for model in models:
        model.scale_gradients(factor)


def train_without_counts():
    stock, ours = (
        steps(Training(place._replace(data_ranks=2, options=(("calculate_per_token_loss", True),))))
        for place in (WHOLE, SHARDED)
    )
    assert_alike(ours, stock)


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


def run_two_batches_for_a_step():
    training = Training(SHARDED._replace(data_ranks=2))
    training.run_batch(0)
    with torch.no_grad():
        training.run_batch(0, forward_only=True)
    with pytest.raises(ConfigError, match="^the last batch has left gradients, .*; call optimizer.step or zero_grad"):
        training.run_batch(1)
    assert_alike(steps(training), steps(Training(WHOLE._replace(data_ranks=2))))


def wrap_and_call():
    from megatron.core.process_groups_config import ProcessGroupCollection

    from ds_lgamp.integrations.megatron.loop.sharded_model import ShardedChunk

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


def train_frozen_chunks():
    class Frozen(Training):
        def build(self, virtual):
            models = super().build(virtual)
            for model in models:
                model.requires_grad_(False)
            return models

    training = Frozen(SHARDED)
    assert training.optimizer.step() == (True, 0.0, None)


def share_a_norm():
    class Sharing(Training):
        def build(self, virtual):
            models = super().build(virtual)
            first, last = (model.module.decoder for model in models)
            last.layers[0].input_layernorm = first.layers[0].input_layernorm
            return models

    with pytest.raises(ConfigError, match="of chunk 1 on this rank is also a parameter of chunk 0, .*; put modules"):
        Sharing(SHARDED)


def freeze_one_end():
    class HalfFrozen(Training):
        def build(self, virtual):
            models = super().build(virtual)
            if dist.get_rank() == 0:
                models[0].module.embedding.requires_grad_(False)
            return models

    with pytest.raises(ConfigError, match="^requires_grad of the tied embedding is False on one .*; freeze the weight"):
        HalfFrozen(SHARDED._replace(pipeline_ranks=2))


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


CASES = {
    "settings for the distributed optimizer may stay": Case(1, train_with_its_settings),
    "whole models may be evaluated beside sharded ones that train": Case(2, train_beside_a_teacher),
    "models of several sizes take turns in a pipeline": Case(2, take_turns),
    "a script scales gradients by what it says": Case(2, scale_gradients),
    "gradients of sums over tokens are sums where the loss function counts no tokens": Case(2, train_without_counts),
    "gradients that megatron core averages over tensor parallel ranks are averages": Case(2, average_norms_of_layers),
    "a batch that would add to the gradients of the last one is refused": Case(2, run_two_batches_for_a_step),
    "the wrapper takes what megatron cores takes": Case(1, wrap_and_call),
    "a rank may have nothing to train": Case(1, train_frozen_chunks),
    "a parameter of two chunks is refused": Case(1, share_a_norm),
    "a tied embedding that is frozen at one end of a pipeline is refused": Case(2, freeze_one_end),
    "embedders on all pipeline ranks are refused": Case(2, condition),
    "a pipeline rank may have no parameters": Case(2, train_below_a_bare_head),
}

for setting, value, said in (
    ("optimizer_cpu_offload", True, "^optimizer_cpu_offload is True: optimizer states stay on the device; remove"),
    ("check_for_large_grads", True, "^check_for_large_grads is True beside zero_optimization.stage 2 or 3: it"),
    ("gradient_accumulation_fusion", True, "^gradient_accumulation_fusion is True beside zero_optimization.stage"),
):
    CASES[f"{setting} is refused without Megatron-LM's arguments"] = Case(1, build_with, (setting, value, said))


@pytest.mark.parametrize("case", CASES)
def test_in_a_loop_of_ones_own(case, outcomes):
    assert outcomes[case] == ""
