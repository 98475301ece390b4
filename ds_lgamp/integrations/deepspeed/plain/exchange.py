"""Tells the ranks of a pipeline the micro-batches of all of them."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ds_lgamp.partition.agreement import everyone

_ALIGNMENT = 8
"""In bytes. Every tensor of a message starts at a multiple, which every dtype divides."""


@dataclass
class _Slot:
    """A tensor in a message of bytes."""

    start: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.start + self.shape.numel() * self.dtype.itemsize

    def of(self, message: Tensor) -> Tensor:
        """Returns the tensor, which shares the memory of ``message``."""
        return message[self.start : self.end].view(self.dtype).view(self.shape)


class Exchange:
    """Gathers values with tensors over the ranks of a pipeline.

    Args:
        group: the ranks of the pipeline.
        device: tensors travel from here and arrive here.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def gather(self, own: Any) -> list[Any]:
        """Returns ``own`` of every rank of the pipeline. Collective.

        Args:
            own: any nesting of lists, tuples and dictionaries. Its tensors travel as bytes between devices, everything
                else between hosts.
        """
        own = tree_map_only(Tensor, lambda tensor: tensor.to(self._device, non_blocking=True), own)
        if self._group.size() == 1:
            return [own]
        slots, size, tensors = _slots(own)
        ranks = everyone((slots, size), self._group)
        message = torch.empty(max(size for _, size in ranks), dtype=torch.uint8, device=self._device)
        for slot, tensor in tensors:
            slot.of(message).copy_(tensor)
        messages = [torch.empty_like(message) for _ in ranks]
        dist.all_gather(messages, message, group=self._group)
        return [tree_map_only(_Slot, _reader(message), slots) for (slots, _), message in zip(ranks, messages)]


def _slots(value: Any) -> tuple[Any, int, list[tuple[_Slot, Tensor]]]:
    """Returns ``value`` with slots in place of its tensors, the bytes of the message, and the tensors by slot."""
    size, tensors = 0, []

    def slot_of(tensor: Tensor) -> _Slot:
        nonlocal size
        slot = _Slot(size, tensor.shape, tensor.dtype)
        tensors.append((slot, tensor))
        size = -(-slot.end // _ALIGNMENT) * _ALIGNMENT
        return slot

    slots = tree_map_only(Tensor, slot_of, value)
    return slots, size, tensors


def _reader(message: Tensor) -> Any:
    return lambda slot: slot.of(message)
