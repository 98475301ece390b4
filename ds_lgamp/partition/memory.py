"""Memory of the device and of the host, and how tensors lie in it.

- Device memory for what comes and goes with whole chunks, gathered weights and gradients, comes from a pool of its own,
  where the device's allocator has pools. Otherwise the allocator may cut an activation out of the memory of a released
  chunk, and then finds no room for the next chunk although enough bytes are free. What a pool has once taken, it keeps
  as long as it lives, so only what returns in every step belongs there.
- Memory of the host lasts as long as the training.
- A tensor may have any layout: transposed, with gaps, or expanded, so that elements repeat.
"""

import ctypes
import inspect
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from secrets import token_hex
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ds_lgamp.partition.agreement import everyone, machine

T = TypeVar("T")
_CLOSED_ON_EXEC = 1
"""MFD_CLOEXEC of memfd_create(2)."""
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
    """Inside the block, :func:`in_pool` takes memory from the allocator, which may reuse it for anything later."""
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


ALIGNMENT = 64
"""Bytes. Copies and the host's vector instructions are fastest on whole cache lines."""
_SHARE = 8
"""A new block has at least this part of the bytes of the earlier ones."""


class HostRoom:
    """Cuts tensors from blocks of memory, pinned or not.

    torch rounds pinned memory up to a power of two and wastes the rest (``CachingHostAllocator``): a tensor of 1.1 GB
    alone would pin 2 GB. So blocks have such sizes, and a tensor goes to the block whose free end suits it best. Blocks
    grow with what there is, so that several tensors of one size share one.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[torch.Tensor] = []
        """The free end of every block that has one."""
        self.bytes = 0
        """The bytes of all blocks."""

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns ``size`` elements. Their memory never returns to the room."""
        needed = size * dtype.itemsize
        suitable = [number for number, free in enumerate(self._free) if free.numel() >= needed]
        if suitable:
            block = self._free.pop(min(suitable, key=lambda number: self._free[number].numel()))
        else:
            whole = block_bytes(max(needed, self.bytes // _SHARE))
            block = torch.empty(whole, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
            self.bytes += whole
        rest = block[-(-needed // ALIGNMENT) * ALIGNMENT :]
        if rest.numel():
            self._free.append(rest)
        return block[:needed].view(dtype)


def common_copy(values: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, int] | None:
    """Returns a copy of ``values``, which are the same on all ranks of ``group``, in memory that its ranks on this
    machine have in common, and how many these are. Collective; returns None on every rank if no machine has two of
    them, or if one cannot have it, as in containers that hide their processes from each other.

    The memory has no name that could outlive the job: processes open what the first of them has created.
    """
    machines = everyone(machine(), group)
    if len({*machines}) == len(machines):
        # Nobody has another rank beside it.
        return None
    here = machines[group.rank()]
    first = machines.index(here)
    with ExitStack() as stack:
        created, opened, label = None, None, f"ds_lgamp {token_hex(8)}"
        with suppress(OSError, AttributeError):
            if first == group.rank():
                created = _new_memory(label)
                stack.callback(os.close, created)
                os.ftruncate(created, values.nbytes)
        path, label = everyone((f"/proc/{os.getpid()}/fd/{created}", label), group)[first]
        with suppress(OSError, RuntimeError):
            # In another container of the machine, a process of its own may have this number, and a file of its own.
            if os.readlink(path) == f"/memfd:{label} (deleted)":
                opened = torch.from_file(path, shared=True, size=values.numel(), dtype=values.dtype, device="cpu")
            if created is not None and opened is not None:
                opened.copy_(values)
        able = everyone(opened is not None and _pinned(opened, values.device), group)
    return (opened, machines.count(here)) if opened is not None and all(able) else None


def _new_memory(label: str) -> int:
    """Returns the descriptor of new memory, which ``/proc`` calls by the ``label``. Raises OSError, or AttributeError
    with a C library that has no such memory."""
    # Pythons of conda and uv, built with an old C library, lack os.memfd_create.
    descriptor: int = ctypes.CDLL(None).memfd_create(label.encode(), _CLOSED_ON_EXEC)
    if descriptor < 0:
        raise OSError
    return descriptor


def _pinned(memory: Tensor, device: torch.device) -> bool:
    """Pins ``memory`` for copies to ``device``, until nothing refers to it. Returns whether that worked; a CPU needs
    none."""
    if device.type == "cpu":
        return True
    if device.type != "cuda":
        return False
    driver, address = torch.cuda.cudart(), memory.data_ptr()
    if int(driver.cudaHostRegister(address, memory.nbytes, 0)):
        return False
    weakref.finalize(memory, driver.cudaHostUnregister, address)
    return True


def shared_size(needed: int) -> int:
    """Returns a size of at least ``needed`` bytes, of which there are eight between two powers of two, so that memory
    serves tensors of many lengths."""
    step = max(ALIGNMENT, block_bytes(needed) // 8)
    return -(-needed // step) * step


def block_bytes(needed: int) -> int:
    """Returns the bytes of a block for a tensor of ``needed`` bytes: the next power of two, whole cache lines."""
    return max(ALIGNMENT, 1 << max(0, needed - 1).bit_length())


def row_of(tensor: Tensor) -> Tensor:
    """Returns the elements of ``tensor`` in one row, in its own memory if it is contiguous."""
    # A view would keep the stride of a dimension of one element, which means nothing, and forbid to see bytes.
    return tensor.contiguous().as_strided([tensor.numel()], [1])


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the bytes of ``tensor`` in one row, in its own memory if it is contiguous."""
    return row_of(tensor).view(torch.uint8)


def write(tensor: Tensor, values: Tensor) -> None:
    """Gives ``tensor`` the ``values``, of its shape. One that is expanded takes each of its elements once."""
    once = without_repetition(tensor)
    tensor[once].copy_(values[once])


def without_repetition(tensor: Tensor) -> tuple[slice, ...]:
    """Returns the index of the elements of ``tensor`` of which an expanded one repeats none."""
    # Megatron's forks give parameters an attribute "stride", which hides the method.
    return tuple(slice(0, 1) if stride == 0 else slice(None) for stride in Tensor.stride(tensor))
