"""One Megatron-core transformer layer as a pipeline layer, from plain PyTorch parts or from Transformer Engine's, with
its masks and with attention through PyTorch's fused kernels."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Literal, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import gpt_layer_specs as megatron_specs
from megatron.core.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.megatron.layers.experts import (
    Balance,
    divide,
    has_experts,
    noting,
    refuse_other_expert_ranks,
    scale_auxiliary_losses,
)
from ds_lgamp.runtime.recompute import default_sources, hashed_seed, undisturbed

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
        self.has_experts = has_experts(config, layer_number)
        spec = transformer_layer_spec(config, attn_mask_type, transformer_impl, self.has_experts)
        self.layer = build_module(spec, config=config, layer_number=layer_number)
        self.rotary = rotary
        self.balances: dict[str, Balance] = {}
        """The auxiliary losses of its experts since :func:`~.gpt_layers.auxiliary_losses` took them last, by name."""
        self.tensor_ranks = config.tensor_model_parallel_size
        self.sequence_parts = self.tensor_ranks if config.sequence_parallel else 1
        self.draws_alone = self.sequence_parts > 1 and max(config.hidden_dropout, config.attention_dropout) > 0
        if config.tensor_model_parallel_size > 1:
            _mark_partial_gradients(self.layer)

    def forward(self, inputs: Hidden) -> Hidden:
        hidden, documents = unpacked(inputs)
        angles = None
        if self.rotary is not None:
            angles = rotary_angles(self.rotary, hidden.shape[0] * self.sequence_parts, hidden.device)
        mask = None if documents is None else document_mask(documents)
        draws = random_numbers(self.draws_alone and self.training, hidden.device)
        with draws, noting(self.balances, self.tensor_ranks) if self.has_experts else nullcontext():
            hidden, _context = self.layer(hidden_states=hidden, attention_mask=mask, rotary_pos_emb=angles)
        return packed(hidden, documents)

    def scale_own_losses(self, factor: float) -> None:
        """Multiplies the gradients of the losses that balance its experts by ``factor`` from now on."""
        if self.has_experts:
            scale_auxiliary_losses(factor, next(self.parameters()).device)


def unpacked(inputs: Hidden) -> tuple[Tensor, Tensor | None]:
    return inputs if isinstance(inputs, tuple) else (inputs, None)


def packed(hidden: Tensor, documents: Tensor | None) -> Hidden:
    return hidden if documents is None else (hidden, documents)


def transformer_layer_spec(
    config: TransformerConfig,
    attn_mask_type: AttnMaskType,
    transformer_impl: TransformerImpl,
    with_experts: bool = False,
) -> ModuleSpec:
    """Megatron-core's specification of a transformer layer. With ``local``, it has plain PyTorch parts, which run on
    any device, and apex's norms on a GPU if apex can be imported."""
    options = {"qk_layernorm": config.qk_layernorm}
    if with_experts:
        options["num_experts"] = config.num_moe_experts
    if transformer_impl == "transformer_engine":
        spec = megatron_specs.get_gpt_layer_with_transformer_engine_spec(**options)
    else:
        spec = megatron_specs.get_gpt_layer_local_spec(normalization=config.normalization, **options)
        attention = spec.submodules.self_attention.submodules
        attention.core_attention = ScaledDotProductAttention
        for parts, names in (
            (spec.submodules, ("input_layernorm", "pre_mlp_layernorm")),
            (attention, ("q_layernorm", "k_layernorm") if config.qk_layernorm else ()),
        ):
            for name in names:
                setattr(parts, name, _usable_norm(config, getattr(parts, name)))
    spec.submodules.self_attention.params["attn_mask_type"] = attn_mask_type
    if with_experts and config.expert_model_parallel_size > 1:
        divide(spec)
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
    refuse_other_expert_ranks(config)


def _mark_partial_gradients(layer: nn.Module) -> None:
    """Marks the norms of queries and keys. Every tensor-parallel rank has them whole, but only the gradient of its own
    heads."""
    for name, parameter in layer.named_parameters():
        if "q_layernorm" in name or "k_layernorm" in name:
            parameter.sequence_parallel = True  # type: ignore[attr-defined]


@functools.lru_cache
def rotary_angles(rotary: Rotary, sequence_length: int, device: torch.device) -> Tensor:
    """Returns the angles by which attention turns queries and keys [s, 1, 1, channels]. They are constant, and all
    layers share them."""
    embedding = RotaryEmbedding(
        rotary.channels, rotary_percent=rotary.percent, rotary_base=rotary.base, use_cpu_initialization=True
    )
    # embedding(sequence_length) would move the angles to a CUDA device, even on a machine without one.
    half = embedding.get_freqs_non_repeated(sequence_length)
    angles = half.repeat_interleave(2, dim=-1) if rotary.interleaved else torch.cat((half, half), dim=-1)
    return angles[:, None, None, :].to(device)


class ScaledDotProductAttention(nn.Module):
    """Core attention through PyTorch's fused kernels.

    It stands in for Megatron-core's DotProductAttention, which runs on CUDA only, because it keeps a CUDA scratch
    buffer and draws its dropout from CUDA's random state.
    """

    def __init__(
        self,
        config: TransformerConfig,
        attn_mask_type: AttnMaskType,
        softmax_scale: float | None,
        **_unused: object,
    ):
        super().__init__()
        self.dropout = config.attention_dropout
        self.is_causal = attn_mask_type is AttnMaskType.causal
        self.softmax_scale = softmax_scale
        self.draws_alone = config.tensor_model_parallel_size > 1

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *_unused: object,
        **_unused_too: object,
    ) -> Tensor:
        """Returns the context [s, b, heads * channels].

        Args:
            query: [s, b, heads, channels].
            key: [s, b, groups, channels]; ``value`` has the same shape.
            attention_mask: broadcasts to [b, heads, s, s], True hides; None hides nothing.
        """
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [b, heads, s, channels]
        shared = query.shape[1] // key.shape[1]
        if attention_mask is not None and shared > 1:
            # Of torch's fused kernels, most take a mask or shared keys, not both. The others keep all scores.
            key, value = (tensor.repeat_interleave(shared, dim=1) for tensor in (key, value))
        dropout = self.dropout if self.training else 0.0
        with random_numbers(self.draws_alone and dropout > 0, query.device):
            context = nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=None if attention_mask is None else _bias(attention_mask, query.dtype),
                dropout_p=dropout,
                is_causal=self.is_causal,
                scale=self.softmax_scale,
                enable_gqa=attention_mask is None and shared > 1,
            )
        return context.permute(2, 0, 1, 3).flatten(start_dim=2)


def document_numbers(tokens: Tensor, end_of_document: int) -> Tensor:
    """Returns the number of each token's document [b, s], counted within the sample. An end token is the last of its
    document."""
    ends = (tokens == end_of_document).int()
    return ends.cumsum(dim=1, dtype=torch.int32) - ends


def document_positions(documents: Tensor) -> Tensor:
    """Returns the position of each token within its document [b, s], from the documents [b, s]."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = documents.diff(dim=1, prepend=documents[:, :1]) != 0
    return index - torch.where(begins, index, 0).cummax(dim=1).values


def _remembered(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Lets ``compute`` return its last result again for the same tensor and arguments, as long as that tensor is alive.

    The blocks of a chunk hand on one tensor of documents. They share its mask, and what autograd saves of it.
    """
    remembered: list[Any] = []

    @wraps(compute)
    def computed(tensor: Tensor, *arguments: Any) -> Tensor:
        if not remembered or remembered[0]() is not tensor or remembered[1] != arguments:
            remembered[:] = weakref.ref(tensor, lambda _: remembered.clear()), arguments, compute(tensor, *arguments)
        result: Tensor = remembered[2]
        return result

    return computed


@_remembered
def _bias(attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what attention adds to its scores. torch makes it of a mask, too, but in every layer anew."""
    return torch.zeros_like(attention_mask, dtype=dtype).masked_fill_(attention_mask, float("-inf"))


@_remembered
def document_mask(documents: Tensor) -> Tensor:
    """Returns the attention mask [b, 1, s, s] from the documents [b, s]. It hides later tokens and other documents."""
    sequence = documents.shape[1]
    future = torch.ones(sequence, sequence, dtype=torch.bool, device=documents.device).triu(diagonal=1)
    return ((documents[:, :, None] != documents[:, None, :]) | future)[:, None]


def random_numbers(own: bool, device: torch.device) -> AbstractContextManager[None]:
    """Returns a context for random numbers under tensor parallelism.

    Args:
        own: whether ranks compute different parts, so that each rank draws numbers of its own. Otherwise all ranks draw
            the same numbers from torch's generators.
    """
    return _own_random_numbers(device) if own else nullcontext()


@contextmanager
def _own_random_numbers(device: torch.device) -> Iterator[None]:
    """Draws numbers of this tensor-parallel rank alone.

    Their seed comes from torch's generator of the CPU. Recomputation restores that generator, and so it draws the same
    numbers again. Megatron-core's tracker would be another state, on CUDA only, which scripts would have to seed.
    """
    sources = default_sources(device)
    seed = hashed_seed(int(torch.randint(2**62, (), device="cpu")), get_tensor_model_parallel_rank())
    with undisturbed(sources):
        for source in sources:
            source.seed(seed)
        yield
