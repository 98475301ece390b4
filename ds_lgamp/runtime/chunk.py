"""A chunk at run time: consecutive layers, called one after another; and who holds its parameters and gradients."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_lgamp.runtime.layer_state import LayerState

Tensors = torch.Tensor | tuple[torch.Tensor, ...]
"""The value that a layer passes to the next one: a tensor or a tuple of tensors."""


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
        self.state = LayerState(_modules_of(layers, first_layer))

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


def _modules_of(layers: Sequence[Callable[[Any], Any]], first_layer: int) -> Iterator[tuple[str, Module]]:
    """Yields the modules of layers by names. A layer may also be a function of a module, as a tied one is called."""
    for index, layer in enumerate(layers, first_layer):
        for each in layer.args if isinstance(layer, partial) else (layer,):
            if isinstance(each, Module):
                for path, module in each.named_modules():
                    yield f"layer {index}.{path}".removesuffix("."), module


@runtime_checkable
class HasOwnLosses(Protocol):
    """A layer that adds the gradients of losses of its own in its backward pass, which no layer returns."""

    def scale_own_losses(self, factor: float) -> None:
        """Multiplies the gradients of these losses by ``factor`` from now on."""


@runtime_checkable
class HasArguments(Protocol):
    """An input of a chunk that is no tree of tensors, but has one, as a call of a model."""

    @property
    def arguments(self) -> Any: ...


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


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors of a chunk's input or result."""
    tree = value.arguments if isinstance(value, HasArguments) else value
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


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


def detached_outputs(outputs: Any, copies: Callable[[torch.Tensor], bool]) -> Any:
    """Returns ``outputs`` of any structure with their tensors without a graph, and a copy of each tensor for which
    ``copies`` holds."""
    return tree_map_only(torch.Tensor, lambda each: each.detach().clone() if copies(each) else each.detach(), outputs)


def as_leaves(inputs: Tensors, marked: bool = False) -> Tensors:
    """Returns fresh leaves with the same data, whose gradients can be read after the backward pass.

    Args:
        marked: whether only members that require a gradient get one, instead of all floating-point ones.
    """
    members = inputs if isinstance(inputs, tuple) else (inputs,)
    leaves = tuple([member.detach().requires_grad_(needs_gradient(member, marked)) for member in members])
    return leaves if isinstance(inputs, tuple) else leaves[0]


def needs_gradient(member: torch.Tensor, marked: bool) -> bool:
    """Whether a member of a chunk's input gets a gradient: if it is ``marked`` by requiring one, or else if it is a
    floating-point tensor."""
    return member.requires_grad if marked else member.is_floating_point()


def passed_on(result: Tensors, copies: Callable[[torch.Tensor], bool] | None, marks: bool) -> Tensors:
    """Returns the tensors in ``result`` without their graph.

    Args:
        copies: tells which ones to copy.
        marks: whether those that require a gradient in ``result`` do so again.
    """
    value: Tensors = detached(result)
    if copies is not None:
        members = tuple(member.clone() if copies(member) else member for member in as_tuple(value))
        value = members if isinstance(value, tuple) else members[0]
    for member, source in zip(as_tuple(value), as_tuple(result)) if marks else ():
        member.requires_grad_(source.requires_grad)
    return value


def _refusal(value: object) -> str:
    described = type(value).__name__
    if isinstance(value, (list, tuple)):
        described += f" of {', '.join(sorted({type(member).__name__ for member in value}))}"
    return f"a chunk must return a tensor or a tuple of tensors, not {described}"


class ParameterHolder(Protocol):
    """Holds the parameters and gradients of the chunks: ZeroPartition, or a host's own data parallelism.

    Every holder gathers and reduces. Programs of hierarchical shards also refresh and combine, and programs of
    offloading also load and store: a holder that lacks these raises NotImplementedError, because a step without them
    would go on with stale weights or without gradients.
    """

    @abstractmethod
    def gather(self, chunk: int) -> None:
        """Launches the gather of a chunk's parameters."""

    @abstractmethod
    def wait_gather(self, chunk: int) -> None: ...

    @abstractmethod
    def release(self, chunk: int) -> None: ...

    @abstractmethod
    def begin_backward(self, chunk: int) -> None:
        """Prepares a chunk's gradients for a backward pass. The executor calls it before each one."""

    @abstractmethod
    def reduce(self, chunk: int) -> None:
        """Launches the reduction of a chunk's final gradients."""

    @abstractmethod
    def wait_reduce(self, chunk: int) -> None: ...

    def refresh(self, chunk: int) -> None:
        """Launches the gather, between nodes, of what the last step updated of a chunk."""
        raise _lacking(self, "hierarchical shards")

    def wait_refresh(self, chunk: int) -> None:
        raise _lacking(self, "hierarchical shards")

    def combine(self, chunk: int) -> None:
        """Launches the sum, between nodes, of a chunk's gradients."""
        raise _lacking(self, "hierarchical shards")

    def wait_combine(self, chunk: int) -> None:
        raise _lacking(self, "hierarchical shards")

    def load(self, chunk: int) -> None:
        """Starts to load a chunk's weights from the host."""
        raise _lacking(self, "offloading")

    def wait_load(self, chunk: int) -> None:
        raise _lacking(self, "offloading")

    def store(self, chunk: int) -> None:
        """Starts to copy a chunk's final gradients to the host."""
        raise _lacking(self, "offloading")

    def wait_store(self, chunk: int) -> None:
        raise _lacking(self, "offloading")


def _lacking(holder: ParameterHolder, what: str) -> NotImplementedError:
    return NotImplementedError(f"{type(holder).__name__} cannot run a program with {what}: it has no action for that")
