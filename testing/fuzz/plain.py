"""What scripts call an engine, in one plain process: the truth that trainings are compared with."""

from typing import Any

import torch
import torch.distributed as dist


class Plain:
    """Trains a model without DeepSpeed.

    Args:
        micro_batches: of a step of this process.
        data_ranks: how many processes train replicas of the model with data of their own.
        clipping: the largest norm of all gradients together; 0 leaves them alone.
    """

    def __init__(
        self, model: Any, optimizer: torch.optim.Optimizer, micro_batches: int, data_ranks: int, clipping: float
    ) -> None:
        self.module, self.optimizer, self._clipping = model, optimizer, clipping
        self._micro_batches, self._data_ranks, self._steps = micro_batches, data_ranks, 0

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self.module(*positional, **named)

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    def eval(self) -> None:
        self.module.eval()

    def backward(self, loss: torch.Tensor) -> None:
        (loss / (self._micro_batches * self._data_ranks)).backward()

    def step(self) -> None:
        self._steps += 1
        if self._steps % self._micro_batches:
            return
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:
            # Momentum and weight decay go on moving one that is unused, but none that is frozen, as docs/numbers.md
            # says.
            if parameter.grad is None and not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self._data_ranks > 1:
                dist.all_reduce(parameter.grad)
        if self._clipping:
            torch.nn.utils.clip_grad_norm_(parameters, self._clipping)
        self.optimizer.step()
        self.optimizer.zero_grad()
