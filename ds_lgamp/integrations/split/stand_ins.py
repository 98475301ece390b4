"""Stand-ins for parts of a model while its forward runs.

A stand-in has the parameters, buffers and modules of the module whose place it takes. So code that iterates over those
of the model finds the model's own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.attributes import SetAttributes
from ds_lgamp.integrations.split.call import BlockArguments, apart
from ds_lgamp.integrations.split.snapshot import MISSING


class StandIn(nn.Module):
    """Stands in for a module of the model, and has its attributes, which forwards ask for."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # Not registered: it belongs to the model.
        self.__dict__["_own"] = module
        del self.training
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_own"], name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """That of the module. A forward may call blocks of several classes in different ways."""
        return self.__dict__["_own"].__class__

    def __bool__(self) -> bool:
        return bool(self.__dict__["_own"])

    def __len__(self) -> int:
        return len(self.__dict__["_own"])


class Visited(StandIn):
    """The stand-in for a block. The block itself gets the attributes that are set.

    Args:
        block: the block.
        index: its number.
        attributes: those of all blocks that forwards set.
        visit: called with the number, the hidden states and all else that the block gets. Returns what the forward gets
            for a result.
    """

    written: dict[str, Any]
    """The attributes that were set, with the values that the block had before."""

    def __init__(
        self,
        block: nn.Module,
        index: int,
        attributes: SetAttributes,
        visit: Callable[[int, Tensor, BlockArguments], Any],
    ) -> None:
        super().__init__(block)
        self._index, self._attributes, self._visit = index, attributes, visit
        self.__dict__["written"] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_of_the_block(name):
            setattr(self._own, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_of_the_block(name):
            delattr(self._own, name)
        else:
            super().__delattr__(name)

    def _is_of_the_block(self, name: str) -> bool:
        """Notes that an attribute is set or deleted. Returns whether it is the block's, and not one of the stand-in
        that is being made."""
        if "written" not in self.__dict__:
            return False
        self.written.setdefault(name, vars(self._own).get(name, MISSING))
        return True

    def forward(self, *positional: Any, **named: Any) -> Any:
        hidden, arguments = apart(positional, named)
        attributes = self._attributes.of(self._index, self.written)
        return self._visit(self._index, hidden, arguments._replace(attributes=attributes))

    def __iter__(self) -> NoReturn:
        self._refuse_parts()

    def __getitem__(self, _: Any) -> NoReturn:
        self._refuse_parts()

    def _refuse_parts(self) -> NoReturn:
        raise ConfigError(
            f"the forward of the model takes modules out of a {self.__class__.__name__} in the list of its blocks; "
            f"with a {BLOCK} block, call that module itself, or let it be an nn.ModuleList, whose modules are blocks"
        )


class Absent(StandIn):
    """The stand-in for a module that may be on another rank. A call of it is refused."""

    def __init__(self, module: nn.Module, refuse: Callable[[], NoReturn]) -> None:
        super().__init__(module)
        self._refuse = refuse

    def forward(self, *positional: Any, **named: Any) -> Any:
        self._refuse()


class AbsentTensor(Tensor):
    """The stand-in for a tensor that may be on another rank. Functions of it are refused."""

    refuse: Callable[[], NoReturn]

    @classmethod
    def of(cls, refuse: Callable[[], NoReturn]) -> "AbsentTensor":
        stand_in = torch.empty(0).as_subclass(cls)
        stand_in.refuse = refuse
        return stand_in

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, positional: Any = (), named: Any = None) -> Any:
        for leaf in tree_leaves((positional, named)):
            if isinstance(leaf, cls):
                leaf.refuse()


class Touched(Exception):
    """A forward computes with what a block returned beside hidden states."""


class Passed(Tensor):
    """Stands in for a tensor that a block returns beside hidden states, such as attention weights. A forward may
    collect it and pass it on, but not compute with it."""

    block: int
    place: int

    @classmethod
    def of(cls, block: int, place: int) -> "Passed":
        """Returns that for the tensor at a place behind the hidden states."""
        stand_in = torch.empty(0).as_subclass(cls)
        stand_in.block, stand_in.place = block, place
        return stand_in

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, positional: Any = (), named: Any = None) -> Any:
        raise Touched


@contextmanager
def replacing(stand_ins: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Runs stand-ins inside the block. Each has the dictionary of a module that it belongs to, and its name there,
    which may be new."""
    missing = object()
    own = [registry.get(name, missing) for registry, name, _ in stand_ins]
    for registry, name, stand_in in stand_ins:
        registry[name] = stand_in
    try:
        yield
    finally:
        for (registry, name, _), part in zip(stand_ins, own):
            if part is missing:
                del registry[name]
            else:
                registry[name] = part


@contextmanager
def with_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Gives ``module`` another ``forward`` inside the block."""
    own = module.__dict__.get("forward")
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own  # type: ignore[method-assign]
