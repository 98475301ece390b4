"""A GPT model as a flat list of layers for DeepSpeed's PipelineModule, built from Megatron-core's parts.

Every layer takes one tensor and returns one tensor, so that a pipeline can be cut between any two of them:

    tokens [b, s] -> WordEmbedding -> PositionEmbedding -> TransformerBlock x L -> FinalNorm -> head -> logits [s, b, v]

Between layers travels only the hidden state [s, b, h] (sequence, micro-batch, hidden size: Megatron's order). What else
a transformer layer needs, causal masking and rotary angles, it derives from the sequence length.

With tensor parallelism over T ranks, weights and logits are slices: logits [s, b, v / T]. With sequence parallelism,
each rank has a part of the sequence between the layers, [s / T, b, h], from PositionEmbedding on.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    scatter_to_sequence_parallel_region,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn

from ds_lgamp.config import ConfigError

PositionType = Literal["rope", "learned_absolute"]
TIED_WEIGHT = "word_embeddings.weight"  # inside WordEmbedding


def gpt_layer_specs(
    config: TransformerConfig,
    vocab_size: int,
    max_positions: int,
    position_type: PositionType,
    tie_embeddings: bool,
) -> list[LayerSpec]:
    """The layers of a GPT model, not yet built: DeepSpeed builds each on the pipeline rank that owns it.

    With tie_embeddings the first and the last layer share one weight, and DeepSpeed keeps its copies equal.

    Raises ConfigError for mixtures of experts, and for gated layers under tensor parallelism.
    """
    if config.num_moe_experts is not None:
        raise ConfigError(f"num_moe_experts is {config.num_moe_experts}, but pipelines take dense layers; remove it")
    if config.gated_linear_unit and config.tensor_model_parallel_size > 1:
        # A rank's slice of the first matrix is a slice of each half, which a checkpoint would put behind one another.
        raise ConfigError(
            f"gated_linear_unit is True and tensor_model_parallel_size {config.tensor_model_parallel_size}, which "
            "checkpoints cannot tell from one whole matrix; set one of them to False or 1"
        )
    if tie_embeddings:
        shared = (WordEmbedding, config, vocab_size)
        embedding = TiedLayerSpec("word_embeddings", *shared, tied_weight_attr=TIED_WEIGHT)
        head = TiedLayerSpec("word_embeddings", *shared, tied_weight_attr=TIED_WEIGHT, forward_fn=tied_logits)
    else:
        embedding = LayerSpec(WordEmbedding, config, vocab_size)
        head = LayerSpec(LanguageModelHead, config, vocab_size)
    return [
        embedding,
        LayerSpec(PositionEmbedding, config, max_positions, position_type),
        *(LayerSpec(TransformerBlock, config, number, position_type) for number in range(1, config.num_layers + 1)),
        LayerSpec(FinalNorm, config),
        head,
    ]


class WordEmbedding(nn.Module):
    """Tokens [b, s] to hidden state [s, b, h]. Only this part of the embedding can be tied to the head."""

    def __init__(self, config: TransformerConfig, vocab_size: int):
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size, config.hidden_size, init_method=config.embedding_init_method, config=config
        )
        self.sequence_parallel = config.sequence_parallel

    def forward(self, tokens: Tensor) -> Tensor:
        return self.word_embeddings(tokens).transpose(0, 1).contiguous()


class PositionEmbedding(nn.Module):
    """Hidden state [s, b, h] to the same plus learned positions, then dropout. Rotary positions enter in the layers."""

    def __init__(self, config: TransformerConfig, max_positions: int, position_type: PositionType):
        super().__init__()
        self.position_embeddings = None
        if position_type == "learned_absolute":
            self.position_embeddings = nn.Embedding(max_positions, config.hidden_size)
            config.embedding_init_method(self.position_embeddings.weight)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        if self.position_embeddings is not None:
            positions = torch.arange(hidden.shape[0], device=hidden.device)
            hidden = hidden + self.position_embeddings(positions)[:, None, :]
        if not self.sequence_parallel:
            return self.dropout(hidden)
        with own_random_numbers():
            return self.dropout(scatter_to_sequence_parallel_region(hidden))


class TransformerBlock(nn.Module):
    """One Megatron-core transformer layer, hidden state [s, b, h] to [s, b, h]. Layers are numbered from 1."""

    def __init__(self, config: TransformerConfig, layer_number: int, position_type: PositionType):
        super().__init__()
        self.layer = build_module(transformer_layer_spec(config), config=config, layer_number=layer_number)
        self.rotary_channels = config.kv_channels if position_type == "rope" else None
        self.sequence_parts = config.tensor_model_parallel_size if config.sequence_parallel else 1

    def forward(self, hidden: Tensor) -> Tensor:
        angles = None
        if self.rotary_channels is not None:
            angles = rotary_angles(hidden.shape[0] * self.sequence_parts, self.rotary_channels, hidden.device)
        with own_random_numbers() if self.sequence_parts > 1 else nullcontext():
            hidden, _context = self.layer(hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles)
        return hidden


class CausalAttention(nn.Module):
    """Core attention through PyTorch's fused kernel, which masks the future without a mask tensor.

    It stands in for Megatron-core's DotProductAttention, which runs on CUDA only: that one keeps a CUDA scratch buffer
    and draws its dropout from CUDA's random state.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None, **_unused: object):
        super().__init__()
        self.dropout = config.attention_dropout
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_unused: object, **_unused_too: object) -> Tensor:
        """Query, key, value [s, b, heads, channels] to context [s, b, heads * channels]."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [b, heads, s, channels]
        context = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            scale=self.softmax_scale,
        )
        return context.permute(2, 0, 1, 3).flatten(start_dim=2)


class FinalNorm(nn.Module):
    """The normalisation after the last transformer layer, hidden state [s, b, h] to [s, b, h]."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        norm = transformer_layer_spec(config).submodules.input_layernorm
        self.norm = build_module(norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class LanguageModelHead(nn.Module):
    """Hidden state [s, b, h] to logits [s, b, v] with a weight of its own."""

    def __init__(self, config: TransformerConfig, vocab_size: int):
        super().__init__()
        self.output_layer = ColumnParallelLinear(
            config.hidden_size, vocab_size, config=config, init_method=config.init_method, bias=False
        )

    def forward(self, hidden: Tensor) -> Tensor:
        logits, _bias = self.output_layer(hidden)
        return logits


def tied_logits(embedding: WordEmbedding, hidden: Tensor) -> Tensor:
    """Hidden state [s, b, h] to logits [s, b, v] with the weight of the word embedding."""
    if embedding.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    return nn.functional.linear(hidden, embedding.word_embeddings.weight)


def language_model_loss(logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy of logits [s, b, v]; labels are (target tokens [b, s], loss mask [b, s]: 1 if one counts)."""
    targets, loss_mask = (tensor.transpose(0, 1).contiguous() for tensor in labels)
    losses = vocab_parallel_cross_entropy(logits.float(), targets)
    return (losses * loss_mask).sum() / loss_mask.sum().clamp(min=1)


class SequenceParallelNorm:
    """Stands for Megatron-core's plain norm, which refuses sequence parallelism: each rank sees a part of the sequence,
    so that the gradients of its weights are partial. A class, because that is what a layer's specification takes."""

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: object
    ) -> nn.Module:
        norm = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm


def transformer_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Megatron-core's transformer layer of plain PyTorch parts, with attention that runs on any device."""
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    if config.sequence_parallel:
        for norm in ("input_layernorm", "pre_mlp_layernorm"):
            if getattr(spec.submodules, norm) is WrappedTorchNorm:
                setattr(spec.submodules, norm, SequenceParallelNorm)
    return spec


def own_random_numbers() -> AbstractContextManager[None]:
    """Where each tensor-parallel rank computes another part, Megatron-core's generator of this rank, once seeded by
    ``model_parallel_cuda_manual_seed``."""
    tracker = get_cuda_rng_tracker()
    return tracker.fork() if tracker.get_states() else nullcontext()


@functools.lru_cache
def rotary_angles(sequence_length: int, channels: int, device: torch.device) -> Tensor:
    """The angles by which attention turns queries and keys, [s, 1, 1, channels]; constant, so all layers share them."""
    rotary = RotaryEmbedding(channels, rotary_percent=1.0, use_cpu_initialization=True)
    # Not rotary(sequence_length): that call moves the angles to a CUDA device whatever the machine has.
    half = rotary.get_freqs_non_repeated(sequence_length)
    return torch.cat((half, half), dim=-1)[:, None, None, :].to(device)
