"""What modules refer to beside parameters and modules: buffers, and plain attributes such as counters and caches."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Set
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.jit import RecursiveScriptModule
from torch.nn import Module

_CONTAINERS = {dict, OrderedDict, defaultdict, Counter, list, set, deque}
_MANY = 1000
"""Of a longer container, such as a vocabulary, only a change of its length is noticed."""
_OF_ALL_MODULES = frozenset(vars(Module()))


class Holder(NamedTuple):
    """A container of Python that holds state: the attributes of a module, its buffers, or a container in these."""

    name: str
    contents: Any
    others: Set[str] = frozenset()
    """Keys of what is no state."""
    passing: Set[str] | None = None
    """Keys of what no checkpoint keeps; None if it keeps nothing."""

    def read(self) -> Any:
        """Returns what the container refers to, as a dict or a list."""
        if isinstance(self.contents, list | set | deque):
            return list(self.contents)
        return {key: self.contents[key] for key in self.contents.keys() if key not in self.others}

    def write(self, read: Any) -> None:
        contents = self.contents
        if isinstance(contents, list):
            contents[:] = read
        elif isinstance(contents, set):
            contents.clear()
            contents.update(read)
        elif isinstance(contents, deque):
            contents.clear()
            contents.extend(read)
        else:
            for key in [key for key in contents.keys() if key not in read and key not in self.others]:
                del contents[key]
            for key, value in read.items():
                contents[key] = value


class _Scripted:
    """The attributes and buffers of a module of TorchScript."""

    def __init__(self, module: RecursiveScriptModule) -> None:
        attributes = module._concrete_type.get_attributes()
        self._names = [
            name for name, (_, is_parameter) in attributes.items() if not is_parameter and name not in _OF_ALL_MODULES
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
        yield Holder(name, vars(module), others=_OF_ALL_MODULES)
        yield Holder(name, module._buffers, passing=module._non_persistent_buffers_set)


class Held(NamedTuple):
    """A tensor that is held at one moment."""

    name: str
    tensor: torch.Tensor
    version: int
    """How often it had been changed in place."""
    is_buffer: bool
    passing: bool
    """Whether no checkpoint keeps it."""

    @property
    def changed(self) -> bool:
        """Whether it has been changed in place since."""
        return self.tensor._version != self.version


Place = tuple[int, Any]
"""Where a tensor is: the identity of a container, and a key of it."""


class References:
    """What holders refer to now, containers inside them included.

    Args:
        roots: the holders.
        in_place: the places whose tensors may change in place.
    """

    def __init__(self, roots: Iterable[Holder], in_place: Set[Place]) -> None:
        self.tensors: dict[Place, Held] = {}
        self._read = [(holder, holder.read()) for holder in roots]
        seen = {id(holder.contents) for holder, _ in self._read}
        items = []
        for holder, read in self._read:
            if len(read) > _MANY:
                continue
            for key, value in read.items() if isinstance(read, dict) else enumerate(read):
                items.append((holder.contents, key, value))
                if type(value) is torch.Tensor and value.layout is torch.strided and not value.is_inference():
                    is_buffer = holder.passing is not None
                    passing = holder.passing is None or key in holder.passing
                    held = Held(f"{holder.name}.{key}", value, value._version, is_buffer, passing)
                    self.tensors[id(holder.contents), key] = held
                elif type(value) in _CONTAINERS and id(value) not in seen:
                    seen.add(id(value))
                    inner = Holder(f"{holder.name}.{key}", value)
                    self._read.append((inner, inner.read()))
        keyed = [item for item in items if not isinstance(item[0], set | deque)]
        self._keys = [(contents, key) for contents, key, _ in keyed]
        self._values = [value for *_, value in keyed]
        self._unkeyed = [(each.contents, read) for each, read in self._read if isinstance(each.contents, set | deque)]
        self._lengths = [(holder.contents, len(holder.contents)) for holder, _ in self._read]
        self._versions = [(each.tensor, each.version) for at, each in self.tensors.items() if at not in in_place]

    def hold(self) -> bool:
        """Returns whether all is as it was, but for tensors that may change in place."""
        try:
            now = [contents[key] for contents, key in self._keys]
        except LookupError:
            return False
        return (
            all(map(is_, now, self._values))
            and all([len(contents) == length for contents, length in self._lengths])
            and all([tensor._version == version for tensor, version in self._versions])
            and all([all(map(is_, contents, read)) for contents, read in self._unkeyed])
        )

    def write(self) -> None:
        """Lets the holders refer to the same again."""
        for holder, read in self._read:
            holder.write(read)
