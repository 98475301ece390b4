"""A chunk at run time: consecutive layers that are called one after another."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensors = torch.Tensor | tuple[torch.Tensor, ...]
"""What layers hand to each other: a tensor or a tuple of tensors."""


Buffers = list[tuple[torch.Tensor, torch.Tensor]]
"""Buffers of layers, and a copy of each."""


class Chunk:
    """Consecutive layers.

    Args:
        layers: modules or functions; each takes the previous one's result.
        first_layer: index of the first of them in the model.
        before_layer: called with (layer index in the model, micro-batch) ahead of every layer, for seeding.
        between_layers: what becomes of the input of every layer and of the last one's result; None leaves them alone.
    """

    def __init__(
        self,
        layers: Sequence[Callable[[Any], Any]],
        first_layer: int = 0,
        before_layer: Callable[[int, int], None] | None = None,
        between_layers: Callable[[Any], Any] | None = None,
    ) -> None:
        self.layers = list(layers)
        self.first_layer = first_layer
        self.before_layer = before_layer
        self.between_layers = between_layers
        self._buffers = [
            buffer for layer in self.layers if isinstance(layer, torch.nn.Module) for buffer in layer.buffers()
        ]
        """Those that a forward changes, such as running statistics of a batch norm; all of them before the first."""
        self._sorted_out = False

    def read_buffers(self) -> Buffers:
        """Copies of the buffers a forward changes, as far as is known."""
        return [(buffer, buffer.clone()) for buffer in self._buffers]

    def changed(self, before: Buffers) -> Buffers:
        """Those of ``before`` that forwards change."""
        if not self._sorted_out:
            # By value: native batch norm writes without a new version.
            before = [(buffer, value) for buffer, value in before if not torch.equal(buffer, value)]
            self._buffers, self._sorted_out = [buffer for buffer, _ in before], True
        return before

    @staticmethod
    def write_buffers(values: Buffers) -> None:
        for buffer, value in values:
            buffer.copy_(value)

    def __call__(self, inputs: Any, micro_batch: int) -> Any:
        for index, layer in enumerate(self.layers, self.first_layer):
            if self.before_layer is not None:
                self.before_layer(index, micro_batch)
            if self.between_layers is not None:
                inputs = self.between_layers(inputs)
            inputs = layer(inputs)
        return inputs if self.between_layers is None else self.between_layers(inputs)


def as_tuple(value: Tensors) -> tuple[torch.Tensor, ...]:
    """``value`` as a tuple of tensors; raises TypeError for anything a link cannot carry."""
    members = (value,) if isinstance(value, torch.Tensor) else value
    if not isinstance(members, tuple):
        raise TypeError(_refusal(value))
    for member in members:
        if not isinstance(member, torch.Tensor):
            raise TypeError(_refusal(value))
        if member.is_complex():
            raise TypeError("a chunk returned a complex tensor; return real ones, as from torch.view_as_real")
    return members


def differentiable(value: Tensors) -> list[torch.Tensor]:
    """The members of ``value`` that carry gradients: the floating-point ones."""
    members = value if isinstance(value, tuple) else (value,)
    return [member for member in members if member.is_floating_point()]


def _refusal(value: object) -> str:
    described = type(value).__name__
    if isinstance(value, (list, tuple)):
        described += f" of {', '.join(sorted({type(member).__name__ for member in value}))}"
    return f"a chunk must return a tensor or a tuple of tensors, not {described}"
