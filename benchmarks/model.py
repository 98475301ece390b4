"""The model that all contenders train: a stack of equal transformer blocks with the same weights and data, in fp32."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

LEARNING_RATE = 1e-3
ADAM_EPSILON = 1e-4
"""A smaller epsilon amplifies rounding, so that losses of different summation orders could not be compared."""


class ModelSize(NamedTuple):
    """A model and its micro-batches."""

    blocks: int = 8
    width: int = 128
    sequence: int = 32
    samples: int = 1
    """Sequences per micro-batch."""
    vocabulary: int = 0
    """Number of tokens that the first block embeds and the last one predicts. 0 means that inputs and outputs are
    hidden states."""


class Block(nn.Module):
    """A pre-norm transformer block with causal attention. Its weights depend only on ``size`` and ``index``.

    If the model has a vocabulary, the first block begins with embeddings and the last one ends with a norm and a head.

    Args:
        index: index of the block in the model.
        size: size of the model; heads have width 32.
        recompute: whether to recompute the activations in the backward pass. The last block does not, because its
            backward follows its forward.
        all_at_turn: whether the last block recomputes too, because all micro-batches pass it before its first backward.
    """

    def __init__(self, index: int, size: ModelSize, recompute: bool = False, all_at_turn: bool = False) -> None:
        super().__init__()
        width = size.width
        self.heads = width // 32
        self.recompute = recompute and (all_at_turn or index < size.blocks - 1)
        self.is_first, self.is_last = (size.vocabulary > 0 and index == end for end in (0, size.blocks - 1))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            self.norm_attention = nn.LayerNorm(width)
            self.mix = nn.Linear(width, 3 * width)
            self.project = nn.Linear(width, width)
            self.norm_feed_forward = nn.LayerNorm(width)
            self.expand = nn.Linear(width, 4 * width)
            self.contract = nn.Linear(4 * width, width)
            if self.is_first:
                self.embedding = nn.Embedding(size.vocabulary, width)
                self.positions = nn.Parameter(torch.randn(size.sequence, width))
            if self.is_last:
                self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, size.vocabulary, bias=False))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Maps hidden states [samples, sequence, width] to the same shape.

        With a vocabulary, the first block takes tokens [samples, sequence] and the last one returns logits [samples,
        sequence, vocabulary].
        """
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._forward, inputs, use_reentrant=False)
        return self._forward(inputs)

    def _forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(inputs) + self.positions if self.is_first else inputs
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.mix(self.norm_attention(hidden)).chunk(3, dim=-1)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(attended.transpose(1, 2).flatten(2))
        hidden = hidden + self.contract(nn.functional.gelu(self.expand(self.norm_feed_forward(hidden))))
        return self.head(hidden) if self.is_last else hidden


def build_blocks(size: ModelSize, indices: Sequence[int], recompute: bool, all_at_turn: bool = False) -> list[Block]:
    return [Block(index, size, recompute, all_at_turn) for index in indices]


def block_elements(size: ModelSize) -> int:
    """Number of parameters of a block without embeddings and head."""
    return sum(parameter.numel() for parameter in Block(0, size._replace(vocabulary=0)).parameters())


def loss_function(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean loss of a micro-batch. Targets are tokens or hidden states."""
    if target.is_floating_point():
        return nn.functional.mse_loss(output, target)
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def micro_batch(size: ModelSize, step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes the ``index``-th micro-batch of a step, counted over all data-parallel ranks.

    Returns input and target: tokens [samples, sequence] each or, without a vocabulary, hidden states [samples,
    sequence, width].
    """
    generator = torch.Generator().manual_seed(100_000 * step + index)
    if size.vocabulary:
        tokens = torch.randint(size.vocabulary, (size.samples, size.sequence + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    shape = (size.samples, size.sequence, size.width)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def predictable(size: ModelSize, step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes a micro-batch as :func:`micro_batch` does, of text that can be learned: three of four tokens follow from
    the one before."""
    follows = torch.randperm(size.vocabulary, generator=torch.Generator().manual_seed(0))
    text, _ = micro_batch(size._replace(sequence=size.sequence + 1), step, index)
    generator = torch.Generator().manual_seed(100_000 * step + index)
    text, random = text.clone(), torch.rand(text.shape, generator=generator) < 0.25
    for place in range(1, text.shape[1]):
        text[:, place] = torch.where(random[:, place], text[:, place], follows[text[:, place - 1]])
    return text[:, :-1], text[:, 1:]


Reference = Callable[[ModelSize, int, tuple[int, ...]], list[float]]
"""Returns the mean loss of each step in one process without parallelism. Gets the model, the number of data-parallel
ranks whose micro-batches the process trains, and the micro-batches per data-parallel rank, for every step."""


def build_optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=ADAM_EPSILON, fused=True)


@lru_cache
def reference_losses(size: ModelSize, data_ranks: int, steps: tuple[int, ...]) -> list[float]:
    """The :data:`Reference` of the model of this file."""
    model = nn.Sequential(*build_blocks(size, range(size.blocks), recompute=False))

    def loss_of(inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_function(model(inputs), target)

    return losses_alone(model, loss_of, size, data_ranks, steps)


def losses_alone(
    model: nn.Module,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    size: ModelSize,
    data_ranks: int,
    steps: tuple[int, ...],
) -> list[float]:
    """Trains ``model`` in this process and returns the mean loss of each step.

    Args:
        loss_of: the model's loss of a micro-batch.
        size: the size of the micro-batches.
        data_ranks, steps: as in :data:`Reference`.
    """
    optimizer = build_optimizer(model.parameters())
    losses = []
    for step, micro_batches in enumerate(steps):
        count = micro_batches * data_ranks
        total = 0.0
        for index in range(count):
            loss = loss_of(*micro_batch(size, step, index)) / count
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
