"""Buffers of the host in which units from the disk are updated: one is updated while the other one is written, and then
read for the next unit."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from threading import Condition
from typing import NamedTuple

import torch

from ds_lgamp.cost.disk import room
from ds_lgamp.partition.disk import Disk, aligned
from ds_lgamp.partition.host_thread import HostThread, Job
from ds_lgamp.schedule.offload import UPDATE_BUFFERS


class Contents(NamedTuple):
    """What of a unit lies on the disk."""

    homes: Sequence[torch.Tensor]
    """All tensors that the update reads or writes."""
    read: Sequence[torch.Tensor]
    """Those that have values for it."""

    @property
    def bytes(self) -> int:
        """What the unit takes of a buffer."""
        return sum(room(home.nbytes) for home in self.homes)


class UpdateBuffers:
    """Reads units in the order in which they were announced, as soon as a buffer is free, and writes them behind.

    One thread announces, another one fetches and puts back one unit after the other, in the same order.

    Args:
        disk: holds the units.
        size: bytes of the largest unit.
    """

    def __init__(self, disk: Disk, size: int) -> None:
        self._disk = disk
        self._size = size
        self._free: deque[_Buffer] = deque()
        self._announced: deque[tuple[Hashable, Contents]] = deque()
        self._ahead: dict[Hashable, _Buffer] = {}
        """Buffers by the unit that they are for."""
        self._condition = Condition()
        self._made = False

    def announce(self, unit: Hashable, contents: Contents) -> None:
        """Lets ``unit`` be read as soon as a buffer is free. Nobody else writes to it until it was put back."""
        with self._condition:
            if not self._made:
                # Taken with the first update, not while the model is built.
                self._free.extend(_Buffer(self._disk, self._size) for _ in range(UPDATE_BUFFERS))
                self._made = True
            self._announced.append((unit, contents))
            self._read_ahead()

    def fetch(self, unit: Hashable) -> dict[int, torch.Tensor]:
        """Returns memory for each tensor of ``unit``, by the tensor's id. What was to be read is there.

        Raises:
            OSError: the unit cannot be read, or what was in its buffer could not be written.
        """
        with self._condition:
            buffer = self._ahead[unit]
        return buffer.contents()

    def put(self, unit: Hashable, written: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Begins to write tensors of ``unit`` back. Returns what waits for the end of that, and raises OSError if the
        disk fails."""
        with self._condition:
            buffer = self._ahead.pop(unit)
            over = buffer.write(written)
            self._free.append(buffer)
            self._read_ahead()
        return over

    def _read_ahead(self) -> None:
        while self._announced and self._free:
            unit, contents = self._announced.popleft()
            self._ahead[unit] = self._free.popleft()
            self._ahead[unit].read(contents)


class _Buffer:
    """Memory of one unit, with a thread that reads and writes it in the order of the calls."""

    def __init__(self, disk: Disk, size: int) -> None:
        self._disk, self._memory = disk, aligned(size)
        self._thread = HostThread(torch.device("cpu"))
        self._under_way: Job | None = None
        self._places: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Tensors on the disk and their bytes in the buffer, by the tensor's id."""

    def read(self, contents: Contents) -> None:
        self._places, start = {}, 0
        for home in contents.homes:
            end = start + room(home.nbytes)
            self._places[id(home)] = home, self._memory[start:end]
            start = end
        self._start(self._disk.read, contents.read)

    def write(self, written: Sequence[torch.Tensor]) -> Callable[[], None]:
        self._start(self._disk.write, written)
        under_way = self._under_way
        assert under_way is not None, "it has begun"
        return under_way.wait

    def contents(self) -> dict[int, torch.Tensor]:
        assert self._under_way is not None, "the unit was announced"
        self._under_way.wait()
        return {key: memory[: home.nbytes].view(home.dtype) for key, (home, memory) in self._places.items()}

    def _start(self, move: Callable, homes: Sequence[torch.Tensor]) -> None:
        places = [self._places[id(home)] for home in homes]
        self._under_way = self._thread.start(partial(_run, move, places))


def _run(move: Callable, places: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    moving = [move(home, memory) for home, memory in places]
    for each in moving:
        each.settle()
    for each in moving:
        each.wait()
