"""What it brings to compute beside all-to-alls of tokens, on the clock."""

import json
from dataclasses import replace

import pytest

from ds_lgamp.planner.cluster import named_cluster
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.models import read_model
from ds_lgamp.planner.work import Work, exact_seconds
from ds_lgamp.schedule.program import build_timed_program
from ds_lgamp.schedule.simulate import simulate

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
BEST = Configuration(512, 2, 1, 2, 4, zero_stage=3, schedule="layered", chunks_per_rank=30, expert_ranks=8)
"""The plan that ``ds_lgamp plan`` finds for 4,096 sequences on 1,024 H100, but for gathered weights on the host."""


def test_a_step_of_deepseek_v3_gets_as_much_shorter_as_the_docs_say(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(DEEPSEEK_V3))
    model, cluster = read_model(str(file), 4096), named_cluster("h100", 1024)
    alone, spec = exact_seconds(model, cluster, BEST), replace(BEST.spec, overlaps_exchanges=True)
    costs = Work(model, cluster, BEST).costs()
    beside = simulate(spec, build_timed_program(spec), costs, sends_at_once=True).step_time
    assert 1 - beside / alone == pytest.approx(0.057, abs=0.0005)
