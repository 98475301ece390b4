"""What all contenders train: a stack of equal transformer blocks, the same weights, the same data, in fp32."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

LEARNING_RATE = 1e-3
ADAM_EPSILON = 1e-4
"""A smaller one amplifies rounding until losses of different summation orders cannot be compared."""


class ModelSize(NamedTuple):
    """A model and its micro-batches."""

    blocks: int = 8
    width: int = 128
    sequence: int = 32
    samples: int = 1
    """Sequences of a micro-batch."""


class Block(nn.Module):
    """A pre-norm transformer block with causal attention; its weights depend on ``index`` alone.

    Args:
        index: which block of the model this is.
        width: the hidden size; heads have 32.
        recompute: whether its activations are computed again in the backward pass.
    """

    def __init__(self, index: int, width: int, recompute: bool = False) -> None:
        super().__init__()
        self.heads, self.recompute = width // 32, recompute
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            self.norm_attention = nn.LayerNorm(width)
            self.mix = nn.Linear(width, 3 * width)
            self.project = nn.Linear(width, width)
            self.norm_feed_forward = nn.LayerNorm(width)
            self.expand = nn.Linear(width, 4 * width)
            self.contract = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[samples, sequence, width] to the same."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._forward, hidden, use_reentrant=False)
        return self._forward(hidden)

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.mix(self.norm_attention(hidden)).chunk(3, dim=-1)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(attended.transpose(1, 2).flatten(2))
        return hidden + self.contract(nn.functional.gelu(self.expand(self.norm_feed_forward(hidden))))


def build_blocks(size: ModelSize, indices: Sequence[int], recompute: bool) -> list[Block]:
    return [Block(index, size.width, recompute) for index in indices]


def loss_function(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(hidden, target)


def micro_batch(size: ModelSize, step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``index``-th micro-batch of a step over all data-parallel ranks: input and target,
    [samples, sequence, width] each."""
    generator = torch.Generator().manual_seed(100_000 * step + index)
    shape = (size.samples, size.sequence, size.width)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def build_optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=ADAM_EPSILON)


@lru_cache
def reference_losses(size: ModelSize, data_ranks: int, steps: tuple[int, ...]) -> list[float]:
    """The mean losses of one process without parallelism.

    Args:
        steps: the micro-batches per data-parallel rank of every step.
    """
    model = nn.Sequential(*build_blocks(size, range(size.blocks), recompute=False))
    optimizer = build_optimizer(model.parameters())
    losses = []
    for step, micro_batches in enumerate(steps):
        count = micro_batches * data_ranks
        total = 0.0
        for index in range(count):
            inputs, target = micro_batch(size, step, index)
            loss = loss_function(model(inputs), target) / count
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
