"""Small models of Megatron-core, whose layers have the same weights wherever they are."""

import zlib
from typing import Any

import torch

VOCABULARY, SEQUENCE = 64, 16


def build_model(name: str, config: Any, **options: Any) -> Any:
    """Builds a model of Megatron-core, or one chunk of it."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.models.T5 import T5Model, t5_spec

    sizes = {"vocab_size": VOCABULARY, "max_sequence_length": SEQUENCE}
    if name == "BertModel":
        return BertModel(config, 0, bert_layer_local_spec, **sizes, **options)
    if name == "T5Model":
        specs = (
            t5_spec.get_t5_encoder_with_local_block_spec(config.num_layers),
            t5_spec.get_t5_decoder_with_local_block_spec(config.num_layers),
        )
        return T5Model(config, config, *specs, **sizes, **options)
    if name == "HybridModel":
        return _hybrid_model(config, **sizes, **options)
    layer_spec = _layer_spec(config)
    if config.mtp_num_layers:
        # Layers that predict several tokens take no learned positions.
        spec = get_gpt_mtp_block_spec(config, layer_spec, False, vp_stage=options.get("vp_stage"))
        options |= {"position_embedding_type": "rope", "mtp_block_spec": spec}
    return GPTModel(config, layer_spec, **sizes, **options)


def _hybrid_model(config: Any, **options: Any) -> Any:
    """Builds a chunk of a model with attention, Mamba and MLP layers, of which every chunk has as many."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from testing.mamba_layers import stack

    chunks = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    layers, each = "*-M-" * (config.num_layers // 4), config.num_layers // chunks
    pattern = "|".join(layers[start : start + each] for start in range(0, len(layers), each))
    return HybridModel(config, stack, hybrid_layer_pattern=pattern, **options)


def _layer_spec(config: Any) -> Any:
    """Returns Megatron-core's layer of PyTorch parts, with replacements for its missing parts."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from tests.integrations.megatron.whole_sequences import WholeSequenceAttention, sequence_parallel_norm

    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm)
    if config.context_parallel_size > 1:
        spec.submodules.self_attention.submodules.core_attention = WholeSequenceAttention
    if config.sequence_parallel:
        WrappedTorchNorm.__new__ = sequence_parallel_norm
    return spec


def initialise(model: Any) -> None:
    """Gives a layer, and an expert, the same weights wherever it is. Every tensor-parallel rank takes its slice of the
    whole."""
    from megatron.core import parallel_state

    config = model.config
    for name, parameter in model.named_parameters():
        group = parallel_state.get_tensor_model_parallel_group()
        parts = name.split(".")
        if "layers" in parts:
            where = parts.index("layers") + 1
            parts[where] = str(getattr(model, parts[0]).layers[int(parts[where])].layer_number)
        if "local_experts" in parts:
            where, own = parts.index("local_experts") + 1, config.num_moe_experts // config.expert_model_parallel_size
            parts[where] = str(int(parts[where]) + own * parallel_state.get_expert_model_parallel_rank())
            group = parallel_state.get_expert_tensor_parallel_group()
        rank, ranks = group.rank(), group.size()
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            parts = ["embedding", "word_embeddings", "weight"]
        sliced = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
        shape = [size * (ranks if dimension == sliced else 1) for dimension, size in enumerate(parameter.shape)]
        generator = torch.Generator().manual_seed(zlib.crc32(".".join(parts).encode()))
        whole = torch.randn(shape, generator=generator) * 0.05
        if parameter.dim() == 1 and "norm" in name and name.endswith("weight"):
            whole += 1
        with torch.no_grad():
            parameter.copy_(whole if sliced < 0 else whole.chunk(ranks, sliced)[rank])
