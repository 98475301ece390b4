"""What a module would return, in shape, found without the values of its parameters and without its arithmetic."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from ds_lgamp.integrations.split.autocast import Autocast

_KEPT = 64
"""For how many values to keep what a module would return, such as for sizes of images."""


class Shape:
    """Shape, dtype and device of a tensor."""

    def __init__(self, tensor: Tensor, shape: torch.Size | None = None) -> None:
        self.shape = tensor.shape if shape is None else shape
        self.dtype, self.device = tensor.dtype, tensor.device


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Returns the shape of a parameter, also of one that deepspeed.zero.Init has left without elements."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


class Imagined:
    """Tells what ``module`` would return. Its parameters may be on other ranks."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._full_shapes = {name: full_shape(parameter) for name, parameter in module.named_parameters()}
        self._by_shape: dict[Any, Any] = {}
        """What it would return, by its mode, its type and the shapes of its arguments; None if that depends on values
        of integers, too."""
        self._by_value: OrderedDict[Any, Any] = OrderedDict()

    def __call__(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Returns what the module would return for these arguments, with a :class:`Shape` for every tensor."""
        leaves, structure = tree_flatten((positional, named))
        tensors = chain(self._module.parameters(), self._module.buffers(), filter(torch.is_tensor, leaves))
        first = next(tensors)
        # An engine casts the module after a first call.
        mode = self._module.training, first.dtype, Autocast.on(first.device.type), str(structure)
        shapes = *mode, *((leaf.shape, leaf.dtype) if torch.is_tensor(leaf) else leaf for leaf in leaves)
        if shapes not in self._by_shape:
            try:
                self._by_shape[shapes] = self._imagine(positional, named)
            except (DataDependentOutputException, DynamicOutputShapeException):
                self._by_shape[shapes] = None
        known = self._by_shape[shapes]
        if known is not None:
            return known
        values = *shapes, *(tuple(leaf.flatten().tolist()) for leaf in leaves if _has_values(leaf))
        if values not in self._by_value:
            self._by_value[values] = self._imagine(positional, named, with_values=True)
            if len(self._by_value) > _KEPT:
                self._by_value.popitem(last=False)
        return self._by_value[values]

    def _imagine(self, positional: tuple[Any, ...], named: Mapping[str, Any], with_values: bool = False) -> Any:
        own = dict(self._module.named_parameters())
        # The module may write to them.
        buffers = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), _without_fast_path():

            def imagined(tensor: Tensor) -> Tensor:
                return tensor if with_values and _has_values(tensor) else mode.from_tensor(tensor)

            parameters = {
                name: torch.empty(shape, dtype=own[name].dtype, device=own[name].device)
                for name, shape in self._full_shapes.items()
            }
            positional, named = tree_map_only(Tensor, imagined, (positional, named))
            with _Values() if with_values else nullcontext():
                result = functional_call(self._module, {**parameters, **buffers}, positional, dict(named))
            return tree_map_only(Tensor, Shape, result)


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Runs torch's transformer layers inside the block without the kernels that they have for evaluation, which make
    nested tensors of masked ones and cannot be imagined."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


class _Values(TorchDispatchMode):
    """Computes what no imagined tensor takes part in, such as where the images of a batch begin, because shapes may
    depend on it."""

    def __torch_dispatch__(self, function: Any, types: Any, positional: Any = (), named: Any = None) -> Any:
        named = named or {}
        if is_imagined((positional, named)):
            return function(*positional, **named)
        with unset_fake_temporarily():
            return function(*positional, **named)


def _has_values(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_floating_point()


def is_imagined(value: Any) -> bool:
    """Whether a tensor in ``value`` is imagined, and has no numbers."""
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value))
