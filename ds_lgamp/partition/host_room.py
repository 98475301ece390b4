"""Memory of the host that lasts as long as the training."""

import torch

ALIGNMENT = 64
"""Bytes. Copies and the host's vector instructions are fastest on whole cache lines."""
_SHARE = 8
"""A new block has at least this part of the bytes of the earlier ones."""


class HostRoom:
    """Cuts tensors from blocks of memory, pinned or not.

    torch rounds pinned memory up to a power of two and gives the rest to nobody (``CachingHostAllocator``). A tensor of
    1.1 GB alone would pin 2 GB. So blocks have such sizes, and a tensor goes to the block whose free end suits it best.
    Blocks grow with what there is, so that several tensors of one size share one.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[torch.Tensor] = []
        """The free end of every block that has one."""
        self.bytes = 0
        """Of all blocks."""

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns ``size`` elements. They stay taken, also when nobody uses them any longer."""
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


def shared_size(needed: int) -> int:
    """Returns a size of at least ``needed`` bytes, of which there are eight between powers of two: memory of this size
    serves tensors of many lengths."""
    step = max(ALIGNMENT, block_bytes(needed) // 8)
    return -(-needed // step) * step


def block_bytes(needed: int) -> int:
    """Returns the bytes of a block for a tensor of ``needed`` bytes: the next power of two, whole cache lines."""
    return max(ALIGNMENT, 1 << max(0, needed - 1).bit_length())
