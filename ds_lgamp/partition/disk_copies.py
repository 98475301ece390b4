"""Copies between a device and tensors on the disk, through a few buffers of the host.

A tensor travels in pieces. The disk moves some of them while another one crosses the bus, so the memory that this takes
does not grow with the tensors.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from ds_lgamp.cost.disk import room
from ds_lgamp.partition import disk as disks
from ds_lgamp.partition.disk import Disk, Moving, aligned

Copy = Callable[[torch.Tensor, torch.Tensor, Any], Any]
"""As in bus.py."""


def buffer_bytes() -> int:
    """Returns the memory of the host that one direction takes."""
    return disks.PIECES * disks.PIECE


def through_buffers(disk: Disk, pinned: bool, load: Copy, store: Copy) -> list[Copy]:
    """Returns ``load`` and ``store`` for tensors that may lie on ``disk``. Each is called in one thread."""
    return [_Reading(disk, pinned, load), _Writing(disk, pinned, store)]


class _Buffers:
    """Memory for the pieces of one direction. It is taken with the first tensor on the disk.

    Args:
        copy: what carries pieces in memory over the bus.
    """

    def __init__(self, disk: Disk, pinned: bool, copy: Copy) -> None:
        self.disk, self.copy, self._pinned = disk, copy, pinned
        self._free: deque[torch.Tensor] = deque()
        self._memory: torch.Tensor | None = None

    def pieces(self, tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """Returns where each piece of ``tensor`` begins, in bytes, and its part of the tensor."""
        flat = tensor.detach().view(-1).view(torch.uint8)
        return [(start, flat[start : start + disks.PIECE]) for start in range(0, flat.numel(), disks.PIECE)]

    def free(self) -> "deque[torch.Tensor]":
        """Returns the buffers, in a tensor's first use of them."""
        if self._memory is None:
            self._memory = aligned(buffer_bytes(), self._pinned)
        return deque(self._memory.view(disks.PIECES, -1))


class _Reading(_Buffers):
    def __call__(self, target: torch.Tensor, source: torch.Tensor, now: Any) -> Any:
        if not self.disk.holds(source):
            return self.copy(target, source, now)
        free, waiting = self.free(), deque(self.pieces(target))
        reading: deque[tuple[Moving, torch.Tensor, torch.Tensor]] = deque()
        over = None
        try:
            while waiting or reading:
                while waiting and free:
                    start, piece = waiting.popleft()
                    buffer = free.popleft()
                    moving = self.disk.read(source, buffer[: room(piece.numel())], start)
                    reading.append((moving, buffer, piece))
                moving, buffer, piece = reading.popleft()
                moving.wait()
                over = self.copy(piece, buffer[: piece.numel()], now)
                if over is not None:
                    # The next read overwrites the buffer.
                    over.synchronize()
                free.append(buffer)
        finally:
            for moving, _, _ in reading:
                moving.settle()
        return over


class _Writing(_Buffers):
    def __call__(self, target: torch.Tensor, source: torch.Tensor, now: Any) -> Any:
        if not self.disk.holds(target):
            return self.copy(target, source, now)
        free = self.free()
        writing: deque[tuple[Moving, torch.Tensor]] = deque()
        try:
            for start, piece in self.pieces(source):
                if not free:
                    moving, buffer = writing.popleft()
                    moving.wait()
                    free.append(buffer)
                buffer = free.popleft()
                over = self.copy(buffer[: piece.numel()], piece, now)
                if over is not None:
                    over.synchronize()
                writing.append((self.disk.write(target, buffer[: room(piece.numel())], start), buffer))
            while writing:
                writing.popleft()[0].wait()
        finally:
            for moving, _ in writing:
                moving.settle()
        # Nothing is left to wait for on the device.
        return None
