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
    """Counts this rank's collectives and point-to-point messages, and the bytes they send.

    Calls of ``torch.distributed`` pass torch's dispatcher, inside the backward pass too. Wrappers around the calls
    would miss those whose names change between releases. Functional collectives, with which DTensor redistributes, are
    not counted.

    A rank with W ranks in its group sends these bytes, as in the usual algorithms:

    - all-gather: W-1 shards.
    - reduce-scatter: (W-1)/W of the input.
    - all-to-all: the input without the rank's own part.
    - all-reduce: 2(W-1)/W of the input.
    - broadcast and reduce: (W-1)/W of the input, on average.
    - send: the whole tensor.

    A group of one rank moves nothing and is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, int]] = []
        """Kind and bytes sent of every call, in order."""
        self._groups: list[str] = []
        """The name of the group of every call."""

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        namespace, name = function._schema.name.split("::")
        if namespace == "c10d":
            group = _group_of(args)
            if group is not None and group.size() > 1:
                kind = _KINDS.get(name, name)
                self.log.append((kind, _bytes_sent(kind, args, group.size())))
                self._groups.append(group.group_name)
        return function(*args, **(kwargs or {}))

    @property
    def calls(self) -> Counter[str]:
        """The number of calls by kind."""
        return Counter(kind for kind, _ in self.log)

    @property
    def bytes_sent(self) -> Counter[str]:
        """The bytes sent by kind."""
        sent: Counter[str] = Counter()
        for kind, amount in self.log:
            sent[kind] += amount
        return sent

    def calls_in(self, group: dist.ProcessGroup) -> list[tuple[str, int]]:
        """Returns kind and bytes sent of every call in ``group``, in order."""
        return [call for call, name in zip(self.log, self._groups) if name == group.group_name]

    def collectives(self) -> int:
        """Returns the number of calls, without point-to-point messages."""
        return sum(count for kind, count in self.calls.items() if kind not in ("send", "receive"))


def _bytes_sent(kind: str, args: tuple, ranks: int) -> int:
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    if kind in ("receive", "barrier") or not tensors:
        return 0
    total = sum(map(_nbytes, tensors))
    if kind == "send":
        return total
    if kind in ("all_gather", "reduce_scatter"):
        # The arguments hold one shard of each tensor on one side and all W shards on the other.
        return total // (ranks + 1) * (ranks - 1)
    if kind == "all_to_all":
        # The outputs come first. As many inputs follow.
        own, parts = _parts(args, ranks)
        return sum(map(_nbytes, tensors[len(tensors) // 2 :])) * (parts - own) // max(1, parts)
    return (2 if kind == "all_reduce" else 1) * total * (ranks - 1) // ranks


def _parts(args: tuple, ranks: int) -> tuple[int, int]:
    """Returns the size of the part of an all-to-all's input that stays on this rank, and that of the whole input. If
    parts are unequal, their sizes follow those of the output's."""
    group, lists = _group_of(args), [argument for argument in args if isinstance(argument, list)]
    assert group is not None, "an all-to-all has a group"
    sizes = [sizes for sizes in lists if sizes and all(type(size) is int for size in sizes)]
    parts = sizes[-1] if sizes else [1] * ranks
    return parts[group.rank()], sum(parts)


def _group_of(args: tuple) -> dist.ProcessGroup | None:
    groups = (argument for argument in args if isinstance(argument, torch.ScriptObject))
    return next(map(dist.ProcessGroup.unbox, groups), None)


class PeakMemory(TorchDispatchMode):
    """Measures the most bytes of tensor storages alive after any operation. The caller names storages that exist
    before.

    Args:
        existing: tensors alive already, such as parameters and optimizer state.
        fake: whether fake tensors count, and they alone, with the bytes that real ones would take.
        only_new: whether only what operations inside blocks of this mode make counts. Then nobody needs to name what
            exists, and operations that change its size go unseen.
    """

    supports_higher_order_operators = True

    def __init__(self, existing: Iterable[torch.Tensor] = (), fake: bool = False, only_new: bool = False) -> None:
        super().__init__()
        self._only_new = only_new
        self._old: dict[int, weakref.ref] = {}
        """By address: storages that do not count, because they are not new."""
        self._counts = _is_fake if fake else _has_storage
        self.peak = 0
        self._storages: dict[int, tuple[weakref.ref, int]] = {}
        """By address: a storage, and its bytes when it was last looked at."""
        self._total = 0
        """The sum of those bytes. It is too high if storages have shrunk since, which no operation reports."""
        self._see(list(existing))
        self.peak = self.live()

    def live(self) -> int:
        """Returns the bytes alive now."""
        for key, (reference, known) in list(self._storages.items()):
            storage = reference()
            if storage is not None:
                self._storages[key] = reference, storage.nbytes()
                self._total += storage.nbytes() - known
        return self._total

    def storages(self) -> list[weakref.ref]:
        """Returns weak references to the storages that count and are alive."""
        return [reference for reference, _ in self._storages.values()]

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(map(_wraps, types)):
            # A wrapper unfolds into operations on its inner tensors. Those are dispatched here in turn.
            return NotImplemented
        if self._only_new:
            self._leave_out((args, kwargs))
        else:
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
                if key in self._old:
                    continue
                reference, known = self._storages.get(key) or (weakref.ref(storage, partial(self._forget, key)), 0)
                self._storages[key] = reference, now
                self._total += now - known

    def _leave_out(self, values: Any) -> None:
        """Leaves out storages that nothing inside a block has made."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor) and self._counts(leaf):
                storage = storage_of(leaf)
                key = storage._cdata
                if key not in self._storages and key not in self._old:
                    self._old[key] = weakref.ref(storage, partial(self._forget, key))

    def _forget(self, key: int, reference: weakref.ref) -> None:
        """Removes a storage that is gone. Its address may already belong to another one."""
        if self._old.get(key) is reference:
            del self._old[key]
        if key in self._storages and self._storages[key][0] is reference:
            self._total -= self._storages.pop(key)[1]


def live_tensors() -> list[torch.Tensor]:
    """Returns every tensor that Python knows and that has memory or is a view of some."""
    # Looks at types, because isinstance would ask torch's deprecated objects for their class, and they warn.
    return [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor) and _has_storage(value)]


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Returns the memory of a tensor. Reading a parameter would wait for a gather in flight; this does not."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()


def _has_storage(tensor: torch.Tensor) -> bool:
    # Wrappers and fake tensors report memory that they do not have.
    real = not _wraps(type(tensor)) and not isinstance(tensor, FakeTensor)
    return real and tensor.layout is torch.strided and tensor.device.type != "meta"


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _wraps(kind: type) -> bool:
    """Whether tensors of this type consist of other tensors, as DTensors do."""
    return hasattr(kind, "__tensor_flatten__")


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
