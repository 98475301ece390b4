"""Memory of the host that lasts as long as the training."""

import torch

ALIGNMENT = 64
"""Bytes. Copies and the host's vector instructions are fastest on whole cache lines."""


class HostRoom:
    """Cuts tensors from blocks of memory, pinned or not.

    torch rounds pinned memory up to a power of two and gives the rest to nobody (``CachingHostAllocator``). A tensor of
    1.1 GB alone would pin 2 GB. So blocks have such sizes, and a tensor goes to the block whose free end suits it best.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[torch.Tensor] = []
        """The free end of every block that has one."""

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns ``size`` elements. They stay taken, also when nobody uses them any longer."""
        needed = size * dtype.itemsize
        suitable = [number for number, free in enumerate(self._free) if free.numel() >= needed]
        if suitable:
            block = self._free.pop(min(suitable, key=lambda number: self._free[number].numel()))
        else:
            block = torch.empty(block_bytes(needed), dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        rest = block[-(-needed // ALIGNMENT) * ALIGNMENT :]
        if rest.numel():
            self._free.append(rest)
        return block[:needed].view(dtype)


def block_bytes(needed: int) -> int:
    """Returns the bytes of a block for a tensor of ``needed`` bytes: the next power of two, whole cache lines."""
    return max(ALIGNMENT, 1 << max(0, needed - 1).bit_length())
