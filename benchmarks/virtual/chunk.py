"""A chunk whose forward and backward take a given time and compute next to nothing."""

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_lgamp.schedule.placement import Placement, place_chunks
from ds_lgamp.schedule.simulate import Durations

TOLERANCE = 1e-5
"""Relative. In fp32, orders of summation differ by less."""
WAKE_UP = 50e-6
"""Seconds a sleep ends ahead of time, since a sleeper wakes up about as much too late."""


class Setting(NamedTuple):
    """A pipeline of virtual chunks, modular placement; times are in seconds."""

    pipeline_ranks: int
    chunks_per_rank: int
    micro_batches: int
    forward: float = 0.010
    """Of one chunk and micro-batch."""
    backward: float = 0.020
    elements: int = 64
    """fp32 numbers that cross a chunk boundary per micro-batch."""
    data_ranks: int = 1
    """Data-parallel ranks, which do the same."""
    parameters: int = 0
    """fp32 parameters of a chunk beside its weight, which only collectives see."""

    @property
    def chunks(self) -> int:
        return self.pipeline_ranks * self.chunks_per_rank

    @property
    def placement(self) -> Placement:
        return place_chunks("modular", self.chunks, self.pipeline_ranks)

    def durations(self, hop: float = 0.0, gather: float = 0.0, reduce: float = 0.0, message: float = 0.0) -> Durations:
        return Durations(self.forward, self.backward, hop, gather, reduce, message)

    def chunks_of(self, rank: int) -> dict[int, "VirtualChunk"]:
        """The chunks of a pipeline rank, ascending."""
        own = range(rank, self.chunks, self.pipeline_ranks)
        return {chunk: VirtualChunk(chunk, self.forward, self.backward) for chunk in own}

    def micro_batch(self, index: int) -> torch.Tensor:
        """The first chunk's input, shape [1, elements]."""
        return torch.full((1, self.elements), 1 + index / self.micro_batches)

    @property
    def loss(self) -> float:
        """The mean loss of a step, from the definition of chunks and micro-batches."""
        result = sum(1 + index / self.micro_batches for index in range(self.micro_batches)) / self.micro_batches
        for chunk in range(self.chunks):
            result *= weight_of(chunk)
        return result


class VirtualChunk(nn.Module):
    """Multiplies by its weight, and takes ``forward`` and ``backward`` seconds for it."""

    def __init__(self, index: int, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight_of(index)]))
        self.seconds = forward, backward
        self.gradient = 0.0
        """Of the weight: what arrived since the last :meth:`take_gradient`, whatever became of it."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _Compute.apply(inputs, self.weight, self)

    def take_gradient(self) -> float:
        gradient, self.gradient = self.gradient, 0.0
        return gradient


class _Compute(torch.autograd.Function):
    """Sleeps for what the arithmetic leaves of the time."""

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


def weight_of(chunk: int) -> float:
    """Differs from chunk to chunk, and is exact in fp32."""
    return 1 + (chunk % 32 + 1) / 256


def loss_function(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return output.mean()


def sleep_until(end: float) -> None:
    """Returns when ``time.monotonic()`` has reached ``end``."""
    left = end - time.monotonic() - WAKE_UP
    if left > 0:
        time.sleep(left)
    while time.monotonic() < end:
        pass


def check_work(name: str, setting: Setting, losses: Iterable[float], gradients: Iterable[tuple[int, float]]) -> None:
    """Raises AssertionError where a step of the contender ``name`` had another loss, or where another gradient arrived
    at a chunk. ``gradients`` are (chunk, its weight's gradient)."""
    right = setting.loss
    for loss in losses:
        if not abs(loss - right) <= TOLERANCE * right:
            raise AssertionError(f"{name}: loss {loss} instead of {right} with {setting}")
    for chunk, gradient in gradients:
        expected = right / weight_of(chunk)
        if not abs(gradient - expected) <= TOLERANCE * expected:
            raise AssertionError(f"{name}: gradient {gradient} instead of {expected} at chunk {chunk} with {setting}")
