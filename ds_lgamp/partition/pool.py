"""Device memory for what comes and goes with whole chunks: gathered weights and gradients.

It comes from a pool of its own, where the device's allocator has pools. Otherwise the allocator may cut an activation
out of the memory of a released chunk, and then finds no room for the next chunk although enough bytes are free. What a
pool has once taken, it keeps as long as it lives, so only what returns in every step belongs there.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_whole_model = False
"""Whether parameters of all chunks are gathered at once, as for a state_dict."""


def in_pool(device: torch.device, allocate: Callable[[], T]) -> T:
    """Returns what ``allocate`` returns. Takes memory for it from the pool of the ``device``."""
    pool = _pool(device)
    if pool is None or _whole_model:
        return allocate()
    module = torch.get_device_module(device)
    try:
        with module.use_mem_pool(pool, device):
            return allocate()
    except torch.OutOfMemoryError:
        # Releases of torch below 2.13 give up nothing that they have cached elsewhere while a pool is in use
        # (github.com/pytorch/pytorch/issues/159674).
        module.empty_cache()
        with module.use_mem_pool(pool, device):
            return allocate()


@contextmanager
def outside_of_pools() -> Iterator[None]:
    """Lets :func:`in_pool` take memory that the allocator may give to others later, inside the block."""
    global _whole_model
    before, _whole_model = _whole_model, True
    try:
        yield
    finally:
        _whole_model = before


@cache
def _pool(device: torch.device) -> Any:
    kind = getattr(torch.get_device_module(device), "MemPool", None)
    if kind is None:
        return None
    # Before an allocation outside fails, it gets what lies idle in the pool, in releases of torch that offer this.
    return kind(use_on_oom=True) if "use_on_oom" in inspect.signature(kind).parameters else kind()
