"""BERT with both of its heads, trained by a loop in plain PyTorch; :class:`benchmarks.contenders.door.Script` trains it
with DeepSpeed."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel
from transformers.models.bert.modeling_bert import BertLayer

from benchmarks.contenders import Layout
from benchmarks.contenders.door import HEAD_WIDTH, HostModel
from benchmarks.model import ModelSize, build_optimizer, losses_alone, micro_batch
from benchmarks.virtual.chunk import sleep_until

PREDICTED = 0.15
"""The share of tokens that are predicted."""


def bert(size: ModelSize) -> Any:
    """Makes a BERT with the same values in every process."""
    torch.manual_seed(0)
    return transformers.BertForPreTraining(configuration(size))


def configuration(size: ModelSize) -> transformers.BertConfig:
    return transformers.BertConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.blocks,
        num_attention_heads=size.width // HEAD_WIDTH,
        intermediate_size=4 * size.width,
        max_position_embeddings=size.sequence,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def batch_of(size: ModelSize, step: int, index: int) -> dict[str, torch.Tensor]:
    """Makes the ``index``-th micro-batch of a step: pairs of segments with some tokens to predict."""
    tokens, _ = micro_batch(size, step, index)
    predicted = torch.arange(size.sequence) % round(1 / PREDICTED) == index % round(1 / PREDICTED)
    return {
        "input_ids": tokens.masked_fill(predicted, 0),
        "attention_mask": torch.ones_like(tokens),
        "token_type_ids": (torch.arange(size.sequence) >= size.sequence // 2).long().expand_as(tokens),
        "labels": tokens.masked_fill(~predicted, -100),
        "next_sentence_label": tokens[:, 0] % 2,
    }


BERT = HostModel(bert, batch_of, "bert.encoder.layer")


class VirtualLayer(BertLayer):
    """A block whose forward and backward take given seconds, as if it were larger. It sleeps after its own compute, so
    nodes that share a core do not slow each other down."""

    seconds: tuple[float, float]
    """Of a forward and a backward."""
    _end = 0.0
    """When the backward that runs ends."""

    def forward(self, hidden_states: torch.Tensor, *positional: Any, **named: Any) -> torch.Tensor:
        end = time.monotonic() + self.seconds[0]
        output = super().forward(_Notice.apply(hidden_states, self._end_backward), *positional, **named)
        output = _Notice.apply(output, self._begin_backward)
        sleep_until(end)
        return output

    def _begin_backward(self) -> None:
        self._end = time.monotonic() + self.seconds[1]

    def _end_backward(self) -> None:
        sleep_until(self._end)


class _Notice(torch.autograd.Function):
    """Hands a tensor on, and calls a function when its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return gradient, None


def virtual_bert(size: ModelSize) -> Any:
    """Makes the BERT of :func:`bert`, whose blocks take :data:`FORWARD` and :data:`BACKWARD`."""
    model = bert(size)
    for layer in model.get_submodule(BERT.blocks):
        layer.__class__, layer.seconds = VirtualLayer, (FORWARD, BACKWARD)
    return model


FORWARD, BACKWARD = 0.015, 0.030
"""Seconds of a virtual block and micro-batch."""
VIRTUAL_BERT = BERT._replace(make=virtual_bert)


@lru_cache
def reference(size: ModelSize, data_ranks: int, steps: tuple[int, ...]) -> list[float]:
    """Mean loss of each step in one process without parallelism, a :data:`benchmarks.model.Reference`."""
    model, index = bert(size), iter(range(sum(steps) * data_ranks))

    def loss_of(*_: torch.Tensor) -> torch.Tensor:
        step, number = divmod(next(index), steps[0] * data_ranks)
        return model(**batch_of(size, step, number)).loss

    return losses_alone(model, loss_of, size, data_ranks, steps)


class Loop:
    """A loop in plain PyTorch.

    Args:
        layout: ranks and model.
        host: the model.
        together: whether all ranks train one model, with DistributedDataParallel that reduces gradients during the last
            micro-batch (``no_sync`` in all others). Otherwise each rank trains one of its own.
    """

    def __init__(self, layout: Layout, host: HostModel = BERT, together: bool = True) -> None:
        self.layout, self.together = layout, together
        model = host.make(layout.size)
        self.blocks = len(model.get_submodule(host.blocks))
        # The buckets of 25 MB are for larger models.
        self.model = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB) if together else model
        self.optimizer = build_optimizer(model.parameters())

    def step(self, step: int, micro_batches: int) -> float | None:
        total = torch.zeros(())
        first = micro_batches * dist.get_rank()
        for number in range(micro_batches):
            silent = self.together and number < micro_batches - 1
            with self.model.no_sync() if silent else nullcontext():
                batch = batch_of(self.layout.size, step, first + number)
                loss = self.model(**batch).loss / micro_batches
                loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not self.together:
            return None
        dist.all_reduce(total)
        return total.item() / self.layout.data_ranks

    def held(self) -> int:
        return self.blocks


BUCKET_MB = 3
"""About a block of the benchmark's model."""
