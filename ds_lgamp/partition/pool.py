"""Device memory for what comes and goes with whole chunks: gathered weights and gradients."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch


def pooled(device: torch.device) -> AbstractContextManager[Any]:
    """Takes what is allocated inside the block from a pool of its own, where the device's allocator has pools.

    Otherwise the allocator may cut an activation out of the memory of a released chunk, and then finds no room for the
    next chunk although enough bytes are free.
    """
    pool = _pool(device)
    return nullcontext() if pool is None else torch.get_device_module(device).use_mem_pool(pool, device)


@cache
def _pool(device: torch.device) -> Any:
    kind = getattr(torch.get_device_module(device), "MemPool", None)
    if kind is None:
        return None
    # Before an allocation outside fails, it gets what lies idle in the pool, in releases of torch that offer this.
    return kind(use_on_oom=True) if "use_on_oom" in inspect.signature(kind).parameters else kind()
