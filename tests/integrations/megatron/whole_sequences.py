"""Replaces parts of Megatron-core's PyTorch layers that cannot share a sequence among ranks. Import megatron's shim
first."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn


class WholeSequenceAttention(nn.Module):
    """Core attention under context parallelism, instead of Transformer Engine's. Every rank gathers all keys and
    values."""

    def __init__(self, config: Any, *_unused: Any, **_unused_too: Any) -> None:
        super().__init__()
        self.ranks = config.context_parallel_size

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_unused: Any, **_unused_too: Any) -> Tensor:
        """Maps query, key and value [s, b, heads, channels] of this rank to [s, b, heads * channels]."""
        group = parallel_state.get_context_parallel_group()
        positions = [self._positions(rank, len(query)) for rank in range(self.ranks)]
        hidden = torch.cat(positions) > positions[group.rank()][:, None]
        keys, values = (_Gather.apply(tensor, group) for tensor in (key, value))
        context = nn.functional.scaled_dot_product_attention(
            *(tensor.permute(1, 2, 0, 3) for tensor in (query, keys, values)), attn_mask=~hidden
        )
        return context.permute(2, 0, 1, 3).flatten(start_dim=2)

    def _positions(self, rank: int, own: int) -> Tensor:
        """Returns this rank's positions. Of 2 * ranks parts, a rank has one and the one at the same distance from the
        end."""
        part = torch.arange(own // 2)
        return torch.cat([part + own // 2 * rank, part + own // 2 * (2 * self.ranks - 1 - rank)])


class _Gather(torch.autograd.Function):
    """Gathers along the first dimension. Each rank gets the sum of all gradients of its part."""

    @staticmethod
    def forward(context: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        context.group = group
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=context.group)
        return total.chunk(context.group.size())[context.group.rank()], None


def sequence_parallel_norm(_cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> nn.Module:
    """Replaces Megatron-core's WrappedTorchNorm, which refuses sequence parallelism."""
    norm = nn.LayerNorm(hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm
