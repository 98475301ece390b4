"""Carries values with tensors between the ranks of a pipeline: micro-batches before a batch, outputs after it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ds_lgamp.integrations.deepspeed.engine.data import to_device
from ds_lgamp.partition.agreement import everyone

_ALIGNMENT = 16
"""In bytes. Every tensor of a message starts at a multiple. GPU kernels load as many at once, and some fail where a
tensor begins elsewhere."""


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

    def read(self, message: Tensor) -> Tensor:
        """Returns the tensor. A single number has memory of its own: scripts keep losses, but not the logits beside."""
        tensor = self.of(message)
        return tensor.clone() if tensor.numel() == 1 else tensor


@dataclass
class _Packed:
    """A value with slots in place of its tensors."""

    slots: Any
    size: int
    """The bytes of the message that holds the tensors."""

    def unpack(self, message: Tensor) -> Any:
        return tree_map_only(_Slot, _reader(message), self.slots)


class Exchange:
    """Carries values between the ranks of a pipeline. A value is any nesting of lists, tuples and dictionaries. Its
    tensors travel as bytes between devices, everything else between hosts.

    Args:
        group: the ranks of the pipeline.
        hosts: the same ranks, through which hosts talk.
        device: tensors travel from here and arrive here.
    """

    def __init__(self, group: dist.ProcessGroup, hosts: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._hosts, self._device = group, hosts, device

    def gather(self, own: Any) -> list[Any]:
        """Returns ``own`` of every rank of the pipeline. Collective."""
        own = tree_map_only(Tensor, lambda tensor: to_device(tensor, self._device), own)
        if self._group.size() == 1:
            return [own]
        packed, tensors = _pack(own)
        ranks = everyone(packed, self._hosts)
        message = self._message(max(each.size for each in ranks), tensors)
        messages = [torch.empty_like(message) for _ in ranks]
        dist.all_gather(messages, message, group=self._group)
        return [each.unpack(message) for each, message in zip(ranks, messages)]

    def scatter(self, values: list[Any] | None, source: int) -> Any:
        """Returns this rank's member of ``values``, which the rank ``source`` of the pipeline has. Collective."""
        if self._group.size() == 1:
            assert values is not None, "the only rank is the source"
            return values[0]
        packed = None if values is None else [_pack(value) for value in values]
        described = everyone(None if packed is None else [each for each, _ in packed], self._hosts)[source]
        if values is None or packed is None:
            own = described[self._group.rank()]
            message = self._message(own.size, [])
            self._transfer(dist.irecv, {source: message})
            return own.unpack(message)
        messages = {peer: self._message(each.size, tensors) for peer, (each, tensors) in enumerate(packed)}
        del messages[source]
        self._transfer(dist.isend, messages)
        return values[source]

    def collect(self, own: Any, target: int) -> list[Any]:
        """Returns ``own`` of every rank of the pipeline on the rank ``target``, and only its own on others.
        Collective."""
        if self._group.size() == 1:
            return [own]
        packed, tensors = _pack(own)
        ranks = everyone(packed, self._hosts)
        if self._group.rank() != target:
            self._transfer(dist.isend, {target: self._message(packed.size, tensors)})
            return [own]
        messages = {peer: self._message(each.size, []) for peer, each in enumerate(ranks) if peer != target}
        self._transfer(dist.irecv, messages)
        return [own if peer == target else each.unpack(messages[peer]) for peer, each in enumerate(ranks)]

    def of_rank(self, own: Any, source: int) -> Any:
        """Returns ``own`` of the rank ``source`` of the pipeline, a value without tensors. Collective."""
        return own if self._group.size() == 1 else everyone(own, self._hosts)[source]

    def _transfer(self, operation: Callable[..., Any], messages: dict[int, Tensor]) -> None:
        """Sends or receives messages, which are given by the peer's rank in the pipeline."""
        operations = [
            dist.P2POp(operation, message, dist.get_global_rank(self._group, peer), self._group)
            for peer, message in messages.items()
            if message.numel()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()

    def _message(self, size: int, tensors: list[tuple[_Slot, Tensor]]) -> Tensor:
        message = torch.empty(size, dtype=torch.uint8, device=self._device)
        for slot, tensor in tensors:
            slot.of(message).copy_(tensor)
        return message


def _pack(value: Any) -> tuple[_Packed, list[tuple[_Slot, Tensor]]]:
    """Returns ``value`` without its tensors, and the tensors by their slots."""
    size, tensors = 0, []

    def slot_of(tensor: Tensor) -> _Slot:
        nonlocal size
        slot = _Slot(size, tensor.shape, tensor.dtype)
        tensors.append((slot, tensor))
        size = -(-slot.end // _ALIGNMENT) * _ALIGNMENT
        return slot

    return _Packed(tree_map_only(Tensor, slot_of, value), size), tensors


def _reader(message: Tensor) -> Callable[[_Slot], Tensor]:
    return lambda slot: slot.read(message)
