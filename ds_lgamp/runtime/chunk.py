"""A chunk at run time: consecutive layers, called one after another."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from ds_lgamp.partition.rows import write

Tensors = torch.Tensor | tuple[torch.Tensor, ...]
"""The value that a layer passes to the next one: a tensor or a tuple of tensors."""


class Buffer(NamedTuple):
    """A layer's buffer at one moment. A forward may change the tensor or replace it."""

    module: Module
    name: str
    tensor: torch.Tensor | None
    value: torch.Tensor | None
    """A copy of the tensor's values."""

    @classmethod
    def read(cls, module: Module, name: str) -> "Buffer":
        """Reads the buffer as it is now."""
        tensor = module._buffers[name]
        return cls(module, name, tensor, None if tensor is None else tensor.clone())

    def write(self) -> None:
        """Restores the tensor and its values."""
        self.module._buffers[self.name] = self.tensor
        if self.tensor is not None and self.value is not None:
            write(self.tensor, self.value)

    @property
    def moved(self) -> bool:
        """Whether the buffer has changed since it was read."""
        now = self.module._buffers[self.name]
        if now is None or self.value is None:
            return now is not self.tensor
        # Compares values, because native batch norm writes without raising the tensor's version.
        return now is not self.tensor or not torch.equal(now, self.value)


Buffers = list[Buffer]


class Chunk:
    """Consecutive layers of the model.

    Args:
        layers: modules or functions; each takes the result of the previous one. They may be replaced later.
        first_layer: index of the first layer in the model.
        before_layer: called with (layer index in the model, micro-batch) before every layer, for seeding.
        between_layers: applied to the input of every layer and to the result of the last one; None leaves them
            unchanged.
        after_layer: called with (layer index in the model, micro-batch, result) after every layer.
    """

    def __init__(
        self,
        layers: Sequence[Callable[[Any], Any]],
        first_layer: int = 0,
        before_layer: Callable[[int, int], None] | None = None,
        between_layers: Callable[[Any], Any] | None = None,
        after_layer: Callable[[int, int, Any], None] | None = None,
    ) -> None:
        self.layers = layers
        self.first_layer = first_layer
        self.before_layer = before_layer
        self.between_layers = between_layers
        self.after_layer = after_layer
        called = [each for layer in self.layers for each in (layer.args if isinstance(layer, partial) else (layer,))]
        modules = [module for each in called if isinstance(each, Module) for module in each.modules()]
        self._owners = [module for module in modules if module._buffers]
        self._modes: list[bool] = []
        """Which owners were in training mode when ``_moving`` was determined. A batch norm changes its buffers only in
        training mode."""
        self._moving: list[tuple[Module, str]] | None = []
        """The buffers that forwards change, such as running statistics; None until a forward has shown them."""

    def read_buffers(self) -> Buffers:
        """Reads the buffers that forwards change; all buffers while these are unknown."""
        if not self._owners:
            return []
        modes = [module.training for module in self._owners]
        if modes != self._modes:
            self._modes, self._moving = modes, None
        moving = self._moving
        if moving is None:
            moving = [(module, name) for module in self._owners for name in module._buffers]
        with torch.no_grad():
            return [Buffer.read(module, name) for module, name in moving]

    def moved(self, before: Buffers) -> Buffers:
        """Returns those of ``before`` that forwards change. The caller has just run a forward."""
        if self._moving is None:
            before = [buffer for buffer in before if buffer.moved]
            self._moving = [(buffer.module, buffer.name) for buffer in before]
        return before

    @staticmethod
    def write_buffers(buffers: Buffers) -> None:
        if buffers:
            with torch.no_grad():
                for buffer in buffers:
                    buffer.write()

    def __call__(self, inputs: Any, micro_batch: int) -> Any:
        for index, layer in enumerate(self.layers, self.first_layer):
            if self.before_layer is not None:
                self.before_layer(index, micro_batch)
            if self.between_layers is not None:
                inputs = self.between_layers(inputs)
            inputs = layer(inputs)
            if self.after_layer is not None:
                self.after_layer(index, micro_batch, inputs)
        return inputs if self.between_layers is None else self.between_layers(inputs)


def as_tuple(value: Tensors) -> tuple[torch.Tensor, ...]:
    """Returns ``value`` as a tuple of tensors. Raises TypeError if a link cannot carry it."""
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
    """Returns the members of ``value`` that carry gradients: the floating-point ones."""
    members = value if isinstance(value, tuple) else (value,)
    return [member for member in members if member.is_floating_point()]


def cloned(value: Any) -> Any:
    """Copies the tensors in ``value``. The copies are part of the graph."""
    if isinstance(value, tuple):
        return tuple(map(cloned, value))
    return value.clone() if isinstance(value, torch.Tensor) else value


def detached(value: Any) -> Any:
    """Returns the tensors in ``value`` without their graph."""
    if isinstance(value, tuple):
        return tuple(map(detached, value))
    return value.detach() if isinstance(value, torch.Tensor) else value


def as_leaves(inputs: Tensors) -> Tensors:
    """Returns fresh leaves with the same data, whose gradients can be read after the backward pass."""
    return tuple(map(_as_leaf, inputs)) if isinstance(inputs, tuple) else _as_leaf(inputs)


def _as_leaf(member: torch.Tensor) -> torch.Tensor:
    return member.detach().requires_grad_(member.is_floating_point())


def _refusal(value: object) -> str:
    described = type(value).__name__
    if isinstance(value, (list, tuple)):
        described += f" of {', '.join(sorted({type(member).__name__ for member in value}))}"
    return f"a chunk must return a tensor or a tuple of tensors, not {described}"
