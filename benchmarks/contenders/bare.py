"""A bare loop: plain PyTorch on one rank, and its step, which others take too."""

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.contenders import Layout
from benchmarks.model import ModelSize, build_blocks, build_optimizer, loss_function, micro_batch


class Bare:
    """Runs forward and backward of each micro-batch in turn, then the optimizer."""

    def __init__(self, layout: Layout, recompute: bool = True, compiled: bool = False) -> None:
        self.size = layout.size
        self.model = nn.Sequential(*build_blocks(self.size, range(self.size.blocks), recompute))
        for block in self.model if compiled else ():
            block.compile()
        self.optimizer = build_optimizer(self.model.parameters())

    def step(self, step: int, micro_batches: int) -> float:
        return accumulate(self.model, self.optimizer, self.size, step, range(micro_batches)).item()

    def held(self) -> int:
        return self.size.blocks


def accumulate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    size: ModelSize,
    step: int,
    numbers: range,
    before: Callable[[bool], None] = lambda is_last: None,
) -> torch.Tensor:
    """Trains a step on the micro-batches ``numbers``, one after another. Returns their mean loss.

    Args:
        before: called ahead of each micro-batch, with whether it is the last one.
    """
    total = torch.zeros(())
    for number in numbers:
        before(number == numbers[-1])
        inputs, target = micro_batch(size, step, number)
        loss = loss_function(model(inputs), target) / len(numbers)
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total
