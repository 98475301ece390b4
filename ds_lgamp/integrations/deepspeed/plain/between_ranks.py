"""What the ranks of a plain script tell each other.

They agree on what they do next, so that a rank that calls something else is named and no rank waits for it. They
exchange values with tensors: micro-batches before a batch, outputs after it. Rank 0 alone may read a model's state, of
layers that other ranks hold.

Scripts of stock DeepSpeed may ask for names again after all ranks have read values, on the rank that writes them. The
other ranks do not come then: they wait in a barrier of the script. So before ranks read again what they have read since
the last step, rank 0 calls the roll in the store of the job. Without the others it answers with names, shapes and
types, which never change. Values could have changed, and refuse to be read.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils._pytree import tree_map_only

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.engine.data import to_device
from ds_lgamp.partition.agreement import Terms, difference, digest, everyone, host_group, largest
from ds_lgamp.partition.guard import absent
from ds_lgamp.watch.launcher import attempt
from ds_lgamp.watch.this_rank import this_rank

_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
"""From torch 2.14 on, the public function; the other one then warns."""
_PATIENCE = timedelta(days=1)
"""How long a rank that has ended its script waits for those that go on alone, as a rank 0 that evaluates or uploads.
The lifeline notices at once when a rank is gone."""
PATIENCE = 10.0
"""Seconds that rank 0 waits for the others to read with it."""
_PAUSE = 0.02
"""Seconds between two looks into the store."""


class Next(IntEnum):
    """What a rank does next."""

    END = 0
    """It ends its script."""
    EVALUATE = 1
    TRAIN = 2
    """Its number is that of its micro-batches."""
    STEP = 3
    """It steps the optimizer. Its numbers are the smallest and the largest factor of its losses; see
    :meth:`~ds_lgamp.integrations.deepspeed.plain.loss_engine.ReturnedLosses.common_factor`."""
    READ_STATE = 4
    """It gathers the state of the whole model."""
    LOAD_STATE = 5
    FORWARD = 6
    """It calls for outputs, of which the script computes the loss. Its number is that of earlier calls for the step."""
    STEP_OF_OUTPUTS = 7
    """It steps the optimizer. Its number is that of calls whose outputs have no gradient."""


def agree(
    own: Next, *numbers: float, terms: Terms = MappingProxyType({}), flags: tuple[bool, bool] = (False, False)
) -> tuple[bool, bool]:
    """Raises ConfigError on all ranks if one does something else next, with other ``numbers``, or on other ``terms``.
    Returns which of the ``flags`` any rank has. Collective over all ranks. Hosts talk, devices do not."""
    if dist.get_world_size() == 1:
        return flags
    # Equally many for every Next, because ranks may disagree.
    agreed = [own, *numbers, 0.0, 0.0][:3]
    number = digest(terms)
    first, second, greatest, least, *extremes = largest(*flags, number, -number, *agreed, *(-each for each in agreed))
    if extremes[:3] != [-each for each in extremes[3:]]:
        raise ConfigError(_difference(everyone((own, numbers), host_group())))
    if greatest != -least:
        raise ConfigError(difference(everyone(terms, host_group())))
    return bool(first), bool(second)


def agree_at_the_end() -> None:
    """Lets this rank tell the others when it ends its script: they may be in a batch that they cannot finish alone.
    Every rank calls it as often as the others."""
    this_rank.agreements[_agree_on_the_end] = None


def _agree_on_the_end() -> None:
    if dist.is_initialized():
        _set_timeout(_PATIENCE, host_group())
        agree(Next.END)


def _difference(ranks: Sequence[tuple[Next, Sequence[float]]]) -> str:
    """Returns the sentence that names two ranks that differ."""
    other = next(rank for rank, each in enumerate(ranks) if each != ranks[0])
    return (
        f"rank 0 {_described(*ranks[0])}, but rank {other} {_described(*ranks[other])}; let all ranks call the same, "
        "with the same number of micro-batches per step and the same factor of all losses"
    )


def _described(following: Next, numbers: Sequence[float]) -> str:
    if following is not Next.STEP:
        return _WORDS[following].format(*numbers)
    smallest, largest = numbers
    if smallest == math.inf:
        return "calls engine.step() with a loss multiplied by NaN or infinity"
    if math.isinf(largest):
        return "calls engine.step() before every loss of the batch went through engine.backward(loss) once"
    factors = f"{smallest:g}" if smallest == largest else f"factors from {smallest:g} to {largest:g}"
    return f"calls engine.step() with losses multiplied by {factors}"


_WORDS = {
    Next.END: "ended its script",
    Next.EVALUATE: "calls the engine for evaluation",
    Next.READ_STATE: "reads the state of the whole model (state_dict, save_pretrained, save_16bit_model)",
    Next.LOAD_STATE: "loads the state of the model",
    Next.FORWARD: "calls the engine for outputs of micro-batch {} of a step",
    Next.STEP_OF_OUTPUTS: "calls engine.step() with {} calls whose outputs have no gradient",
    Next.TRAIN: "trains on {} micro-batches for one step",
}
"""What a rank does next, with its number."""


def others_read(number: int) -> bool:
    """Whether all ranks come to the read of this ``number``, as this one does. Ranks other than 0 only say that they
    are there."""
    store, rank = _get_default_store(), dist.get_rank()
    key = f"ds_lgamp/reads/{attempt()}/{number}"
    if rank != 0:
        store.set(f"{key}/{rank}", "")
        return True
    others = [f"{key}/{other}" for other in range(1, dist.get_world_size())]
    end = time.monotonic() + PATIENCE
    while others and not store.check(others):
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE)
    return True


def without_values(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``state`` with tensors that only have shape and type. Names that share a tensor do so there, too."""
    tensors: dict[int, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and id(value) not in tensors:
            like = torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)
            tensors[id(value)] = absent(
                like,
                f"the value of {name} is read, but a state_dict that rank 0 alone calls has only names, shapes and "
                "types; keep the state that all ranks have read, or call state_dict on all ranks",
            )
    return {name: tensors.get(id(value), value) for name, value in state.items()}


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
        return tree_map_only(_Slot, lambda slot: slot.read(message), self.slots)


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
        if values is not None:
            self._send({peer: value for peer, value in enumerate(values) if peer != source})
            return values[source]
        return self._send({})[source]

    def collect(self, own: Any, target: int) -> list[Any]:
        """Returns ``own`` of every rank of the pipeline on the rank ``target``, and only its own on others.
        Collective."""
        if self._group.rank() != target:
            self._send({target: own})
            return [own]
        arrived = self._send({})
        return [arrived.get(peer, own) for peer in range(self._group.size())]

    def _send(self, values: Mapping[int, Any]) -> dict[int, Any]:
        """Sends ``values`` to the ranks of the pipeline that are their keys. Returns what ranks have sent to this one.
        Collective."""
        if self._group.size() == 1:
            return {}
        packed = {peer: _pack(value) for peer, value in values.items()}
        described = everyone({peer: each for peer, (each, _) in packed.items()}, self._hosts)
        arriving = {peer: each[own] for peer, each in enumerate(described) if (own := self._group.rank()) in each}
        messages = {peer: self._message(each.size, []) for peer, each in arriving.items()}
        sent = {peer: self._message(each.size, tensors) for peer, (each, tensors) in packed.items()}
        ways = ((dist.isend, sent), (dist.irecv, messages))
        operations = [
            dist.P2POp(operation, message, dist.get_global_rank(self._group, peer), self._group)
            for operation, of_peers in ways
            for peer, message in of_peers.items()
            if message.numel()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return {peer: each.unpack(messages[peer]) for peer, each in arriving.items()}

    def of_rank(self, own: Any, source: int) -> Any:
        """Returns ``own`` of the rank ``source`` of the pipeline, a value without tensors. Collective."""
        return own if self._group.size() == 1 else everyone(own, self._hosts)[source]

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
