"""What a micro-batch takes in a block of transformers, measured by running it, and what the formula says."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from ds_lgamp.cost.units import ElementBytes
from ds_lgamp.integrations.deepspeed.explain.activations import Way
from ds_lgamp.integrations.deepspeed.explain.activations import chunk_bytes as measured_bytes
from ds_lgamp.planner.activations import Software, chunk_bytes, end_bytes, layer_bytes
from ds_lgamp.planner.model import Model
from tests.planner.training import EXPERTS, HIDDEN, LENGTH, VOCABULARY, make, model_of
from tests.slow import slow_except

MICRO_BATCH, LAYERS = 1, 2
LARGEST_DEVIATION = 0.01
CASES = list(product(["GPT-2", "Llama", "Qwen3"], [torch.float32, torch.bfloat16]))
DEFAULT = [("GPT-2", torch.float32), ("Qwen3", torch.bfloat16)]
EXPERT_CASES = list(product(EXPERTS, [torch.float32, torch.bfloat16]))
OF_EXPERTS = 0.03
"""Tensors that say which tokens go where are not counted one by one."""


def run(model, blocks, positions, hidden):
    for block in blocks:
        hidden = block(hidden, **positions)
    return hidden


def loss(model, blocks, positions, labels, hidden):
    base = model.base_model
    norm = base.ln_f if hasattr(base, "ln_f") else base.norm
    logits = model.lm_head(norm(run(model, blocks, positions, hidden)))
    # transformers' forwards return the logits too, which keeps them until the forward ends.
    return {"logits": logits, "loss": model.loss_function(logits=logits, labels=labels, vocab_size=VOCABULARY)}["loss"]


@pytest.mark.parametrize(("name", "dtype"), slow_except(DEFAULT, CASES, several=True))
def test_blocks_and_head_of_transformers_take_what_the_formula_says(name, dtype):
    model, size = make(name).to(dtype), dtype.itemsize
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    base, hidden = model.base_model, torch.randn(MICRO_BATCH, LENGTH, HIDDEN, dtype=dtype)
    blocks = list(base.h if name == "GPT-2" else base.layers)[:LAYERS]
    positions = {}
    if name != "GPT-2":
        positions = {"position_embeddings": base.rotary_emb(hidden, torch.arange(LENGTH)[None])}
    labels = torch.randint(VOCABULARY, (MICRO_BATCH, LENGTH))
    gradients = [parameter.grad for parameter in model.parameters()]
    existing = [*model.parameters(), *gradients, labels, *positions.get("position_embeddings", ())]

    software = Software(ElementBytes(weights=size, gradients=size))
    layer = layer_bytes(model_of(name), MICRO_BATCH, 1, software)
    ends = end_bytes(model_of(name), MICRO_BATCH, 1, software)
    assert layer.result == hidden.nbytes

    def compare(compute, gradient, is_last, recompute):
        result = 0 if is_last else hidden.nbytes
        seen = measured_bytes(compute, hidden, [gradient], existing, result, False, Way(recompute))
        told = chunk_bytes([layer], ends, (LAYERS,), False, is_last, recompute)
        # A copy of the input is gone by the time the backward begins, if autograd does not keep it.
        freed = hidden.nbytes if recompute and name != "GPT-2" and size == 2 else 0
        assert told.backward + freed == pytest.approx(seen.backward, rel=LARGEST_DEVIATION)
        assert told.saved == pytest.approx(seen.saved, rel=LARGEST_DEVIATION)
        assert not seen.keeps_result

    for recompute in (True, False):
        compare(partial(run, model, blocks, positions), torch.ones_like(hidden), False, recompute)
    compare(partial(loss, model, blocks, positions, labels), torch.ones(()), True, False)


@pytest.mark.parametrize(
    ("name", "dtype"), slow_except([(name, torch.float32) for name in EXPERTS], EXPERT_CASES, several=True)
)
def test_blocks_with_experts_keep_and_need_what_the_formula_says(name, dtype):
    """Also scores of attention sinks, vectors of low rank, and a dense layer before one with experts."""
    model, size = make(name).to(dtype), dtype.itemsize
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    hidden, blocks = torch.randn(MICRO_BATCH, LENGTH, HIDDEN, dtype=dtype), list(model.base_model.layers)[:LAYERS]
    positions = model.base_model.rotary_emb(hidden, torch.arange(LENGTH)[None])
    mask = (
        torch.full((1, 1, LENGTH, LENGTH), torch.finfo(dtype).min, dtype=dtype).triu(1) if name == "GPT-OSS" else None
    )
    gradients = [parameter.grad for parameter in model.parameters()]
    existing = [*model.parameters(), *gradients, *positions, *([] if mask is None else [mask])]
    sizes, software = model_of(name), Software(ElementBytes(weights=size, gradients=size))
    layers = [layer_bytes(kind, MICRO_BATCH, 1, software) for _, kind in sizes.kinds]
    ends, compute = (
        end_bytes(sizes, MICRO_BATCH, 1, software),
        partial(run, model, blocks, {"position_embeddings": positions, "attention_mask": mask}),
    )
    for recompute in (True, False):
        seen = measured_bytes(
            compute, hidden, [torch.ones_like(hidden)], existing, hidden.nbytes, False, Way(recompute)
        )
        told = chunk_bytes(layers, ends, sizes.counts_between(0, LAYERS), False, False, recompute)
        assert told.saved == pytest.approx(seen.saved, rel=OF_EXPERTS)
        freed = hidden.nbytes if recompute and size == 2 else 0
        assert told.backward + told.saved + freed == pytest.approx(seen.backward + seen.saved, rel=OF_EXPERTS)


def test_fused_kernels_with_16_bits_keep_what_korthikanti_counts_without_dropout_and_scores():
    """32 s b h, or s b h (8 + 24 / T). Statistics of norms and attention come to that."""
    model = Model.gpt("gpt", 1, 12288, 96, 2048, 51200)
    for ranks in (1, 2, 8):
        kept = layer_bytes(model, 1, ranks, Software(fused=True)).kept
        statistics = 2048 * (16 + 4 * 96 // ranks)
        assert kept - statistics == 2048 * 12288 * (8 + 24 // ranks)


def test_with_sequence_parallelism_tensor_ranks_keep_a_part_of_everything():
    """32 s b h / T. Matrices gather the whole sequence while they need it."""
    model = Model.gpt("gpt", 1, 12288, 96, 2048, 51200)
    for ranks in (2, 8):
        alone, divided = (
            layer_bytes(model, 1, ranks, Software(fused=True, splits_sequence=splits)) for splits in (False, True)
        )
        assert divided.kept == 2048 * (32 * 12288 + 16 + 4 * 96) // ranks
        assert divided.result == 2 * 2048 * 12288 // ranks
        assert divided.working - alone.working == 2 * 2048 * 12288


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_gathers_the_whole_sequence_and_keeps_it_if_it_is_tied(tied):
    model = replace(Model.gpt("gpt", 1, 64, 4, 128, 64), tied_embeddings=tied)
    alone, divided = (end_bytes(model, 1, 2, Software(fused=True, splits_sequence=splits)) for splits in (False, True))
    whole, statistics = 2 * 64 * 128, (2 * 64 + 8) * 128
    assert alone.kept - divided.kept == statistics // 2 + (0 if tied else whole // 2)
    assert divided.backward - alone.backward == (0 if tied else whole)


def test_experts_count_as_the_feed_forward_parts_that_a_token_visits():
    model = Model.gpt("gpt", 1, 64, 4, 128, 1000)
    experts = Model(**{**vars(model), "experts": 8, "experts_per_token": 2})
    one, several = (layer_bytes(each, 1, 1, Software()) for each in (model, experts))
    # A second visit keeps five values of 4h. Both have copies of inputs and results, and four numbers that say where
    # tokens go. The probabilities of all experts are kept in 32 bits.
    assert several.kept - one.kept == 128 * (2 * (5 * 4 * 64 + 2 * 2 * 64) + 2 * 4 * 8 + 4 * 8)
    # The gradients of a matrix of all experts are one tensor.
    assert several.working == 2 * 128 * 2 * 256 + 2 * 8 * 64 * 256


def test_a_router_in_32_bits_keeps_copies_of_its_input_and_of_its_weights_unless_ranks_divide_experts():
    """DeepSpeed's AutoEP, which divides them, has a router of its own."""
    _, layer = model_of("DeepSeek-V3").kinds[1]
    for expert_ranks, copies in ((1, 4 * HIDDEN * LENGTH + 4 * HIDDEN * 8), (2, 0)):
        own = layer.divided(expert_ranks)
        single, half = (layer_bytes(each, 1, 1, Software()) for each in (own, replace(own, in_single=())))
        assert single.kept - half.kept == copies


def test_logits_of_a_large_vocabulary_are_the_largest():
    ends = end_bytes(Model.gpt("gpt", 1, 64, 4, 128, 128000), 1, 1, Software())
    logits = 128 * 128000
    assert (ends.forward, ends.backward) == (6 * logits, 8 * logits)
    assert ends.kept == pytest.approx(4 * logits, rel=0.01)
