"""What a module would return, in shape, found without the values of its parameters and without its arithmetic."""

import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
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

from ds_lgamp.integrations.split.call import Arguments, Autocast
from ds_lgamp.integrations.split.parts import full_shape
from ds_lgamp.integrations.split.state import untouched

_torchs_logger = logging.getLogger(fake_tensor.__name__)
_KEPT = 64
"""For how many values to keep what a module would return, such as for sizes of images."""
_WAYS = 32
"""For how many combinations of answers to imagine a call."""
_COMPARISONS = (torch.ops.aten.equal.default, torch.ops.aten.allclose.default)
_LOOKS = {"_local_scalar_dense": ".item()", "nonzero": "a mask as an index or nonzero()"}
"""How scripts write operations that look at values."""


class Shape:
    """Shape, dtype and device of a tensor; if a call returns what it got, such as a mask, ``given`` is the place
    among the tensors and other values that it got."""

    def __init__(self, tensor: Tensor, shape: torch.Size | None = None, given: int | None = None) -> None:
        self.shape = tensor.shape if shape is None else shape
        self.dtype, self.device, self.given = tensor.dtype, tensor.device, given

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shape) and vars(self) == vars(other)


def shapes_in(returned: Any, arguments: Any) -> Any:
    """Returns what a call with these ``arguments`` has ``returned``, with a :class:`Shape` for every tensor."""
    # One of floating point has its numbers from ranks that have the module, or leads to its gradient there.
    given = {
        id(leaf): place
        for place, leaf in enumerate(tree_leaves(arguments))
        if isinstance(leaf, Tensor) and not leaf.is_floating_point()
    }
    return tree_map_only(Tensor, lambda tensor: Shape(tensor, given=given.get(id(tensor))), returned)


class UnknownShape(Exception):
    """It cannot be imagined what a module would return. Says why."""


class Imagined:
    """Tells what ``module`` would return. Its parameters may be on other ranks."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._full_shapes = {name: full_shape(parameter) for name, parameter in _by_place(module, "named_parameters")}
        self._by_shape: dict[Any, Any] = {}
        """What it would return, by its mode, its type and the shapes of its arguments; None if that depends on values
        of integers, too."""
        self._by_value: OrderedDict[Any, Any] = OrderedDict()

    def __call__(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Returns what the module would return for these arguments, with a :class:`Shape` for every tensor. Raises
        UnknownShape if that depends on values of floating point."""
        leaves, structure = tree_flatten((positional, named))
        if not all(isinstance(leaf, Hashable) for leaf in leaves):
            # Such as a mapping of a kind of its own: nothing tells cheaply whether it holds the same.
            return self._imagine(positional, named, with_values=True)
        tensors = chain(self._module.parameters(), self._module.buffers(), filter(torch.is_tensor, leaves))
        first = next(tensors)
        # An engine casts the module after a first call.
        mode = self._module.training, first.dtype, Autocast.on(first.device.type), str(structure)
        shapes = *mode, *((leaf.shape, leaf.dtype) if torch.is_tensor(leaf) else leaf for leaf in leaves)
        if shapes not in self._by_shape:
            try:
                self._by_shape[shapes] = self._imagine(positional, named)
            except UnknownShape:
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
        """Imagines a call for all answers to what the module asks of tensors, such as whether one has a NaN. Raises
        UnknownShape if it would return other shapes for others. An answer with which the module refuses to go on does
        not count, because the training would end, too."""
        answers: list[bool] = []
        found, refusal = [], None
        for _ in range(_WAYS):
            try:
                found.append(self._run(answers, positional, named, with_values))
            except (AssertionError, ValueError, ArithmeticError) as error:
                refusal = error
            except Exception as error:
                raise UnknownShape(_cause(error)) from error
            while answers and answers[-1]:
                answers.pop()
            if not answers:
                break
            answers[-1] = True
        else:
            raise UnknownShape(f"it asks more than {_WAYS.bit_length() - 1} questions of tensors")
        if not found:
            raise UnknownShape(_cause(refusal)) from refusal
        if any(tree_flatten(each) != tree_flatten(found[0]) for each in found):
            raise UnknownShape("it depends on whether something holds for values of tensors")
        return found[0]

    def _run(
        self, answers: list[bool], positional: tuple[Any, ...], named: Mapping[str, Any], with_values: bool
    ) -> Any:
        """Imagines one call with these ``answers``, and adds a no to them for every further question. With
        ``with_values`` it computes with the values of integers."""
        own = dict(_by_place(self._module, "named_parameters"))
        # The module may write to them.
        copies = {id(buffer): buffer.clone() for buffer in self._module.buffers()}
        buffers = {name: copies[id(buffer)] for name, buffer in _by_place(self._module, "named_buffers")}
        with (
            # What it writes to is imagined, too.
            untouched(self._module, with_tensors=False),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            torch.no_grad(),
            _imagining(),
        ):

            def imagined(tensor: Tensor) -> Tensor:
                return tensor if with_values and _has_values(tensor) else mode.from_tensor(tensor)

            # The module may make a parametrization of them and take it away, as peft does for experts.
            parameters = {
                name: nn.Parameter(torch.empty(shape, dtype=own[name].dtype, device=own[name].device), False)
                for name, shape in self._full_shapes.items()
            }
            positional, named = tree_map_only(Tensor, imagined, (positional, named))
            with _Answers(answers), _Values() if with_values else nullcontext():
                tensors = {**parameters, **buffers}
                result = functional_call(self._module, tensors, positional, dict(named), tie_weights=False)
            return shapes_in(result, (positional, named))


def _by_place(module: nn.Module, method: str) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters or buffers by all their names, but those of a part with several names by one: torch would put
    imagined ones there twice, and take away only one."""
    for path, part in module.named_modules():
        yield from getattr(part, method)(path, recurse=False, remove_duplicate=False)


@contextmanager
def _imagining() -> Iterator[None]:
    """Runs torch's transformer layers inside the block without the kernels that they have for evaluation, which make
    nested tensors of masked ones and cannot be imagined. Lets torch log nothing of other operations that cannot."""
    enabled, silent = torch.backends.mha.get_fastpath_enabled(), _torchs_logger.disabled
    torch.backends.mha.set_fastpath_enabled(False)
    # A level would clear the caches of all loggers.
    _torchs_logger.disabled = True
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
        _torchs_logger.disabled = silent


class _Answers(TorchDispatchMode):
    """Answers what a module asks of imagined tensors."""

    def __init__(self, answers: list[bool]) -> None:
        super().__init__()
        self._answers, self._asked = answers, 0

    def __torch_dispatch__(self, function: Any, types: Any, positional: Any = (), named: Any = None) -> Any:
        named = named or {}
        if not (_is_question(function, positional) and is_imagined((positional, named))):
            return function(*positional, **named)
        if self._asked == len(self._answers):
            self._answers.append(False)
        self._asked += 1
        return self._answers[self._asked - 1]


def _is_question(function: Any, positional: Any) -> bool:
    """Whether the answer is yes or no."""
    is_item = function is torch.ops.aten._local_scalar_dense.default
    return (is_item and positional[0].dtype is torch.bool) or function in _COMPARISONS


class _Values(TorchDispatchMode):
    """Computes what no imagined tensor takes part in, such as where the images of a batch begin, because shapes may
    depend on it."""

    def __torch_dispatch__(self, function: Any, types: Any, positional: Any = (), named: Any = None) -> Any:
        named = named or {}
        if is_imagined((positional, named)):
            return function(*positional, **named)
        with unset_fake_temporarily():
            return function(*positional, **named)


def _cause(error: Exception | None) -> str:
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        name = error.func._overloadpacket.__name__
        return f"it depends on values of tensors, by {_LOOKS.get(name, name)}"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _has_values(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_floating_point()


def is_imagined(value: Any) -> bool:
    """Whether a tensor in ``value`` is imagined, and has no numbers."""
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value))


def in_words(arguments: Arguments) -> str:
    """Returns arguments in words, without the values of tensors."""
    positional, named = arguments
    values = {**{str(place): value for place, value in enumerate(positional)}, **named}
    shapes = tree_map_only(Tensor, lambda tensor: list(tensor.shape), values)
    return ", ".join(f"{name} {value!r}" for name, value in shapes.items())
