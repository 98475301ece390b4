"""One Megatron-core transformer layer as a pipeline layer, from plain PyTorch parts or from Transformer Engine's."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import gpt_layer_specs as megatron_specs
from megatron.core.parallel_state import get_tensor_model_parallel_world_size
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.megatron.layers.attention import ScaledDotProductAttention, document_mask, random_numbers

TransformerImpl = Literal["local", "transformer_engine"]
Hidden = Tensor | tuple[Tensor, Tensor]
"""The tensors that travel between layers: the hidden state, and the documents [b, s] if attention stays inside them."""


class Rotary(NamedTuple):
    """Rotary positions of a share ``percent`` of a head's channels. The angles per token fall from 1 to 1 /
    ``base``."""

    channels: int
    percent: float
    base: int
    interleaved: bool


class TransformerBlock(nn.Module):
    """One transformer layer: takes and returns the hidden state [s, b, h].

    Args:
        layer_number: the number of the layer in the whole model, from 1.
        rotary: the rotary positions; None without them.
        attn_mask_type: ``causal``; ``no_mask`` lets every token see all others; ``arbitrary`` takes documents [b, s]
            with the hidden state, and lets a token see only earlier tokens of its document.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        rotary: Rotary | None,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        transformer_impl: TransformerImpl = "local",
    ):
        super().__init__()
        _refuse_other_ranks(config)
        spec = transformer_layer_spec(config, attn_mask_type, transformer_impl)
        self.layer = build_module(spec, config=config, layer_number=layer_number)
        self.rotary = rotary
        self.sequence_parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self.draws_alone = self.sequence_parts > 1 and max(config.hidden_dropout, config.attention_dropout) > 0
        if config.tensor_model_parallel_size > 1:
            _mark_partial_gradients(self.layer)

    def forward(self, inputs: Hidden) -> Hidden:
        hidden, documents = unpacked(inputs)
        angles = None
        if self.rotary is not None:
            angles = rotary_angles(self.rotary, hidden.shape[0] * self.sequence_parts, hidden.device)
        mask = None if documents is None else document_mask(documents)
        with random_numbers(self.draws_alone and self.training, hidden.device):
            hidden, _context = self.layer(hidden_states=hidden, attention_mask=mask, rotary_pos_emb=angles)
        return packed(hidden, documents)


def unpacked(inputs: Hidden) -> tuple[Tensor, Tensor | None]:
    return inputs if isinstance(inputs, tuple) else (inputs, None)


def packed(hidden: Tensor, documents: Tensor | None) -> Hidden:
    return hidden if documents is None else (hidden, documents)


def transformer_layer_spec(
    config: TransformerConfig, attn_mask_type: AttnMaskType, transformer_impl: TransformerImpl
) -> ModuleSpec:
    """Megatron-core's specification of a transformer layer. With ``local``, it has plain PyTorch parts, which run on
    any device, and apex's norms on a GPU if apex can be imported."""
    if transformer_impl == "transformer_engine":
        spec = megatron_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    else:
        spec = megatron_specs.get_gpt_layer_local_spec(
            normalization=config.normalization, qk_layernorm=config.qk_layernorm
        )
        attention = spec.submodules.self_attention.submodules
        attention.core_attention = ScaledDotProductAttention
        for parts, names in (
            (spec.submodules, ("input_layernorm", "pre_mlp_layernorm")),
            (attention, ("q_layernorm", "k_layernorm") if config.qk_layernorm else ()),
        ):
            for name in names:
                setattr(parts, name, _usable_norm(config, getattr(parts, name)))
    spec.submodules.self_attention.params["attn_mask_type"] = attn_mask_type
    return spec


def refuse_missing_engine(transformer_impl: TransformerImpl) -> None:
    """Raises ConfigError if Transformer Engine is asked for and cannot be imported."""
    if transformer_impl == "transformer_engine" and not megatron_specs.HAVE_TE:
        raise ConfigError(
            "transformer_impl is 'transformer_engine', but Transformer Engine cannot be imported; install NVIDIA's "
            "package for this torch and CUDA, or use 'local'"
        )


def final_norm_of(config: TransformerConfig, transformer_impl: TransformerImpl) -> nn.Module:
    """Builds the normalisation after the last layer."""
    if transformer_impl == "transformer_engine":
        norm = megatron_specs.TENorm
    else:
        norm = transformer_layer_spec(config, AttnMaskType.causal, transformer_impl).submodules.input_layernorm
    return build_module(norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)


class TorchNorm:
    """PyTorch's norm, for places where Megatron-core's choice does not run.

    Apex's norm has no kernel for the CPU. WrappedTorchNorm refuses sequence parallelism, under which each rank has
    partial gradients of the weights. This is a class, because a layer's specification takes classes.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: object
    ) -> nn.Module:
        norm = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def _usable_norm(config: TransformerConfig, norm: type) -> type:
    refused = norm is WrappedTorchNorm and config.sequence_parallel
    return TorchNorm if refused or get_accelerator().device_name() == "cpu" else norm


def _refuse_other_ranks(config: TransformerConfig) -> None:
    """Raises ConfigError unless ``config`` has the tensor-parallel size of the process groups, by which Megatron-core
    slices weights. Partial gradients and the numbers for dropout follow ``config``."""
    given, ranks = config.tensor_model_parallel_size, get_tensor_model_parallel_world_size()
    if given != ranks:
        raise ConfigError(
            f"tensor_model_parallel_size of the TransformerConfig is {given}, but initialize_model_parallel made "
            f"groups of {ranks}; give both the same size"
        )


def _mark_partial_gradients(layer: nn.Module) -> None:
    """Marks the norms of queries and keys. Every tensor-parallel rank has them whole, but only the gradient of its own
    heads."""
    for name, parameter in layer.named_parameters():
        if "q_layernorm" in name or "k_layernorm" in name:
            parameter.sequence_parallel = True  # type: ignore[attr-defined]


@functools.lru_cache
def rotary_angles(rotary: Rotary, sequence_length: int, device: torch.device) -> Tensor:
    """The angles by which attention turns queries and keys [s, 1, 1, channels]. They are constant, and all layers share
    them."""
    embedding = RotaryEmbedding(
        rotary.channels, rotary_percent=rotary.percent, rotary_base=rotary.base, use_cpu_initialization=True
    )
    # embedding(sequence_length) would move the angles to a CUDA device, even on a machine without one.
    half = embedding.get_freqs_non_repeated(sequence_length)
    angles = half.repeat_interleave(2, dim=-1) if rotary.interleaved else torch.cat((half, half), dim=-1)
    return angles[:, None, None, :].to(device)
