"""The inputs of chunks that wait for their backward on the host."""

import torch

from ds_lgamp.partition.bus import Bus, Transfer
from ds_lgamp.partition.memory import shared_size
from ds_lgamp.runtime.chunk import Tensors, differentiable
from ds_lgamp.runtime.graph import placeholder

_Place = tuple[int, int]
"""A chunk and a micro-batch."""


class StoredInputs:
    """Moves inputs between device and host while the program computes.

    An input is the beginning of a graph: leaves that hold the data from which a chunk is computed again. The leaves
    stay; their data leave. Members without gradients, such as token ids, stay on the device.

    Args:
        on_disk: whether they wait on the disk of the ``bus``, instead of in the memory of the host.
    """

    def __init__(self, bus: Bus, on_disk: bool = False) -> None:
        self._bus, self._on_disk = bus, on_disk
        self._under_way: dict[_Place, list[tuple[Transfer, torch.Tensor, torch.Tensor]]] = {}
        """Copies, each with its memory on the host and the leaf whose data it moves."""
        self._away: dict[_Place, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """Memory on the host with data, and the leaf of each."""
        self._free: dict[int, list[torch.Tensor]] = {}
        """Memory on the host without data, by its bytes."""

    def store(self, chunk: int, micro_batch: int, beginning: Tensors) -> None:
        """Launches the copies of an input to the host."""
        copies = self._under_way[chunk, micro_batch] = []
        leaves = differentiable(beginning)
        _part(beginning, leaves)
        for leaf in leaves:
            home = self._home(leaf)
            copies.append((self._bus.store(_values(home, leaf), leaf.detach().reshape(-1)), home, leaf))

    def _home(self, leaf: torch.Tensor) -> torch.Tensor:
        if self._on_disk:
            assert self._bus.disk is not None, "inputs lie on it"
            return self._bus.disk.empty(leaf.numel(), leaf.dtype)
        fitting = [size for size, free in self._free.items() if free and size >= leaf.nbytes]
        if fitting:
            return self._free[min(fitting)].pop()
        return self._bus.room.empty(shared_size(leaf.nbytes), torch.uint8)

    def wait_store(self, chunk: int, micro_batch: int) -> None:
        """Waits for the copies, and frees the input on the device."""
        away = self._away[chunk, micro_batch] = []
        for transfer, home, leaf in self._under_way.pop((chunk, micro_batch)):
            transfer.wait()
            leaf.data = placeholder(leaf)
            away.append((home, leaf))

    def load(self, chunk: int, micro_batch: int) -> None:
        """Launches the copies of an input back to the device."""
        copies = self._under_way[chunk, micro_batch] = []
        for home, leaf in self._away.pop((chunk, micro_batch)):
            data = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
            copies.append((self._bus.load(data.view(-1), _values(home, data)), home, leaf))
            leaf.data = data

    def wait_load(self, chunk: int, micro_batch: int) -> None:
        """Waits until the input is on the device."""
        for transfer, home, _ in self._under_way.pop((chunk, micro_batch)):
            transfer.wait()
            if not self._on_disk:
                # The next copy to it begins behind what the device does from now on.
                self._free.setdefault(home.numel(), []).append(home)

    def clear(self) -> None:
        """Forgets the inputs of a batch that failed."""
        self._under_way.clear()
        self._away.clear()


def _values(home: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Returns the part of ``home`` that holds the values of ``leaf``, in its dtype."""
    return home if home.dtype == leaf.dtype else home[: leaf.numel() * leaf.itemsize].view(leaf.dtype)


def _part(beginning: Tensors, leaves: list[torch.Tensor]) -> None:
    """Gives members that stay on the device memory of their own, if they share that of one of the ``leaves``, as the
    members of a message do."""
    leaving = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    for member in beginning if isinstance(beginning, tuple) else ():
        if not member.is_floating_point() and member.untyped_storage().data_ptr() in leaving:
            member.data = member.data.clone()
