"""What modules refer to besides parameters and modules: buffers, and plain attributes such as counters and caches."""

import sys
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import lru_cache
from itertools import chain
from operator import getitem, is_
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch
from torch.jit import RecursiveScriptModule
from torch.nn import Module
from torch.utils.weak import TensorWeakRef as WeakTensor

_WITHOUT_STATE = {*sys.stdlib_module_names, "ds_lgamp", "numpy", "torch"}
"""Packages whose objects keep no state of layers."""
_MANY = 1000
"""Of a longer container, such as a vocabulary, only a change of its length is noticed."""
_NO_STATE = set(vars(Module()))
"""Attributes of modules that are no state of layers."""


def leave_out(packages: Iterable[str], attributes: Iterable[str]) -> None:
    """Lets objects of these packages keep no state of layers, nor modules in these attributes. Integrations know what
    their hosts keep there."""
    _NO_STATE.update(attributes)
    if not _WITHOUT_STATE.issuperset(packages):
        _WITHOUT_STATE.update(packages)
        _holds_state.cache_clear()


_COUNTS: set[str] = set()
"""Buffers that only count."""


def only_count(buffers: Iterable[str]) -> None:
    """Lets buffers of these names only count: forwards add to them, in any order, and no forward reads them."""
    _COUNTS.update(buffers)


def counts_of(holder: "Holder") -> Set[str]:
    """Returns the keys of buffers in ``holder`` that only count."""
    return set() if holder.passing is None else _COUNTS & {*holder.contents.keys()}


@lru_cache(None)
def _holds_state(kind: type) -> bool:
    """Returns whether objects of this type may hold state that is no module's, parameter's or tensor's own."""
    if issubclass(kind, dict | list | set | deque | SimpleNamespace | Namespace):
        return True
    has_none = kind.__module__.partition(".")[0] in _WITHOUT_STATE or issubclass(kind, Module | torch.Tensor)
    return not has_none and hasattr(kind, "__dict__") and kind.__dictoffset__ != 0


class Holder(NamedTuple):
    """A container of Python that holds state: the attributes of a module, its buffers, or a container or object in
    these."""

    name: str
    contents: Any
    others: Set[str] = frozenset()
    """Keys of what is no state."""
    passing: Set[str] | None = None
    """Keys of buffers that no checkpoint has."""
    in_object: bool = False
    """Whether it belongs to an object that is no container."""

    @property
    def has_keys(self) -> bool:
        """Whether reading a key that is not there fails, so that each place can be read by itself."""
        return type(self.contents) in (dict, OrderedDict, list, _Scripted)

    def items(self) -> list[tuple[Any, Any]]:
        """Returns the keys and values of what the container refers to; what has no keys is numbered."""
        if isinstance(self.contents, list | set | deque):
            return list(enumerate(self.contents))
        return [(key, self.contents[key]) for key in self.contents.keys() if key not in self.others]

    def holds(self, items: Sequence[tuple[Any, Any]]) -> bool:
        """Returns whether the container refers to just that."""
        now = self.items()
        return len(now) == len(items) and all([a == c and b is d for (a, b), (c, d) in zip(now, items)])

    def inner(self, key: Any, value: Any) -> "Holder | None":
        """Returns the holder that ``value`` is, if it is one. Objects inside objects are not."""
        if not _holds_state(value.__class__):
            return None
        name = f"{self.name}.{key}"
        if isinstance(value, dict | list | set | deque):
            return Holder(name, value, in_object=self.in_object)
        return None if self.in_object else Holder(name, vars(value), in_object=True)

    def write(self, items: Sequence[tuple[Any, Any]]) -> None:
        """Lets the container refer to that, and to no more."""
        contents = self.contents
        if isinstance(contents, list):
            contents[:] = [value for _, value in items]
        elif isinstance(contents, set):
            contents.clear()
            contents.update(value for _, value in items)
        elif isinstance(contents, deque):
            contents.clear()
            contents.extend(value for _, value in items)
        else:
            known = {key for key, _ in items}
            for key in [key for key in contents.keys() if key not in known and key not in self.others]:
                del contents[key]
            for key, value in items:
                contents[key] = value


class _Scripted:
    """The attributes and buffers of a module of TorchScript."""

    def __init__(self, module: RecursiveScriptModule) -> None:
        attributes = module._concrete_type.get_attributes()
        self._names = [
            name for name, (_, is_parameter) in attributes.items() if not is_parameter and name not in _NO_STATE
        ]
        self._module = module._c

    def keys(self) -> list[str]:
        return self._names

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Any:
        return self._module.getattr(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._module.setattr(name, value)


def holders(name: str, module: Module) -> Iterator[Holder]:
    """Yields what holds the state of ``module``, without the modules in it."""
    if isinstance(module, RecursiveScriptModule):
        yield Holder(name, _Scripted(module), passing=module._non_persistent_buffers_set)
    else:
        yield Holder(name, vars(module), others=_NO_STATE)
        yield Holder(name, module._buffers, passing=module._non_persistent_buffers_set)


class Held(NamedTuple):
    """A tensor that is held at one moment."""

    name: str
    tensor: torch.Tensor
    version: int
    """How often it had been changed in place."""
    is_buffer: bool
    passing: bool
    """Whether no checkpoint has it."""

    @property
    def changed(self) -> bool:
        """Whether it has been changed in place since."""
        return self.tensor._version != self.version


Place = tuple[int, Any]
"""Where a tensor is: the identity of a container, and a key of it."""


class _Past:
    """A tensor of a graph that a place held once. A micro-batch can hardly use the graph of another one, so it need not
    live for that, with all the memory that it may take."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._name, self._tensor = name, WeakTensor(tensor)

    def get(self) -> torch.Tensor:
        """Returns the tensor; if it is gone, what refuses to be one."""
        tensor = self._tensor()
        return torch.empty(0).as_subclass(type("Gone", (_Gone,), {"name": self._name})) if tensor is None else tensor


class _Gone(torch.Tensor):
    """Stands for a tensor that is gone. It may be replaced and compared with None."""

    name: str

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), named: Any = None) -> NoReturn:
        raise RuntimeError(
            f"{cls.name} is a tensor of another micro-batch's graph, which a recomputation cannot bring back; let the "
            "module keep a detached one, or set ds_lgamp.recompute to 'none'"
        )


class _Layout:
    """All containers, and the places in them."""

    def __init__(self, roots: Iterable[Holder]) -> None:
        self.holders = list(roots)
        self.contents: list[Any] = []
        """The container of every place."""
        self.keys: list[Any] = []
        """The key of every place."""
        self.values: list[Any] = []
        """What every place held when it was found."""
        self.of: list[Holder] = []
        """The holder of every place."""
        self.whole: list[tuple[Holder, list[tuple[Any, Any]]]] = []
        """Containers that are compared and written as a whole, with what they hold."""
        self.without_places: list[tuple[Holder, Any, Any]] = []
        """What the shorter ones among these hold, with their keys."""
        seen = {id(holder.contents) for holder in self.holders}
        for holder in self.holders:
            items = holder.items()
            if not holder.has_keys or len(items) > _MANY:
                self.whole.append((holder, items))
            if len(items) > _MANY:
                continue
            for key, value in items:
                if holder.has_keys:
                    self.contents.append(holder.contents)
                    self.keys.append(key)
                    self.values.append(value)
                    self.of.append(holder)
                else:
                    self.without_places.append((holder, key, value))
                inner = holder.inner(key, value)
                if inner is not None and id(inner.contents) not in seen:
                    seen.add(id(inner.contents))
                    self.holders.append(inner)
        self.containers = [holder.contents for holder in self.holders]
        self.lengths = list(map(len, self.containers))

    def read(self) -> list[Any] | None:
        """Returns what every place holds now; None if one is gone."""
        try:
            return list(map(getitem, self.contents, self.keys))
        except LookupError:
            return None

    def stands(self) -> bool:
        """Returns whether there are as many places, and whether what has no places is as it was."""
        if list(map(len, self.containers)) != self.lengths:
            return False
        return all([len(items) > _MANY or holder.holds(items) for holder, items in self.whole])


class References:
    """What holders refer to at one moment, containers inside them included.

    Args:
        layout: where that is.
        values: what is there, by place.
        in_place: the places whose tensors may change in place.
    """

    def __init__(self, layout: _Layout, values: list[Any], in_place: Set[Place]) -> None:
        self._layout, self._values = layout, values
        self.tensors: dict[Place, Held] = {}
        self.generators: dict[str, torch.Generator] = {}
        """torch's generators by their names."""
        for holder, key, value in [*zip(layout.of, layout.keys, values), *layout.without_places]:
            if type(value) is torch.Tensor and value.layout is torch.strided and not value.is_inference():
                is_buffer = holder.passing is not None
                passing = holder.passing is None or key in holder.passing
                held = Held(f"{holder.name}.{key}", value, value._version, is_buffer, passing)
                self.tensors[id(holder.contents), key] = held
            elif isinstance(value, torch.Generator):
                self.generators[f"{holder.name}.{key}"] = value
        self._versions = [(each.tensor, each.version) for at, each in self.tensors.items() if at not in in_place]

    @classmethod
    def read(cls, roots: Iterable[Holder], in_place: Set[Place], last: "References | None") -> "References":
        """Reads what the holders refer to now.

        Args:
            last: what an earlier call returned, which saves looking for containers again.
        """
        layout = None if last is None else last._layout
        values = None if layout is None or not layout.stands() else layout.read()
        if last is not None:
            changed = last._let_go(values)
            if layout is not None and values is not None and not any(_holds_state(each.__class__) for each in changed):
                return cls(layout, values, in_place)
        layout = _Layout(roots)
        return cls(layout, layout.values, in_place)

    def hold(self) -> bool:
        """Returns whether all is as it was, but for tensors that may change in place."""
        layout = self._layout
        try:
            same = all(map(is_, map(getitem, layout.contents, layout.keys), self._values))
        except LookupError:
            return False
        return (
            same
            and all([tensor._version == version for tensor, version in self._versions])
            and list(map(len, layout.containers)) == layout.lengths
            and (not layout.whole or layout.stands())
        )

    def states(self) -> list[tuple[torch.Generator, torch.Tensor]]:
        """Returns torch's generators that something refers to, with their states now."""
        return [(each, each.get_state()) for each in self.generators.values()]

    def changed(self) -> str | None:
        """Returns the name of something that is not as it was, but for tensors that may change in place; None if all
        is."""
        if self.hold():
            return None
        layout, watched = self._layout, {id(tensor) for tensor, _ in self._versions}
        pairs = zip(layout.of, layout.keys, self._values, layout.read() or [])
        moved = (f"{holder.name}.{key}" for holder, key, before, now in pairs if before is not now)
        written = (held.name for held in self.tensors.values() if held.changed and id(held.tensor) in watched)
        sized = (holder.name for holder, size in zip(layout.holders, layout.lengths) if len(holder.contents) != size)
        return next(chain(moved, written, sized), "what they hold")

    def write(self) -> None:
        """Lets the holders refer to the same again."""
        layout = self._layout
        self._values = [value.get() if type(value) is _Past else value for value in self._values]
        now = layout.read() if layout.stands() else None
        if now is None:
            items: dict[int, list[tuple[Any, Any]]] = {id(holder.contents): [] for holder in layout.holders}
            for contents, key, value in zip(layout.contents, layout.keys, self._values):
                items[id(contents)].append((key, value))
            for holder, whole in layout.whole:
                items[id(holder.contents)] = whole
            for holder in layout.holders:
                holder.write(items[id(holder.contents)])
            return
        for contents, key, value, other in zip(layout.contents, layout.keys, self._values, now):
            if value is not other:
                contents[key] = value

    def _let_go(self, now: list[Any] | None) -> list[Any]:
        """Returns what is no longer referred to, and what is instead, by place; all if ``now`` is None. Tensors among
        it no longer live longer because of this, if they belong to a graph."""
        changed = []
        for index, value in enumerate(self._values):
            if now is not None and now[index] is value:
                continue
            changed += [value] if now is None else [value, now[index]]
            if type(value) is torch.Tensor and value.grad_fn is not None:
                holder, key = self._layout.of[index], self._layout.keys[index]
                self._values[index] = _Past(f"{holder.name}.{key}", value)
                self.tensors.pop((id(holder.contents), key), None)
        self._versions = []
        return changed
