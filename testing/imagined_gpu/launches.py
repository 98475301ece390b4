"""Counts the kernels that would be launched on the device, and what would take memory from a pool."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_lgamp.integrations.hosts import replace_attribute
from testing.imagined_gpu.border import is_on_device
from testing.imagined_gpu.device import DEVICE

_NO_KERNEL = {
    "device",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "set_",
    "_unsafe_view",
}
"""Operations beside views that compute nothing."""


class Launches(TorchDispatchMode):
    """Counts operations on the device by name. One operation is one kernel, unless it only allocates or makes a view.

    Collectives do not count.

    Args:
        place: returns what the operations of this moment are counted under.
    """

    def __init__(self, place: Callable[[], str]) -> None:
        super().__init__()
        self._place = place
        self.counts: dict[str, Counter[str]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        namespace, name = function._schema.name.split("::")
        if namespace != "c10d" and not function.is_view and name not in _NO_KERNEL:
            if any(map(is_on_device, tree_leaves((args, kwargs)))):
                self.counts.setdefault(self._place(), Counter())[name] += 1
        return function(*args, **(kwargs or {}))


class FromPool(TorchDispatchMode):
    """Collects which operations run while memory comes from a pool. Views and collectives do not count.

    Args:
        place: returns what the operations of this moment are collected under.
    """

    def __init__(self, place: Callable[[], str]) -> None:
        super().__init__()
        self._place = place
        self.operations: dict[str, set[str]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "FromPool":
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            # torch dispatches no operation for it.
            self._note("resize_")
            return resize(storage, size)

        replace_attribute(torch.UntypedStorage, "resize_", resized, self._stack)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        namespace, name = function._schema.name.split("::")
        if namespace == "aten" and not function.is_view:
            self._note(name)
        return function(*args, **(kwargs or {}))

    def _note(self, name: str) -> None:
        if DEVICE.pool is not None:
            self.operations.setdefault(self._place(), set()).add(name)
