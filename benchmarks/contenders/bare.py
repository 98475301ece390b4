"""A bare loop: plain PyTorch on one rank."""

import torch
from torch import nn

from benchmarks.contenders import Layout
from benchmarks.model import build_blocks, build_optimizer, loss_function, micro_batch


class Bare:
    """Runs forward and backward of each micro-batch in turn, then the optimizer."""

    def __init__(self, layout: Layout, recompute: bool = True) -> None:
        self.size = layout.size
        self.model = nn.Sequential(*build_blocks(self.size, range(self.size.blocks), recompute))
        self.optimizer = build_optimizer(self.model.parameters())

    def step(self, step: int, micro_batches: int) -> float:
        total = torch.zeros(())
        for index in range(micro_batches):
            inputs, target = micro_batch(self.size, step, index)
            loss = loss_function(self.model(inputs), target) / micro_batches
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total.item()

    def held(self) -> int:
        return self.size.blocks
