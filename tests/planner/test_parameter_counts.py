"""Sizes read from a config against the parameters of transformers' own classes."""

import json

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from ds_lgamp.planner.hardware import forward_flops, step_flops
from ds_lgamp.planner.transformers_config import _READERS, model_of_config

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 32,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100, "n_positions": 32}
OPT = {**SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64}
QWEN3_MOE = {**GROUPED, "moe_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2}
GPT_OSS = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 24}
DEEPSEEK = {
    **SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
}
KINDS = [
    ("gpt2", GPT2),
    ("gpt2", {**GPT2, "n_inner": 48, "tie_word_embeddings": False}),
    ("opt", OPT),
    ("gpt_neox", SIZES),
    ("bert", SIZES),
    ("llama", GROUPED),
    ("llama", {**GROUPED, "attention_bias": True, "tie_word_embeddings": True, "head_dim": 24}),
    ("mistral", {**GROUPED, "head_dim": 24}),
    ("mixtral", GROUPED),
    ("qwen2", GROUPED),
    ("qwen3", {**GROUPED, "head_dim": 24}),
    ("qwen3", {**GROUPED, "attention_bias": True}),
    ("qwen3_moe", QWEN3_MOE),
    ("gpt_oss", GPT_OSS),
    ("gpt_oss", {**GPT_OSS, "attention_bias": False, "tie_word_embeddings": True}),
    ("deepseek_v3", DEEPSEEK),
    ("deepseek_v3", {**DEEPSEEK, "q_lora_rank": None, "attention_bias": True, "n_shared_experts": 2}),
    ("deepseek_v3", {**DEEPSEEK, "attention_bias": True, "first_k_dense_replace": 0, "n_shared_experts": 0}),
    ("deepseek_v3", {**DEEPSEEK, "first_k_dense_replace": 3}),
    ("gemma", {**GROUPED, "head_dim": 16}),
    ("gemma2", {**GROUPED, "head_dim": 16, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma3_text", {**GROUPED, "head_dim": 16}),
]
PUBLISHED = [
    # arXiv 2412.19437, section 4.2; without the module that predicts a second token
    ("DeepSeek-V3", {**AutoConfig.for_model("deepseek_v3").to_dict()}, 671.026, 37.55),
    # arXiv 2508.10925, table 1, which does not count the embedding as active
    ("gpt-oss-120b", AutoConfig.for_model("gpt_oss").to_dict(), 116.83, 5.13 + 0.58),
]


def read_and_made(kind, sizes):
    """Returns the planner's model of a config, and the one that transformers makes."""
    config = AutoConfig.for_model(kind, **sizes)
    make = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    with torch.device("meta"):
        made = make.from_config(config)
    return model_of_config(kind, json.loads(config.to_json_string())), made


def test_every_architecture_is_counted():
    assert {kind for kind, _ in KINDS} == set(_READERS)


@pytest.mark.parametrize(("kind", "sizes"), KINDS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_model_has_the_parameters_that_transformers_makes(kind, sizes):
    read, model = read_and_made(kind, sizes)
    assert read.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (read.layers, read.hidden_size, read.sequence_length) == (3, 64, 32)


@pytest.mark.parametrize(("kind", "sizes"), KINDS, ids=lambda value: value if isinstance(value, str) else "")
def test_its_tensors_beside_embeddings_are_those_that_transformers_makes(kind, sizes):
    read, model = read_and_made(kind, sizes)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    made = [tensor.numel() for tensor in model.parameters() if id(tensor) not in tables and tensor.numel()]
    in_layers = [size for number, each in read.kinds for size in number * each.tensors_in_layer]
    norms, head = [read.hidden_size] * (read.norm_parameters // read.hidden_size), read.head_parameters
    assert sorted([*in_layers, *norms, *read.extras, *[head] * (head > 0)]) == sorted(made)


ADAPTED = [case for case in KINDS if case[0] not in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")]


def adapted(kind, sizes):
    """Returns the sizes that the planner reads, with adapters of rank 4, and a model of transformers with those of
    peft."""
    config = AutoConfig.for_model(kind, **sizes, attn_implementation="eager")
    make = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    with torch.device("meta"):
        model = peft.get_peft_model(make.from_config(config), peft.LoraConfig(r=4, target_modules="all-linear"))
    return model_of_config(kind, json.loads(config.to_json_string())).adapted(4), model


@pytest.mark.parametrize(("kind", "sizes"), ADAPTED, ids=lambda value: value if isinstance(value, str) else "")
def test_adapters_have_the_parameters_that_peft_makes(kind, sizes):
    read, model = adapted(kind, sizes)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert read.adapter_parameters == trained
    assert read.parameters + trained == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma"])
def test_a_step_of_adapters_takes_the_operations_that_torch_counts(kind):
    """But for gradients that the first layer does not need, because its input is a frozen embedding."""
    read, model = adapted(kind, GROUPED)
    tokens = torch.zeros(1, 32, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    unneeded = sum(rows * columns + 4 * rows for rows, columns in read.linear_layers[:3])
    assert step_flops(read, 32) - 2 * 32 * unneeded == counter.get_total_flops()


def counted(kind, sizes) -> tuple[int, int]:
    """Returns the parameters that the planner counts, and those that transformers makes."""
    config = AutoConfig.for_model(kind, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    read = model_of_config(kind, json.loads(config.to_json_string()))
    return read.parameters, sum(parameter.numel() for parameter in model.parameters())


small = st.integers(1, 5)


@settings(max_examples=20)
@given(small, small, small, small, small, st.booleans(), st.booleans(), st.integers(0, 4))
def test_whatever_the_sizes_models_with_experts_have_the_parameters_that_transformers_makes(
    first, second, third, fourth, fifth, biases, tied, dense
):
    shared = {"hidden_size": 8 * first, "intermediate_size": 8 * second, "num_hidden_layers": 3, "vocab_size": 50}
    shared |= {"attention_bias": biases, "tie_word_embeddings": tied, "num_experts_per_tok": 1, "pad_token_id": None}
    heads = {"num_attention_heads": 2 * third, "num_key_value_heads": third, "head_dim": 2 * fourth}
    told, made = counted("gpt_oss", {**shared, **heads, "num_local_experts": fifth + 1})
    assert told == made
    latent = {
        "q_lora_rank": 4 * fourth if dense % 2 else None,
        "kv_lora_rank": 4 * fifth,
        "qk_rope_head_dim": 2 * first,
    }
    latent |= {"qk_nope_head_dim": 3 * second, "v_head_dim": 5 * third, "num_attention_heads": third}
    experts = {"moe_intermediate_size": 8 * fourth, "n_routed_experts": 2 * fifth, "n_group": 1, "topk_group": 1}
    experts |= {"n_shared_experts": second, "first_k_dense_replace": dense, "num_key_value_heads": third}
    told, made = counted("deepseek_v3", {**shared, **latent, **experts})
    assert told == made


def test_the_operations_of_a_token_are_those_that_torch_counts_for_the_experts_that_it_visits():
    """Every matrix that a token meets takes two operations for each of its elements, so this counts active parameters
    too. Attention computes all scores."""
    for kind, sizes in (
        ("mixtral", GROUPED),
        ("qwen3_moe", QWEN3_MOE),
        ("gpt_oss", GPT_OSS),
        ("deepseek_v3", DEEPSEEK),
    ):
        config = AutoConfig.for_model(kind, **sizes, experts_implementation="eager", attn_implementation="eager")
        model, read = (
            AutoModelForCausalLM.from_config(config),
            model_of_config(kind, json.loads(config.to_json_string())),
        )
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.arange(32)[None])
        assert counter.get_total_flops() == forward_flops(read, 32), kind


@pytest.mark.parametrize(("name", "config", "billions", "active"), PUBLISHED)
def test_large_models_have_the_active_parameters_that_their_sources_tell(name, config, billions, active):
    model = model_of_config(name, config)
    assert model.parameters == pytest.approx(billions * 1e9, rel=0.001)
    assert model.active_parameters == pytest.approx(active * 1e9, rel=0.02)
