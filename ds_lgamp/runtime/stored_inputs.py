"""The inputs of chunks that wait for their backward on the host."""

from contextlib import suppress

import torch

from ds_lgamp.partition.bus import Bus, Transfer
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
        """Copies, each with its end on the host and the leaf whose data it moves."""
        self._away: dict[_Place, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """Data on the host, each with its leaf."""
        self._homes: dict[tuple[_Place, int], torch.Tensor] = {}
        """Memory of the host for each tensor of each input, which every step uses again."""

    def store(self, chunk: int, micro_batch: int, beginning: Tensors) -> None:
        """Launches the copies of an input to the host."""
        copies = self._under_way[chunk, micro_batch] = []
        leaves = differentiable(beginning)
        _part(beginning, leaves)
        for number, leaf in enumerate(leaves):
            on_host = self._home(((chunk, micro_batch), number), leaf)
            copies.append((self._bus.store(on_host, leaf.detach().reshape(-1)), on_host, leaf))

    def _home(self, place: tuple[_Place, int], leaf: torch.Tensor) -> torch.Tensor:
        if not self._on_disk:
            home = self._homes.get(place)
            if home is None or home.numel() < leaf.nbytes:
                home = self._homes[place] = self._bus.room.empty(leaf.nbytes, torch.uint8)
            return home[: leaf.nbytes].view(leaf.dtype)
        assert self._bus.disk is not None, "inputs lie on it"
        return self._bus.disk.empty(leaf.numel(), leaf.dtype)

    def wait_store(self, chunk: int, micro_batch: int) -> None:
        """Waits for the copies, and frees the input on the device."""
        away = self._away[chunk, micro_batch] = []
        for transfer, on_host, leaf in self._under_way.pop((chunk, micro_batch)):
            transfer.wait()
            leaf.data = placeholder(leaf)
            away.append((on_host, leaf))

    def load(self, chunk: int, micro_batch: int) -> None:
        """Launches the copies of an input back to the device."""
        copies = self._under_way[chunk, micro_batch] = []
        for on_host, leaf in self._away.pop((chunk, micro_batch)):
            data = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
            copies.append((self._bus.load(data.view(-1), on_host), on_host, leaf))
            leaf.data = data

    def wait_load(self, chunk: int, micro_batch: int) -> None:
        """Waits until the input is on the device."""
        for transfer, _, _ in self._under_way.pop((chunk, micro_batch)):
            transfer.wait()

    def clear(self) -> None:
        """Forgets the inputs of a batch that failed."""
        for copies in self._under_way.values():
            for transfer, _, _ in copies:
                with suppress(RuntimeError):
                    # The next batch writes to its memory.
                    transfer.done()
        self._under_way.clear()
        self._away.clear()


def _part(beginning: Tensors, leaves: list[torch.Tensor]) -> None:
    """Gives members that stay on the device memory of their own, if they share that of one of the ``leaves``, as the
    members of a message do."""
    leaving = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    for member in beginning if isinstance(beginning, tuple) else ():
        if not member.is_floating_point() and member.untyped_storage().data_ptr() in leaving:
            member.data = member.data.clone()
