"""PyTorch's FSDP2 with each way of torch to recompute a part of a model: whole blocks, all but products, or what its
compiler chooses by a budget."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch._functorch.config as functorch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from benchmarks.contenders import Layout
from benchmarks.contenders.door import LLAMA, Sharded
from benchmarks.contenders.fsdp import Accumulation
from benchmarks.selective import keeping_products

EVERY = {"full": 1, "operators": 1, "every second": 2, "none": 0}
"""By kind of recomputation: of how many blocks one recomputes, beginning with the first; 0 for none. "operators" keeps
the results of products."""


def recompute(blocks: Sequence[nn.Module], kind: str) -> None:
    """Lets blocks recompute, but for the last one, whose backward follows its forward."""
    contexts = keeping_products if kind == "operators" else noop_context_fn
    for block in list(blocks)[: -1 : EVERY[kind]] if EVERY[kind] else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


class GptSharded(Accumulation):
    """The small GPT. Gradients are reduced after the last micro-batch.

    Args:
        layout: ranks and model.
        kind: a key of ``EVERY``.
        budget: torch's ``activation_memory_budget`` for blocks that it compiles, from 0 (all is recomputed) to 1; None
            if it compiles none.
    """

    def __init__(self, layout: Layout, kind: str = "none", budget: float | None = None) -> None:
        super().__init__(layout, deferred_sync=True, recompute=False)
        prepare(self.model, kind, budget)
        self.budget = budget

    def step(self, step: int, micro_batches: int) -> float:
        with compiling_within(self.budget):
            return super().step(step, micro_batches)


class LlamaSharded(Sharded):
    """The Llama of transformers, in the same way."""

    def __init__(self, layout: Layout, kind: str = "none", budget: float | None = None) -> None:
        super().__init__(layout, LLAMA, deferred_sync=True, keeps_last=True)
        # A repeated forward would add its keys and values to those of the first one.
        self.model.config.use_cache = False
        prepare(self.blocks, kind, budget)
        self.budget = budget

    def step(self, step: int, micro_batches: int) -> float:
        with compiling_within(self.budget):
            return super().step(step, micro_batches)


def prepare(blocks: Sequence[nn.Module], kind: str, budget: float | None) -> None:
    """Lets blocks recompute, and has them compiled when they are first called, if there is a ``budget``."""
    recompute(blocks, kind)
    for block in blocks if budget is not None else ():
        block.compile()


def compiling_within(budget: float | None) -> AbstractContextManager[Any]:
    """Inside the block, torch compiles with this budget."""
    return nullcontext() if budget is None else functorch.patch(activation_memory_budget=budget)
