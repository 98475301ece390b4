"""A chunk whose forward and backward take a given time and compute almost nothing."""

import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from ds_lgamp.runtime.split_backward import SecondParts
from ds_lgamp.schedule.costs import Durations
from ds_lgamp.schedule.placement import Placement, place_chunks

TOLERANCE = 1e-3
"""Relative. Summation order makes a smaller difference in fp32, and weights of chunks differ by more."""
WAKE_UP = 50e-6
"""Seconds by which a sleep ends early. A sleeper wakes up about that much too late."""


class Setting(NamedTuple):
    """A pipeline of virtual chunks. Times are in seconds."""

    pipeline_ranks: int
    chunks_per_rank: int
    micro_batches: int
    forward: float = 0.010
    """Seconds per chunk and micro-batch."""
    backward: float = 0.020
    elements: int = 64
    """fp32 numbers that cross a chunk boundary per micro-batch."""
    data_ranks: int = 1
    """Number of data-parallel ranks, which all do the same."""
    parameters: int = 0
    """fp32 parameters per chunk besides its weight. Only collectives use them."""
    lengths: tuple[float, ...] = (1.0,)
    """How many times as long as ``forward`` and ``backward`` the chunks take, repeated over all of them."""
    update: float = 0.0
    """Seconds of the optimizer's update of a chunk."""
    placed: str = "modular"
    """How chunks are placed: a kind of ``place_chunks``."""
    split_backward: int = 0
    """How many backwards of a rank may wait for their second part, which takes half of ``backward``; 0 if backwards are
    whole."""

    def length(self, chunk: int) -> float:
        return self.lengths[chunk % len(self.lengths)]

    @property
    def chunks(self) -> int:
        return self.pipeline_ranks * self.chunks_per_rank

    @property
    def placement(self) -> Placement:
        return place_chunks(self.placed, self.chunks, self.pipeline_ranks)

    def durations(self, hop: float = 0.0, gather: float = 0.0, reduce: float = 0.0, message: float = 0.0) -> Durations:
        return Durations(self.forward, self.backward, hop, gather, reduce, message, update=self.update)

    def chunks_of(self, rank: int) -> dict[int, "VirtualChunk"]:
        """Makes the chunks of a pipeline rank, in ascending order."""
        lengths = {chunk: self.length(chunk) for chunk, owner in enumerate(self.placement) if owner == rank}
        return {
            chunk: (SplitChunk if chunk and self.split_backward else VirtualChunk)(
                chunk, self.forward * n, self.backward * n
            )
            for chunk, n in lengths.items()
        }

    def micro_batch(self, index: int) -> torch.Tensor:
        """Makes an input of the first chunk, with shape [1, elements]."""
        return torch.full((1, self.elements), 1 + index / self.micro_batches)

    @property
    def loss(self) -> float:
        """The expected mean loss of a step, from the definition of chunks and micro-batches."""
        result = sum(1 + index / self.micro_batches for index in range(self.micro_batches)) / self.micro_batches
        for chunk in range(self.chunks):
            result *= weight_of(chunk)
        return result


class VirtualChunk(nn.Module):
    """Multiplies its input by its weight. This takes ``forward`` and ``backward`` seconds."""

    def __init__(self, index: int, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight_of(index)]))
        self.seconds = forward, backward
        self.gradient = 0.0
        """The weight's gradient since the last :meth:`take_gradient`, even if the optimizer has used or cleared it."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _Compute.apply(inputs, self.weight, self)

    def take_gradient(self) -> float:
        gradient, self.gradient = self.gradient, 0.0
        return gradient


class _Compute(torch.autograd.Function):
    """Computes, then sleeps for the rest of the time."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, chunk: VirtualChunk) -> torch.Tensor:
        end = time.monotonic() + chunk.seconds[0]
        ctx.save_for_backward(inputs, weight)
        ctx.chunk = chunk
        output = inputs * weight
        sleep_until(end)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        end = time.monotonic() + ctx.chunk.seconds[1]
        inputs, weight = ctx.saved_tensors
        of_weight = (gradient * inputs).sum().view(1)
        of_inputs = gradient * weight
        ctx.chunk.gradient += of_weight.item()
        sleep_until(end)
        return of_inputs, of_weight, None


class SplitChunk(VirtualChunk):
    """A chunk whose backward takes half of its time; the second part, of which :class:`SleepingParts` knows, the other
    half."""

    def __init__(self, index: int, forward: float, backward: float) -> None:
        super().__init__(index, forward, backward)
        self.weight = nn.Parameter(torch.tensor([[weight_of(index)]]))
        self._sum = 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = _Sleep.apply(inputs, self.seconds[0], self.seconds[1] / 2)
        return functional.linear(inputs.view(-1, 1), self.weight).view(1, -1)

    def take_gradient(self) -> float:
        self._sum = 0.0
        return super().take_gradient()

    def end_backward(self) -> None:
        """Takes the time of the second part, after which the weight has its gradient."""
        end = time.monotonic() + self.seconds[1] / 2
        assert self.weight.grad is not None
        total = self.weight.grad.item()
        self.gradient += total - self._sum
        self._sum = total
        sleep_until(end)


class SleepingParts(SecondParts):
    """The second parts of the backwards of ``chunks``."""

    def __init__(self, chunks: Mapping[int, VirtualChunk]) -> None:
        super().__init__()
        self._chunks = chunks

    def run(self, chunk: int, micro_batch: int) -> None:
        super().run(chunk, micro_batch)
        split = self._chunks[chunk]
        assert isinstance(split, SplitChunk)
        split.end_backward()


class TorchSplitChunk(VirtualChunk):
    """The same for torch's schedules, which ask autograd for gradients of weights and sum these themselves."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight = _Told.apply(_Sleep.apply(self.weight, 0.0, self.seconds[1] / 2), self)
        return _Sleep.apply(inputs, self.seconds[0], self.seconds[1] / 2) * weight


class _Sleep(torch.autograd.Function):
    """Passes its input on, and the gradient back, and takes a time for both."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        sleep_until(time.monotonic() + forward)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        sleep_until(time.monotonic() + ctx.seconds)
        return gradient, None, None


class _Told(torch.autograd.Function):
    """Tells a chunk the gradient of its weight."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, chunk: VirtualChunk) -> torch.Tensor:
        ctx.chunk = chunk
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.chunk.gradient += gradient.sum().item()
        return gradient, None


def weight_of(chunk: int) -> float:
    """The weight of ``chunk``. It differs between chunks and is exact in fp32."""
    return 1 + (chunk % 32 + 1) / 256


def loss_function(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return output.mean()


def sleep_until(end: float) -> None:
    """Returns when ``time.monotonic()`` reaches ``end``."""
    left = end - time.monotonic() - WAKE_UP
    if left > 0:
        time.sleep(left)
    while time.monotonic() < end:
        pass


def check_work(name: str, setting: Setting, losses: Iterable[float], gradients: Iterable[tuple[int, float]]) -> None:
    """Raises AssertionError if a loss or a gradient of the contender ``name`` is wrong.

    Args:
        name: name of the contender.
        setting: the pipeline.
        losses: losses of a step.
        gradients: pairs of a chunk and the gradient of its weight.
    """
    right = setting.loss
    for loss in losses:
        if not abs(loss - right) <= TOLERANCE * right:
            raise AssertionError(f"{name}: loss {loss} instead of {right} with {setting}")
    for chunk, gradient in gradients:
        expected = right / weight_of(chunk)
        if not abs(gradient - expected) <= TOLERANCE * expected:
            raise AssertionError(f"{name}: gradient {gradient} instead of {expected} at chunk {chunk} with {setting}")
