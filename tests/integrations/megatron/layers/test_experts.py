"""Mixtures of Megatron-core's experts as layers of a PipelineModule train like one process that has them all."""

from collections import Counter

import pytest
import torch

from ds_lgamp.config import ConfigError
from ds_lgamp.cost.units import offsets, part_size
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.test_expert_parallelism import collectives_on_rank
from tests.integrations.megatron.layers.experts import (
    EXPERTS,
    STEPS,
    Place,
    engine_of,
    layer_specs,
    prepare_rank,
    train,
    train_places,
)
from tests.slow import chosen, slow_except


def place(pipeline_ranks, data_ranks, stage, recompute="full", loss_scale=1.0, **options):
    return Place(pipeline_ranks, data_ranks, stage, recompute, loss_scale, tuple(options.items()))


EP2, EP4 = {"expert_model_parallel_size": 2}, {"expert_model_parallel_size": 4}
ALL_GATHER = {"moe_token_dispatcher_type": "allgather"}
SHARED = {
    "moe_layer_freq": 2,
    "moe_shared_expert_intermediate_size": 16,
    "moe_shared_expert_gate": True,
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"),
    "moe_aux_loss_coeff": (0.1, 0.05),
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
}
FEW_TOKENS = {"num_moe_experts": 64, "moe_ffn_hidden_size": 8, "moe_router_topk": 1, "moe_router_pre_softmax": True}
DROPPING = {"moe_expert_capacity_factor": 0.5}
TENSORS = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
DEFAULT = {
    "one rank": place(1, 1, 0, "none"),
    "P2": place(2, 1, 1),
    "W2, stage 3, scaled loss": place(1, 2, 3, loss_scale=1024.0),
    "EP2, stage 3": place(1, 2, 3, **EP2),
    "EP2 by all-gathers, stage 2": place(1, 2, 2, **EP2, **ALL_GATHER),
}
SLOW = {
    "one rank, recomputed": place(1, 1, 0),
    "W2, stage 0": place(1, 2, 0),
    "W2, stage 1": place(1, 2, 1, "none"),
    "P2 x W2, stage 2": place(2, 2, 2),
    "P2 x W2, stage 3": place(2, 2, 3),
    "shared experts, P2 x W2, stage 3": place(2, 2, 3, **SHARED),
    "shared experts, P2 x EP2, stage 2": place(2, 2, 2, **SHARED, **EP2),
    "EP2, stage 0": place(1, 2, 0, "none", **EP2),
    "EP2, scaled loss": place(1, 2, 1, loss_scale=1024.0, **EP2),
    "P2 x EP2, stage 1": place(2, 2, 1, **EP2),
    "P2 x EP2 by all-gathers, stage 3": place(2, 2, 3, **EP2, **ALL_GATHER),
    "EP2 x W4, stage 0": place(1, 4, 0, **EP2),
    "EP2 x W4, stage 1": place(1, 4, 1, **EP2),
    "EP2 x W4, stage 3": place(1, 4, 3, **EP2),
    "EP4, stage 3": place(1, 4, 3, **EP4),
    "EP4 by all-gathers, stage 2": place(1, 4, 2, **EP4, **ALL_GATHER),
    "experts without tokens": place(1, 2, 3, **FEW_TOKENS, **EP2),
    "experts without tokens, all-gathers": place(1, 2, 1, "none", **FEW_TOKENS, **EP2, **ALL_GATHER),
    "dropped tokens": place(1, 2, 3, **DROPPING, **EP2),
    "dropped tokens, inputs of equal size": place(1, 2, 2, **DROPPING, moe_pad_expert_input_to_capacity=True, **EP2),
    "sigmoid, no auxiliary loss": place(
        *(1, 2, 3), moe_router_score_function="sigmoid", moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None, **EP2
    ),
    "T2": place(1, 1, 1, **TENSORS),
    "T2 x P2, shared experts": place(2, 1, 3, **TENSORS, **SHARED | {"gated_linear_unit": False}),
}
PLACES = DEFAULT | SLOW


@pytest.fixture(scope="module")
def trained(request):
    places = [PLACES[name] for name in sorted(chosen(request, "name"))]
    found, wanted = {}, {*places, Place(), *(Place(options=each.model) for each in places)}
    for ranks in sorted({each.ranks for each in wanted}):
        here = sorted((each for each in wanted if each.ranks == ranks), key=str)
        found |= run_on_ranks(ranks, train_places, here)[0]
    return found


def assert_same(steps, wanted, compares_gradients=True):
    for step, alone in zip(steps, wanted, strict=True):
        assert (step.loss, step.norm) == pytest.approx((alone.loss, alone.norm), rel=1e-6)
        assert step.balances.keys() == alone.balances.keys()
        for kind, layers in step.balances.items():
            assert layers == pytest.approx(alone.balances[kind], rel=1e-6), kind
        for name, expected in alone.gradients.items() if compares_gradients else ():
            assert torch.dist(step.gradients[name], expected) <= 2e-6 * expected.norm(), name


@pytest.mark.parametrize("name", slow_except(DEFAULT, PLACES))
def test_losses_and_gradients_are_those_of_one_process(trained, name):
    here = PLACES[name]
    # Tensor-parallel ranks have slices of a gradient. Its norm is compared.
    assert_same(trained[here], trained[here.model], here.tensor_ranks == 1)


def test_one_process_balances_its_experts(trained):
    """Otherwise the comparison would say nothing."""
    for step in trained[()]:
        assert step.balances.keys() == {"load_balancing_loss", "z_loss"}
        for layers in step.balances.values():
            assert list(layers) == [2, 3, 4] and min(layers.values()) > 0.1
