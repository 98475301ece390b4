"""Masks between tokens, and attention through PyTorch's fused kernels."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_rank
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from ds_lgamp.runtime.recompute import default_sources, hashed_seed, undisturbed


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
    """The number of each token's document [b, s], counted within the sample. An end token is the last of its
    document."""
    ends = (tokens == end_of_document).int()
    return ends.cumsum(dim=1, dtype=torch.int32) - ends


def document_positions(documents: Tensor) -> Tensor:
    """The position of each token within its document [b, s], from the documents [b, s]."""
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
    """What attention adds to its scores. torch makes it of a mask, too, but in every layer anew."""
    return torch.zeros_like(attention_mask, dtype=dtype).masked_fill_(attention_mask, float("-inf"))


@_remembered
def document_mask(documents: Tensor) -> Tensor:
    """The attention mask [b, 1, s, s] from the documents [b, s]. It hides later tokens and other documents."""
    sequence = documents.shape[1]
    future = torch.ones(sequence, sequence, dtype=torch.bool, device=documents.device).triu(diagonal=1)
    return ((documents[:, :, None] != documents[:, None, :]) | future)[:, None]


def random_numbers(own: bool, device: torch.device) -> AbstractContextManager[None]:
    """A context for random numbers under tensor parallelism.

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
