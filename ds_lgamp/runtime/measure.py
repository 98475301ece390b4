"""Exact counters for tests, benchmarks and ``ds_lgamp run --measure``: collectives and live memory, at dispatch."""

import gc
import weakref
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
    "barrier": "barrier",
}


class CollectiveCounter(TorchDispatchMode):
    """Counts what this rank's collectives and point-to-point messages are and how much they send.

    What ``torch.distributed`` calls passes the dispatcher, also inside backward; wrappers around it would miss calls
    whose names change between releases. Functional collectives, which DTensor redistributes with, are left out. Bytes
    are those a rank sends in the usual algorithms, with W ranks: all-gather (W-1) shards, reduce-scatter and all-to-all
    (W-1)/W of the input, all-reduce 2(W-1)/W, broadcast and reduce (W-1)/W on average, send all of it. A group of one
    rank moves nothing and is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, int]] = []
        """Kind and bytes sent of every call, in order."""

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        namespace, name = function._schema.name.split("::")
        if namespace == "c10d":
            ranks = _group_size(args)
            if ranks > 1:
                kind = _KINDS.get(name, name)
                self.log.append((kind, _bytes_sent(kind, args, ranks)))
        return function(*args, **(kwargs or {}))

    @property
    def calls(self) -> Counter[str]:
        """By kind."""
        return Counter(kind for kind, _ in self.log)

    @property
    def bytes_sent(self) -> Counter[str]:
        """By kind."""
        sent: Counter[str] = Counter()
        for kind, amount in self.log:
            sent[kind] += amount
        return sent

    def collectives(self) -> int:
        """Everything but point-to-point messages."""
        return sum(count for kind, count in self.calls.items() if kind not in ("send", "receive"))


def _bytes_sent(kind: str, args: tuple, ranks: int) -> int:
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    if kind in ("receive", "barrier") or not tensors:
        return 0
    total = sum(map(_nbytes, tensors))
    if kind == "send":
        return total
    if kind in ("all_gather", "reduce_scatter"):
        # One shard of each tensor on one side, all W on the other.
        return total // (ranks + 1) * (ranks - 1)
    if kind == "all_to_all":
        # Outputs come first, then as many inputs.
        return sum(map(_nbytes, tensors[len(tensors) // 2 :])) * (ranks - 1) // ranks
    return (2 if kind == "all_reduce" else 1) * total * (ranks - 1) // ranks


def _group_size(args: tuple) -> int:
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument).size()
    return 1


class PeakMemory(TorchDispatchMode):
    """The most bytes of tensor storages alive after any operation. Storages that exist before must be named.

    Args:
        existing: tensors alive already, such as parameters and optimizer state.
        fake: whether fake tensors count, and they alone, with the bytes that real ones would take.
    """

    def __init__(self, existing: Iterable[torch.Tensor] = (), fake: bool = False) -> None:
        super().__init__()
        self._counts = _is_fake if fake else _has_storage
        self.peak = 0
        self._storages: dict[int, tuple[weakref.ref, int]] = {}
        """By address, a storage and its bytes when it was looked at last."""
        self._total = 0
        """Of those bytes. Too high where storages were shrunk since, which no operation tells."""
        self._see(list(existing))
        self.peak = self.live()

    def live(self) -> int:
        """Bytes alive now."""
        for key, (reference, known) in list(self._storages.items()):
            storage = reference()
            if storage is not None:
                self._storages[key] = reference, storage.nbytes()
                self._total += storage.nbytes() - known
        return self._total

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(map(_wraps, types)):
            # It unfolds into operations on the tensors inside, and those come by.
            return NotImplemented
        self._see(args)
        result = function(*args, **(kwargs or {}))
        self._see(result)
        if self._total > self.peak:
            self.peak = max(self.peak, self.live())
        return result

    def _see(self, values: Any) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor) and self._counts(leaf):
                storage = storage_of(leaf)
                key, now = storage._cdata, storage.nbytes()
                reference, known = self._storages.get(key) or (weakref.ref(storage, partial(self._forget, key)), 0)
                self._storages[key] = reference, now
                self._total += now - known

    def _forget(self, key: int, reference: weakref.ref) -> None:
        """A storage is gone; its address may serve another one already."""
        if key in self._storages and self._storages[key][0] is reference:
            self._total -= self._storages.pop(key)[1]


def live_tensors() -> list[torch.Tensor]:
    """Every tensor that Python knows and that has memory, or is a view of some."""
    # By type: isinstance would ask torch's deprecated objects for their class, and they warn.
    return [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor) and _has_storage(value)]


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The memory of a tensor. Looking at it waits for no values, as reading a parameter whose gather is in flight
    would."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()


def _has_storage(tensor: torch.Tensor) -> bool:
    # Wrappers and fake tensors report memory that they do not have.
    real = not _wraps(type(tensor)) and not isinstance(tensor, FakeTensor)
    return real and tensor.layout is torch.strided and tensor.device.type != "meta"


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _wraps(kind: type) -> bool:
    """Whether tensors of this type consist of others, as DTensors do."""
    return hasattr(kind, "__tensor_flatten__")


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
