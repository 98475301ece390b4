"""Mixtures of Megatron-core's experts as layers of a PipelineModule train like one process that has them all."""

import pytest
import torch

from ds_lgamp.checkpoint.whole import read_whole
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
from tests.integrations.megatron.on_cpu import start_megatron
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
    "sinkhorn": place(1, 2, 3, moe_router_load_balancing_type="sinkhorn", moe_aux_loss_coeff=0.0, **EP2),
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


ALONE, DIVIDED = place(1, 1, 0), place(1, 2, 3, **EP2)
WAYS = {
    "EP2 to one rank": (DIVIDED, ALONE),
    "EP2 to EP4": (DIVIDED, place(1, 4, 2, **EP4)),
    "one rank to P2 x EP2": (ALONE, place(2, 2, 1, **EP2)),
}


def go_on(here, folder, load, save, steps):
    """Trains ``steps`` from the checkpoint ``load``, if it is given, and saves the checkpoint ``save`` before them or,
    from none, after them."""
    prepare_rank()
    engine = engine_of(here)
    if load is not None:
        assert engine.load_checkpoint(folder, tag=load)[0] is not None
        engine.save_checkpoint(folder, tag=save)
    found = train(engine, steps)
    if load is None:
        engine.save_checkpoint(folder, tag=save)
    engine.wait_for_checkpoint()
    return found


@pytest.mark.parametrize("way", slow_except(["EP2 to one rank"], WAYS))
def test_a_checkpoint_goes_on_with_another_number_of_expert_ranks(trained, tmp_path, way):
    start, end = WAYS[way]
    (before, *_) = run_on_ranks(start.ranks, go_on, start, str(tmp_path), None, "first", range(1))
    (after, *_) = run_on_ranks(end.ranks, go_on, end, str(tmp_path), "first", "second", range(1, STEPS))
    assert_same(before + after, trained[()])
    first, second = (read_whole(tmp_path / tag) for tag in ("first", "second"))
    names = trained[()][0].gradients.keys()
    assert first.parameters.keys() == second.parameters.keys() == names
    assert all(torch.equal(first.parameters[name], second.parameters[name]) for name in names)
    from ds_lgamp.integrations.megatron.layers.gpt_weights import to_gpt_model

    whole = to_gpt_model(second.parameters)
    expert = "mlp.experts.local_experts.3.linear_fc2.weight"
    assert torch.equal(whole[f"decoder.layers.1.{expert}"], second.parameters[f"3.layer.{expert}"])


CHUNKS, RESIDENT = 4, 2


@pytest.mark.slow
def test_a_step_gathers_and_reduces_experts_as_often_as_the_rest_of_their_chunk():
    """The second of four chunks has the experts of one layer, and the third, which stays resident in the turn, those of
    two. The others have none."""
    sizes = [EXPERTS["moe_ffn_hidden_size"] * EXPERTS["hidden_size"]] * 2 * (EXPERTS["num_moe_experts"] // 2)
    wholes = {layers: 2 * part_size(offsets(sizes * layers)[-1], 2) for layers in (1, 2)}
    for seen in run_on_ranks(4, collectives_of, place(1, 4, 3, **EP2)):
        of_experts = {(kind, elements): times for (kind, size, elements), times in seen.items() if size == 2}
        assert of_experts == {
            ("gather", wholes[1]): 2,
            ("gather", wholes[2]): 1,
            ("reduce", wholes[1]): 1,
            ("reduce", wholes[2]): 1,
        }
        for kind, times in (("gather", 2 * CHUNKS - RESIDENT), ("reduce", CHUNKS)):
            assert sum(number for (each, size, _), number in seen.items() if (each, size) == (kind, 4)) == times


def collectives_of(here):
    prepare_rank()
    engine = engine_of(here)
    return collectives_on_rank(lambda _, steps: train(engine, steps), here)


def refusals():
    """Returns the sentences that refuse engines on four ranks."""
    prepare_rank()
    one, two = place(1, 4, 1, **EP2), place(2, 2, 1, **EP2)
    sentences = []
    for first, second in ((one, two), (two, one)):
        engine_of(first)
        with pytest.raises(ConfigError) as refused:
            engine_of(second, forgets=False)
        sentences.append(str(refused.value))
    with pytest.raises(ConfigError) as refused:
        engine_of(one, use_data_before_expert_parallelism=True)
    sentences.append(str(refused.value))
    specs = layer_specs(one.options)
    start_megatron()
    with pytest.raises(ConfigError) as refused:
        specs[2].build()
    return [*sentences, str(refused.value)]


@pytest.mark.slow
def test_experts_that_other_ranks_divide_are_refused():
    another_first, another_second, by_copies, groups = run_on_ranks(4, refusals)[3]
    assert "make one engine per job" in another_first and "make one engine per job" in another_second
    assert "among the ranks [0, 1], but DeepSpeed among [0, 2]; remove use_data_before_expert_parallelism" in by_copies
    assert "expert_model_parallel_size of the TransformerConfig is 2, but initialize_model_parallel made" in groups
