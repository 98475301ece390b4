"""Sizes read from a config against the parameters of transformers' own classes."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

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
    ("qwen3_moe", {**GROUPED, "moe_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2}),
    ("gemma", {**GROUPED, "head_dim": 16}),
    ("gemma2", {**GROUPED, "head_dim": 16, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma3_text", {**GROUPED, "head_dim": 16}),
]


def test_every_architecture_is_counted():
    assert {kind for kind, _ in KINDS} == set(_READERS)


@pytest.mark.parametrize(("kind", "sizes"), KINDS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_model_has_the_parameters_that_transformers_makes(kind, sizes):
    config = AutoConfig.for_model(kind, **sizes)
    make = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    with torch.device("meta"):
        model = make.from_config(config)
    read = model_of_config(kind, json.loads(config.to_json_string()))
    assert read.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (read.layers, read.hidden_size, read.sequence_length) == (3, 64, 32)
