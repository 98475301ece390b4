"""Remembers and copies what modules hold besides parameters, in attributes, buffers, classes, globals and hooks."""

from collections import UserDict, UserList, deque
from collections.abc import Collection, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy
from dataclasses import fields, is_dataclass
from functools import cached_property
from itertools import chain, repeat
from operator import is_
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ProxyTypes, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.reached import (
    CONTAINERS,
    MISSING,
    Named,
    Reached,
    attributes_of,
    behind_proxy,
    is_array,
    named_outside,
    slots_of,
)
from ds_lgamp.partition.memory import without_repetition
from ds_lgamp.runtime.references import leave_out, only_count

OF_TORCH = frozenset(vars(nn.Module()))
"""The attributes that every module has, such as those for its parameters and hooks."""
_LARGE = 1000
"""Containers with more elements are remembered, but not searched for others."""
_DEPTH = 3
"""How far a trial's snapshot searches attributes and elements for containers and other objects."""
_PLAIN = frozenset({type(None), bool, int, float, str})
"""Types of values that hold nothing."""
Place = tuple[int, str]
"""An attribute: the id of the dictionary that holds it, and its name."""


class Snapshot:
    """What modules hold in attributes, and what lists, dictionaries and sets there contain. Tensors are held by
    reference.

    Args:
        modules: without the modules in them.
        depth: how far to search. With 1, only containers in attributes count, except attributes that every module has.
        named: other values, each with how far to search there.
    """

    def __init__(self, modules: Iterable[nn.Module], depth: int = 1, named: Iterable[tuple[Named, int]] = ()) -> None:
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Dictionaries of attributes, each with a copy."""
        self._contents: list[tuple[int, str, Any, Any]] = []
        """Containers, each with the place where it was found, and a copy."""
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        """Random generators, each with its state."""
        self._seen: set[int] = set()
        for module in modules:
            self._remember_attributes(vars(module), depth)
        self._named: list[tuple[Named, dict[str, Any]]] = []
        for each, depth in named:
            self._named.append((each, each.values()))
            for name, value in self._named[-1][1].items():
                self._search(value, depth, (id(each.holder), name))

    def restore(self, leaving: Collection[Place] = ()) -> None:
        """Gives everything back, except attributes at the places ``leaving`` and what is in them."""
        for attributes, before in self._attributes:
            for name in differing(attributes, before):
                if (id(attributes), name) not in leaving:
                    set_or_delete(attributes, name, before.get(name, MISSING))
        for each, before in self._named:
            each.restore(before)
        for holder, name, container, before in self._contents:
            # Most are empty, such as dictionaries of hooks.
            if (container or before) and (holder, name) not in leaving and not holds_the_same(container, before):
                container.clear()
                container.extend(before) if isinstance(container, (list, deque)) else container.update(before)
        for generator, state in self._generators:
            generator.set_state(state)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors in attributes, in containers and under names, and arrays as tensors in their memory."""
        values = chain.from_iterable(before.values() for _, before in (*self._attributes, *self._named))
        others = [each for each in values if id(each) not in self._seen]
        leaves = tree_leaves([others, [before for *_, before in self._contents if before]])
        found = [_as_tensor(leaf) for leaf in {id(leaf): leaf for leaf in leaves}.values()]
        return [each for each in found if each is not None]

    @contextmanager
    def given_back(self, with_tensors: bool = True) -> Iterator["Snapshot"]:
        """Gives everything back after the block, and ``with_tensors`` the values of :attr:`tensors` before it."""
        try:
            with with_values(self.tensors if with_tensors else ()):
                yield self
        finally:
            self.restore()

    def changed(self) -> Iterator[tuple[int, str, Any]]:
        """Yields the places of attributes that are others now, or contain others, each with what was there before."""
        for attributes, before in self._attributes:
            for name in differing(attributes, before):
                yield id(attributes), name, before.get(name, MISSING)
        for holder, name, container, before in self._contents:
            if not holds_the_same(container, before):
                yield holder, name, before
        for each, values in self._named:
            now = {name: each.holder.get(name, MISSING) for name in values}
            for name in differing(now, values):
                yield id(each.holder), name, values[name]

    def _remember_attributes(self, attributes: dict[str, Any], depth: int) -> None:
        if id(attributes) in self._seen:
            return
        self._seen.add(id(attributes))
        self._attributes.append((attributes, attributes.copy()))
        for name, value in attributes.items():
            if type(value) not in _PLAIN and (depth > 1 or name not in OF_TORCH):
                self._search(value, depth, (id(attributes), name))

    def _search(self, value: Any, depth: int, place: Place) -> None:
        value = behind_proxy(value)
        if type(value) in CONTAINERS:
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._contents.append((*place, value, value.copy()))
                if depth > 1 and len(value) <= _LARGE:
                    for each in value.values() if isinstance(value, dict) else value:
                        if type(each) not in _PLAIN:
                            self._search(each, depth - 1, place)
        elif isinstance(value, torch.Generator):
            if depth > 1 and id(value) not in self._seen:
                self._seen.add(id(value))
                self._generators.append((value, value.get_state()))
        elif depth > 1 and has_attributes(value):
            self._remember_attributes(vars(value), depth - 1)


def _as_tensor(value: Any) -> Tensor | None:
    """Returns a tensor, except parameters and those with operations of their own, or an array as a tensor; else
    None."""
    # A weak proxy without its object answers nothing else.
    if issubclass(type(value), Tensor):
        is_usual = type(value).__torch_dispatch__ is Tensor.__torch_dispatch__
        return value if is_usual and not isinstance(value, nn.Parameter) and not is_lazy(value) else None
    if is_array(value) and value.flags.writeable:
        with suppress(TypeError, ValueError):
            return torch.from_numpy(value)
    return None


def set_or_delete(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Gives an attribute its ``value``, unless it is missing."""
    if value is MISSING:
        attributes.pop(name, None)
    else:
        attributes[name] = value


def differing(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Returns the names of attributes that are others now."""
    if len(now) == len(before) and all(map(is_, now.values(), before.values())) and now.keys() == before.keys():
        # The usual case, faster.
        return []
    names = [name for name, value in now.items() if before.get(name, MISSING) is not value]
    return names + [name for name in before if name not in now]


def holds_the_same(container: Any, before: Any) -> bool:
    """Whether a container holds the same objects as its copy from ``before``."""
    if len(container) != len(before):
        return False
    if isinstance(container, set):
        return container == before
    if isinstance(container, dict):
        return not differing(container, before)
    return all(map(is_, container, before))


def copied_containers(value: Any) -> Any:
    """Returns ``value`` with copies of the containers in it, at any depth: lists, dictionaries, tuples, sets, deques,
    dataclasses, and objects of classes that derive from these, such as a BatchEncoding of transformers. A container
    that is there twice is copied once. Everything else is shared, above all tensors."""
    return _copied(value, {})


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """Does the work of :func:`copied_containers`, with the copies made so far, by the ids of the originals."""
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, tuple):
        members = [_copied(member, copies) for member in value]
        if all(map(is_, members, value)):
            return value
        return type(value)._make(members) if hasattr(value, "_make") else tuple(members)
    held = _held(value)
    if held is None:
        return value
    copies[id(value)] = own = copy(value)
    for key, member in held:
        if (copied := _copied(member, copies)) is member:
            continue
        if isinstance(own, _WITH_ITEMS):
            own[key] = copied
        else:
            # Frozen dataclasses forbid the statement.
            object.__setattr__(own, key, copied)
    return own


_WITH_ITEMS = (dict, UserDict, list, UserList, deque)


def _held(value: Any) -> list[tuple[Any, Any]] | None:
    """Returns what a container holds that can be changed, with the keys, places or names; None for everything else."""
    if isinstance(value, dict | UserDict):
        return [*value.items()]
    if isinstance(value, _WITH_ITEMS):
        return [*enumerate(value)]
    if isinstance(value, SimpleNamespace):
        return [*vars(value).items()]
    if is_dataclass(value) and not isinstance(value, type | Tensor | nn.Module):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return [] if isinstance(value, set) else None


def has_attributes(value: Any) -> bool:
    """Whether a value is an object like a configuration. Modules are searched anyway."""
    if type(value) in ProxyTypes or isinstance(value, (nn.Module, Tensor, type, FunctionType, MethodType, ModuleType)):
        return False
    return type(attributes_of(value)) is dict


def snapshot_of(model: nn.Module) -> Snapshot:
    """Returns all that the modules and hooks of a model hold, and what its forwards reach by names."""
    reached = Reached(model.modules(), model.parameters())
    found = {str(number): value for number, (_, value) in enumerate(reached.values())}
    by_names = [*reached.named(), Named(found, [*found])]
    outside = named_outside(model)
    return Snapshot(model.modules(), _DEPTH, [*zip(outside, repeat(_DEPTH)), *zip(by_names, repeat(1))])


def snapshot_of_arguments(call: Any) -> Snapshot:
    """Returns what lies in arrays and other objects among the arguments of a ``call``, without its tensors."""
    others = {str(place): leaf for place, leaf in enumerate(tree_leaves(call)) if not isinstance(leaf, Tensor)}
    with_slots = [each for each in others.values() if any("__slots__" in vars(kind) for kind in type(each).__mro__)]
    named = [Named(others, [*others]), *map(slots_of, with_slots)]
    return Snapshot((), named=zip(named, repeat(_DEPTH)))


def untouched(model: nn.Module, with_tensors: bool = True) -> AbstractContextManager[Snapshot]:
    """Gives a model back after the block all that is in :func:`snapshot_of`, and, ``with_tensors``, the values of
    buffers and of other tensors and arrays there. Forwards that run inside leave no counters, caches or other
    submodules. Yields what is there before."""
    return snapshot_of(model).given_back(with_tensors)


def leave_out_hosts() -> None:
    """Tells the runtime what of hosts layers hold that is no state of theirs."""
    packages = ("accelerate", "deepspeed", "megatron", "peft", "transformer_engine", "transformers")
    # transformers says there that it has registered hooks, and a recomputation takes none away; AutoEP, that it has
    # checked types.
    checked = ("_fused_combine_checked", "_fused_row_weighting_checked")
    leave_out(packages, ["_output_capturing_hooks_installed", *checked])
    # AutoEP counts there how many tokens each expert gets.
    only_count(["tokens_per_expert"])


def version_of(tensor: Tensor) -> int:
    """Returns how often a tensor was changed in place; 0 for a tensor of torch.inference_mode, which has no count."""
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def with_values(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Gives ``tensors`` their memory and values back after the block. Writes only to those that have others then: the
    rest may lie in memory that nobody may write to, or wait for a backward pass."""
    # A subclass may count what is done with it.
    with torch._C.DisableTorchFunctionSubclass():
        before = [_Values(tensor) for tensor in tensors if not (tensor.is_meta or tensor.is_quantized)]
    try:
        yield
    finally:
        # Elsewhere nothing may write to tensors of this mode.
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode():
            for each in before:
                each.restore()


class _Values:
    """The values of a ``tensor``, copied, and the memory where they lie, which a forward may replace."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, version_of(tensor)
        # Changes of this one count for no backward pass.
        self._memory = tensor.data
        self._once = without_repetition(tensor) if _has_strides(tensor) else ()
        """Without what an expanded tensor repeats, which may be far more than there is memory."""
        self._before = _copied_values(self._memory[self._once]) if _has_strides(tensor) else tensor.detach().clone()

    def restore(self) -> None:
        if not _has_strides(self._tensor):
            if version_of(self._tensor) != self._version:
                self._tensor.copy_(self._before)
            return
        own, memory = self._tensor, self._memory
        if (own.shape, own.dtype, own.data_ptr()) != (memory.shape, memory.dtype, memory.data_ptr()):
            own.data = memory
        if not torch.equal(memory[self._once], self._before):
            memory[self._once].copy_(self._before)


_copies: MutableMapping[Any, Tensor] = WeakValueDictionary()
"""The last copy of what lies at a place in memory. Blocks inside each other share them, since tables may be large."""


def _copied_values(tensor: Tensor) -> Tensor:
    """Returns a copy of a ``tensor``, to which nobody may write."""
    place = tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.device
    known = _copies.get(place)
    if known is None or not torch.equal(known, tensor):
        known = _copies[place] = tensor.clone()
    return known


def _has_strides(tensor: Tensor) -> bool:
    """Whether the layout of a tensor is neither sparse nor another of its own kind."""
    return tensor.layout is torch.strided and not tensor.is_nested


class Buffers:
    """The buffers of ``owners``, which are modules by their names, without the modules in them."""

    def __init__(self, owners: Iterable[tuple[str, nn.Module]]) -> None:
        self._owners = list(owners)
        self._before: dict[str, tuple[Tensor, int]] = {}

    def remember(self) -> None:
        self._before = {name: (buffer, version_of(buffer)) for name, buffer in self._named()}

    def changed(self) -> str | None:
        """Returns the name of a buffer that has changed since :meth:`remember`; None if none has."""
        for name, buffer in self._named():
            own, version = self._before.get(name, (buffer, version_of(buffer)))
            if buffer is not own or version_of(buffer) != version:
                return name
        return None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Gives the modules their buffers back after the block, with the values from before it."""
        own = [(module, name, buffer) for _, module, name, buffer in buffers_of(self._owners)]
        with with_values([buffer for *_, buffer in own]):
            try:
                yield
            finally:
                for module, name, buffer in own:
                    module._buffers[name] = buffer

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for path, _, name, buffer in buffers_of(self._owners):
            yield f"{path}.{name}".lstrip("."), buffer


def buffers_of(owners: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yields the buffers of ``owners``, each after the path of its module, the module, and its name there."""
    for path, module in owners:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield path, module, name, buffer


@contextmanager
def unchanged_tensors(arguments: Any) -> Iterator[None]:
    """Raises ConfigError if a tensor among the ``arguments`` of a call is changed in place inside the block, which runs
    a part of the forward."""
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    versions = [*map(version_of, tensors)]
    yield
    if versions != [*map(version_of, tensors)]:
        raise ConfigError(
            f"the forward of the model changes in place a tensor that it gets, but with a {BLOCK} block it runs in "
            "parts, several times for every micro-batch; compute a new tensor there"
        )
