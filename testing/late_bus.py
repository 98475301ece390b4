"""A bus that keeps the rules of a GPU's copies on the CPU. There, copies between host and device are over when the
program waits for them, and nothing shows that a wait is missing.

With :func:`late_copies`, the host stands for the device's stream, as in :mod:`testing.simnccl`.

- A load reads its source and fills its target when the program waits for it, no sooner. A store reads its source then.
- What a store fills, the host may read once it has waited for the end of the copy (``done``). A load may read it as
  soon as the program has waited for the store, because the device keeps that order.
- The host's thread is late, too: it begins a job some time after it was asked to.
- Targets hold NaN until then. Memory of the device must exist and stay as it is until the program waits. The source of
  a load must be final when the copy begins. What was freed or written is a :class:`testing.simnccl.Fault`.

It checks no copies from or to a disk, and not that the host leaves the source of a load alone until its end.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from ds_lgamp.integrations.hosts import replace_attribute
from ds_lgamp.partition import bus, host
from ds_lgamp.partition.bus import Bus, Transfer
from testing.simnccl.execution import Fault, Memory

_LATE = 0.02
"""Seconds that the host's thread is late."""
_direction: list[str] = []
"""Of the transfer that begins, in the program's thread."""
_unread: dict[int, "LateTransfer"] = {}
"""Stores that the program has waited for and the host has not, by the address of what they fill."""


class LateTransfer(Transfer):
    """Copies when somebody waits."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor, *others: Any) -> None:
        super().__init__(target, source, *others)
        self._kind = _direction[-1]
        target.detach().fill_(torch.nan)
        self._target = Memory(target, "target")
        self._source = Memory(source, "source")
        self._stored: torch.Tensor | None = None
        """What a store has read and the host may not read yet."""

    def _run(self, copy: Any, stream: Any) -> None:
        super()._run(self._begin, stream)

    def _begin(self, target: torch.Tensor, source: torch.Tensor, now: Any) -> None:
        if self._kind == "load":
            # An update may have come before.
            self._source = Memory(source, "source")

    def wait(self) -> None:
        self._issued.wait()
        if self.tensors is not None and self._error is None:
            target, source = self.tensors
            self._check(self._target, self._source)
            if self._kind == "load":
                target.detach().copy_(_read(source))
            else:
                self._stored, _unread[target.data_ptr()] = source.detach().clone(), self
        super().wait()

    def done(self) -> None:
        super().done()
        for address in [address for address, store in _unread.items() if store is self]:
            del _unread[address]
            self._check(self._target)
            alias = self._target.alias()
            assert alias is not None and self._stored is not None, "it was checked, and the program has waited"
            alias.copy_(self._stored)

    def _check(self, *used: Memory) -> None:
        for memory in used:
            complaint = memory.complaint()
            if complaint:
                raise Fault(f"a {self._kind} was under way when its {complaint}")


def _read(source: torch.Tensor) -> torch.Tensor:
    """Returns what a load finds in ``source``."""
    store = _unread.get(source.data_ptr())
    # Its memory may be gone, and its address another's.
    if store is None or store._stored is None or store._target.complaint():
        return source
    return store._stored


@contextmanager
def late_copies() -> Iterator[None]:
    """Inside the block, every bus that begins a copy keeps the rules."""
    with ExitStack() as undo:
        replace_attribute(bus, "Transfer", LateTransfer, undo)
        replace_attribute(host.Job, "_run", _late(host.Job._run), undo)
        for direction in ("load", "store"):
            replace_attribute(Bus, direction, _noting(direction, getattr(Bus, direction)), undo)
        yield


def _late(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def run(*arguments: Any) -> Any:
        time.sleep(_LATE)
        return stock(*arguments)

    return run


def _noting(direction: str, stock: Callable[..., Transfer]) -> Callable[..., Transfer]:
    @wraps(stock)
    def begin(*arguments: Any, **options: Any) -> Transfer:
        _direction.append(direction)
        try:
            return stock(*arguments, **options)
        finally:
            _direction.pop()

    return begin
