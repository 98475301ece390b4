"""gpt_layer_specs: its choice of Megatron-core's parts, and its refusals."""

from types import SimpleNamespace

import pytest

from ds_lgamp.config import ConfigError

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
ALL_TO_ALL = {"moe_token_dispatcher_type": "alltoall"}


def config(**options):
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(**SIZES, **options)


def layer_specs(given, **options):
    from ds_lgamp.integrations.megatron.layers.gpt_layers import gpt_layer_specs

    return gpt_layer_specs(given, 64, 16, "rope", tie_embeddings=False, **options)


@pytest.fixture
def block():
    return pytest.importorskip("ds_lgamp.integrations.megatron.layers.transformer_block")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gated_linear_unit": True, "tensor_model_parallel_size": 2}, "gated_linear_unit is True and tensor_model_"),
        ({"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size is 2, but DeepSpeed's PipelineModule"),
        ({"context_parallel_size": 2}, "context_parallel_size is 2, but every rank sees the whole sequence"),
        ({"heterogeneous_block_specs": True}, "heterogeneous_block_specs is True, but all layers are alike; set it to"),
        ({"fp8": "hybrid"}, "fp8 is 'hybrid', but layers do not enter .*; set it to None"),
        ({"fp4": "e2m1"}, "fp4 is 'e2m1', but layers do not enter .*; set it to None"),
        ({"window_size": (4, 0)}, r"window_size is \(4, 0\), but PyTorch's attention has no window"),
        ({"softmax_type": "off-by-one"}, "softmax_type is 'off-by-one', but PyTorch's attention has one softmax"),
        ({"layernorm_zero_centered_gamma": True}, "layernorm_zero_centered_gamma is True, but PyTorch's norms"),
    ],
)
def test_layers_that_cannot_be_had_are_refused(options, words):
    import torch

    given = config(**{"pipeline_dtype": torch.float32, **options})
    with pytest.raises(ConfigError, match=words):
        layer_specs(given)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"add_bias_linear": True}, "add_bias_linear is True beside num_moe_experts, but without Transformer Engine"),
        ({"moe_grouped_gemm": True}, "moe_grouped_gemm is True beside num_moe_experts, but its kernels need a GPU"),
        (
            {"moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": 16, **ALL_TO_ALL},
            "moe_shared_expert_overlap is True beside num_moe_experts, but its streams need a GPU",
        ),
        (
            {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
            "moe_router_enable_expert_bias is True beside num_moe_experts, but no step updates the biases; set it to F",
        ),
        ({"moe_enable_routing_replay": True}, "moe_enable_routing_replay is True beside num_moe_experts, but micro-b"),
        ({"moe_router_force_load_balancing": True}, "moe_router_force_load_balancing is True beside num_moe_experts"),
        ({"moe_input_jitter_eps": 0.1}, "moe_input_jitter_eps is 0.1 beside num_moe_experts, but tensor-parallel"),
        ({"moe_latent_size": 8}, "moe_latent_size is 8 beside num_moe_experts, but nobody has tried it; set it to Non"),
        ({"calculate_per_token_loss": True}, "calculate_per_token_loss is True beside num_moe_experts, but losses are"),
        ({"moe_token_dispatcher_type": "flex"}, "moe_token_dispatcher_type is 'flex', which needs a GPU"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
            "recompute_modules has 'moe', whose recomputation in the backward pass hides auxiliary losses",
        ),
        (
            {"moe_router_load_balancing_type": "global_aux_loss"},
            "moe_router_load_balancing_type is 'global_aux_loss', but 'global_aux_loss' depends on other micro-batches",
        ),
        (
            {"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.1]},
            r"moe_router_load_balancing_type is \['aux_loss', 'global_aux_loss'\], but 'global_aux_loss' depends",
        ),
        (
            {"moe_layer_freq": [1, 0, 1]},
            "moe_layer_freq has 3 numbers, but num_layers is 2; give it one for",
        ),
        ({"expert_model_parallel_size": 3}, "expert_model_parallel_size is 3, which does not divide the 4 experts"),
        (
            {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
            "expert_model_parallel_size is 2 and tensor_model_parallel_size 2, which nobody has tried together",
        ),
        (
            {"expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 2, "sequence_parallel": True},
            "expert_tensor_parallel_size is 1, but experts are sliced as the other layers; set it to .*, 2",
        ),
        ({"tensor_model_parallel_size": 2}, "sequence_parallel is False beside num_moe_experts and tensor_model_para"),
    ],
)
def test_experts_that_cannot_be_had_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        layer_specs(config(**{"num_moe_experts": 4, "add_bias_linear": False, **options}))


def test_latent_attention_is_refused():
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    with pytest.raises(ConfigError, match="multi_latent_attention is True, but layers have plain self-attention"):
        layer_specs(MLATransformerConfig(**SIZES))


@pytest.mark.parametrize("option", ["reset_attention_mask", "reset_position_ids"])
def test_options_for_documents_need_the_token_that_ends_one(option):
    with pytest.raises(ConfigError, match=f"{option} is True, but end_of_document is None; name the token"):
        layer_specs(config(), **{option: True})


def test_transformer_engine_is_refused_where_it_is_missing(block, monkeypatch):
    monkeypatch.setattr(block.megatron_specs, "HAVE_TE", False)
    with pytest.raises(ConfigError, match="transformer_impl is 'transformer_engine', but Transformer Engine cannot be"):
        layer_specs(config(), transformer_impl="transformer_engine")


def test_transformer_engines_layers_are_asked_for_where_it_is_there(block, monkeypatch):
    from megatron.core.transformer.enums import AttnMaskType

    class EnginesNorm:
        def __init__(self, **given):
            self.given = given

    asked = []
    spec = block.megatron_specs.get_gpt_layer_local_spec()
    attention = spec.submodules.self_attention.submodules.core_attention

    def engines_spec(**given):
        asked.append(given)
        return spec

    monkeypatch.setattr(block.megatron_specs, "HAVE_TE", True)
    monkeypatch.setattr(block.megatron_specs, "TENorm", EnginesNorm, raising=False)
    monkeypatch.setattr(block.megatron_specs, "get_gpt_layer_with_transformer_engine_spec", engines_spec)
    # PyTorch's parts cannot do these, but Transformer Engine's might.
    given = config(qk_layernorm=True, window_size=(4, 0), layernorm_epsilon=1e-3)
    options = {"end_of_document": 0, "reset_attention_mask": True, "transformer_impl": "transformer_engine"}
    *_, last_block, norm, _head = layer_specs(given, **options)
    _config, _number, _rotary, mask, implementation = last_block.module_args
    assert block.transformer_layer_spec(given, mask, implementation) is spec and asked == [{"qk_layernorm": True}]
    assert spec.submodules.self_attention.submodules.core_attention is attention
    assert spec.submodules.self_attention.params["attn_mask_type"] is AttnMaskType.arbitrary
    made = norm.typename(*norm.module_args).norm
    assert isinstance(made, EnginesNorm) and made.given == {"config": given, "hidden_size": 32, "eps": 1e-3}


def test_apex_has_the_norms_on_a_gpu_where_it_is_there(block, monkeypatch):
    import megatron.core.models.backends as backends
    from megatron.core.transformer.enums import AttnMaskType

    class ApexNorm:
        pass

    def norms(**options):
        parts = block.transformer_layer_spec(config(**options), AttnMaskType.causal, "local").submodules
        attention = parts.self_attention.submodules
        return {parts.input_layernorm, parts.pre_mlp_layernorm, attention.q_layernorm, attention.k_layernorm}

    monkeypatch.setattr(backends, "LNImpl", ApexNorm)
    assert norms(qk_layernorm=True) == {block.TorchNorm}
    monkeypatch.setattr(block, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    assert norms(qk_layernorm=True) == {ApexNorm}
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "qk_layernorm": True}
    assert norms(**parallel) == {ApexNorm}
    monkeypatch.setattr(backends, "LNImpl", block.WrappedTorchNorm)
    assert norms(qk_layernorm=True) == {block.WrappedTorchNorm}
    assert norms(**parallel) == {block.TorchNorm}
