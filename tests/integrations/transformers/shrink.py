"""Makes small configurations of any architecture of transformers: whatever gives a size is set to a small one."""

import dataclasses
import inspect
from typing import Any

VOCABULARY = 64
_SMALL = {
    1: (
        "n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace "
        "num_dense_layers num_nextn_predict_layers num_mtp_layers o_groups index_topk_blocks"
    ),
    2: (
        "num_key_value_heads n_head_kv num_kv_heads num_experts_per_tok moe_k moe_topk top_k_experts "
        "swa_num_key_value_heads zero_expert_num linear_num_key_heads linear_num_value_heads linear_num_heads "
        "num_codebooks num_code_groups index_n_heads"
    ),
    4: (
        "num_hidden_layers n_layer n_layers num_layers max_window_layers num_attention_heads n_head n_heads "
        "num_heads swa_num_attention_heads num_sliding_attention_heads num_experts n_routed_experts "
        "num_local_experts moe_num_experts sliding_window sliding_window_size keep_window_size index_topk "
        "index_block_size index_kpool"
    ),
    8: (
        "head_dim swa_head_dim v_head_dim qk_rope_head_dim qk_nope_head_dim index_head_dim "
        "linear_key_head_dim rotary_dim linear_value_head_dim linear_head_dim gated_norm_rank laurel_rank "
        "d_rel hidden_size_per_layer_input block_size global_head_dim"
    ),
    16: (
        "q_lora_rank kv_lora_rank moe_intermediate_size shared_expert_intermediate_size o_lora_rank "
        "shared_experts_intermediate_size expert_ffn_hidden_size shared_intermediate_size share_expert_dim "
        "qk_head_dim"
    ),
    32: (
        "hidden_size n_embd d_model dim embedding_dim moe_hidden_size prediction_head_size dim_model_base "
        "word_embed_proj_dim"
    ),
    48: (
        "intermediate_size ffn_hidden_size ffn_dim hidden_dim prefix_dense_intermediate_size "
        "dense_intermediate_size n_inner"
    ),
    VOCABULARY: (
        "vocab_size codebook_size vision_vocab_size vocab_size_per_layer_input max_position_embeddings "
        "n_positions max_seq_len rel_extent original_max_position_embeddings additional_vocab_size"
    ),
}
SIZES: dict[str, Any] = {name: size for size, names in _SMALL.items() for name in names.split()}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"rope_parameters": {**_ROTARY, "mrope_section": [1, 1, 2]}}
OTHERS: dict[str, dict[str, Any]] = {
    "cosmos3_edge_text": _MROPE,
    "deepseek_v2": {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_key_value_heads": 4},
    "glm4v_text": _MROPE,
    "glm4v_moe_text": {"rope_parameters": {**_ROTARY, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}},
    "glm5_next_text": {"num_key_value_heads": 4},
    "glm_image_text": _MROPE,
    "glm_ocr_text": _MROPE,
    "ministral": {"sliding_window": 4},
    "paddleocr_vl_text": _MROPE,
    "qwen2_5_omni_text": _MROPE,
    "qwen2_5_vl_text": _MROPE,
    "qwen2_vl_text": _MROPE,
    "step3p5": {"sliding_window": 4},
    "cohere_compass_text": {"sliding_window": 4},
}
"""Values that an architecture needs beside small sizes, by model type."""


def small(config_class: type, **given: Any) -> Any:
    """Returns a configuration of ``config_class`` with small sizes, and ``given`` values for other fields."""
    fields = _defaults(config_class)
    sizes = {name: size for name, size in SIZES.items() if name in fields and fields[name] is not None}
    dropout = {name: 0.0 for name in fields if ("dropout" in name or "pdrop" in name) and "use" not in name}
    # Ahead of transformers 5, base classes take them.
    tokens = {name: number for name, number in TOKENS.items() if name in fields or "kwargs" in fields}
    if "kv_lora_rank" in fields:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    others = OTHERS.get(getattr(config_class, "model_type", ""), {})
    return config_class(**{**sizes, **dropout, **tokens, **others, **given})


def _defaults(config_class: type) -> dict[str, Any]:
    """Returns the defaults of all fields. Configurations are dataclasses since transformers 5."""
    if dataclasses.is_dataclass(config_class):
        return {field.name: field.default for field in dataclasses.fields(config_class)}
    return {name: parameter.default for name, parameter in inspect.signature(config_class).parameters.items()}
