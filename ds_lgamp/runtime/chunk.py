"""A chunk at run time: consecutive layers that are called one after another."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensors = torch.Tensor | tuple[torch.Tensor, ...]
"""What layers hand to each other: a tensor or a tuple of tensors."""


class Chunk:
    """Consecutive layers.

    Args:
        layers: modules or functions; each takes the previous one's result.
        first_layer: index of the first of them in the model.
        before_layer: called with (layer index in the model, micro-batch) ahead of every layer, for seeding.
    """

    def __init__(
        self,
        layers: Sequence[Callable[[Any], Any]],
        first_layer: int = 0,
        before_layer: Callable[[int, int], None] | None = None,
    ) -> None:
        self.layers = list(layers)
        self.first_layer = first_layer
        self.before_layer = before_layer
        self._statistics = [
            buffer
            for layer in self.layers
            if isinstance(layer, torch.nn.Module)
            for module in layer.modules()
            if isinstance(module, torch.nn.modules.batchnorm._NormBase)
            for buffer in module.buffers()
        ]
        """Running statistics of batch norms, which every forward moves on."""

    def read_statistics(self) -> list[torch.Tensor]:
        """Copies of the running statistics, to be written back after a recomputation."""
        return [buffer.clone() for buffer in self._statistics]

    def write_statistics(self, values: Sequence[torch.Tensor]) -> None:
        for buffer, value in zip(self._statistics, values):
            buffer.copy_(value)

    def __call__(self, inputs: Any, micro_batch: int) -> Any:
        for index, layer in enumerate(self.layers, self.first_layer):
            if self.before_layer is not None:
                self.before_layer(index, micro_batch)
            inputs = layer(inputs)
        return inputs


def as_tuple(value: Tensors) -> tuple[torch.Tensor, ...]:
    """``value`` as a tuple of tensors; raises TypeError for anything a link cannot carry."""
    members = (value,) if isinstance(value, torch.Tensor) else value
    if not isinstance(members, tuple) or not all(isinstance(member, torch.Tensor) for member in members):
        raise TypeError(f"a chunk must return a tensor or a tuple of tensors, not {_describe(value)}")
    return members


def differentiable(value: Tensors) -> list[torch.Tensor]:
    """The members of ``value`` that carry gradients: the floating-point ones."""
    return [member for member in as_tuple(value) if member.is_floating_point()]


def _describe(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {', '.join(sorted({type(member).__name__ for member in value}))}"
    return type(value).__name__
