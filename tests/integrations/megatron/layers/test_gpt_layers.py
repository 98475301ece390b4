"""gpt_layer_specs: its choice of Megatron-core's parts, and its refusals."""

from types import SimpleNamespace

import pytest

from ds_lgamp.config import ConfigError

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}


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
        ({"num_moe_experts": 4}, "num_moe_experts is 4, but pipelines take dense layers; set it to None"),
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
