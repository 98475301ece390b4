"""Counts the kernels that would be launched on the device."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from testing.imagined_gpu.border import is_on_device

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
