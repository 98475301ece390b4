"""A model in which one layer of one micro-batch of one step spoils a number."""

import logging
from typing import NamedTuple

import torch
from deepspeed.pipe import LayerSpec
from torch import nn

LAYERS, WIDTH = 4, 6


class Fault(NamedTuple):
    """A number that becomes NaN or infinite."""

    kind: str
    """forward, backward or weights (its gradient) of a layer; inputs, labels, loss, loss backward; parameter."""
    layer: int = 0
    micro_batch: int = 0
    data_rank: int = 0


current: list[Fault] = []
"""The fault of the current step, if there is one."""


def marked(data_rank: int, micro_batch: int) -> float:
    """The mark of a micro-batch, which all layers pass on in the first column."""
    return (10 * data_rank + micro_batch) / 100


def due(kind: str, mark: torch.Tensor, layer: int = 0) -> bool:
    """Whether the current fault is of this kind, layer and micro-batch."""
    if not current:
        return False
    fault = current[0]
    here = abs(mark.item() - marked(fault.data_rank, fault.micro_batch)) < 1e-3
    return (fault.kind, fault.layer) == (kind, layer) and here


class Spoil(torch.autograd.Function):
    """Passes values on, but not their gradient."""

    @staticmethod
    def forward(context, values):
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * float("nan")


class Layer(nn.Module):
    """A linear layer that leaves the first column as it is."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        mark, weight, values = inputs[0, 0], self.inner.weight, inputs
        if due("backward", mark, self.number):
            values = Spoil.apply(inputs)
        if due("weights", mark, self.number):
            weight = Spoil.apply(weight)
        result = nn.functional.linear(values, weight, self.inner.bias).tanh()
        if due("forward", mark, self.number):
            result = result / 0
        return torch.cat([values[:, :1], result[:, 1:]], dim=1)


def loss_function(outputs, labels):
    mark = outputs[0, 0]
    spoilt = Spoil.apply(outputs) if due("loss backward", mark) else outputs
    loss = ((spoilt - labels) ** 2).mean()
    return loss + float("inf") if due("loss", mark) else loss


def specs() -> list[LayerSpec]:
    return [LayerSpec(Layer, number) for number in range(LAYERS)]


def micro_batches(step: int, data_rank: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    made = []
    for micro_batch in range(count):
        inputs, labels = torch.randn(4, WIDTH, generator=generator), torch.zeros(4, WIDTH)
        inputs[:, 0] = marked(data_rank, micro_batch)
        if due("inputs", inputs[0, 0]):
            inputs[1, 1] = float("nan")
        if due("labels", inputs[0, 0]):
            labels[1, 1] = float("nan")
        made.append((inputs, labels))
    return made


class Said(logging.Handler):
    """Collects what ds_lgamp says in DeepSpeed's log."""

    def __init__(self, logger):
        super().__init__(logging.WARNING)
        self.lines = []
        logger.setLevel("WARNING")
        logger.addHandler(self)

    def emit(self, record):
        if record.getMessage().startswith("ds_lgamp: step"):
            self.lines.append(record.getMessage())

    def take(self):
        taken, self.lines = self.lines, []
        return taken
