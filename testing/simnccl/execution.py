"""Lines of works, and the memory that works use."""

import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

DTYPES = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
}
"""Those that NCCL carries, but for floats of 8 bits."""
_HELD_SECONDS = 5.0
"""How long a late work is held if nobody waits. The host may be blocked where this module cannot see it."""
_POLLS = 3
"""After so many questions whether a late work is complete, it is no longer held."""

Tensors = Sequence[torch.Tensor]
Travel = Callable[[Any, Tensors, Tensors], None]
"""Executes a work with gloo: from copies of its inputs it fills tensors like its outputs."""


class Fault(Exception):
    """The program would be wrong on NCCL."""


class Delivery(NamedTuple):
    """When works execute: "early", as soon as their line allows; "late", not before the host waits for some work;
    "random", each early or late, after a short pause, decided by ``seed``."""

    when: str = "early"
    seed: int = 0


class Host:
    """This process, with all its communicators."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Guards the fields below and those of lines."""
        self.executed = 0
        """Number of works that were executed, on any line."""
        self.lines: list[Line] = []
        self.faults: deque[str] = deque()
        self.delivery = Delivery()
        self.queue_count: int | None = None
        """How many hardware queues the streams of communicators share; None gives each its own."""
        self.queues: defaultdict[tuple[int | None, int], deque[Work]] = defaultdict(deque)
        """Works that have not started yet, in launch order, by number of queues and number of the queue."""
        self.patience = 30.0
        """Seconds without progress after which a wait raises."""

    def check(self) -> None:
        """Raises the first fault found since the last call."""
        if self.faults:
            raise Fault(self.faults.popleft())

    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Lets all lines execute until ``done`` holds. Raises Fault if no work is executed for too long."""
        with self.changed:
            for line in self.lines:
                for work in line.pending:
                    work.held = False
            self.changed.notify_all()
            while not done():
                before = self.executed
                if not self.changed.wait_for(lambda: done() or self.executed > before, self.patience):  # noqa: B023
                    lines = "\n".join(str(line) for line in self.lines if line.pending)
                    raise Fault(f"no work was executed for {self.patience:g} s while waiting for {what}:\n{lines}")
        self.check()


host = Host()


def deliver(when: str, seed: int = 0) -> None:
    """Decides when the works that follow execute."""
    host.delivery = Delivery(when, seed)


def share_queues(count: int | None) -> None:
    """Lets the streams of all communicators share ``count`` hardware queues, in the order in which they were made; None
    gives each its own. Between works only."""
    host.queue_count = count


def synchronize() -> None:
    """Waits until every work of this rank is executed. Outputs that nobody waited for stay poisoned."""
    host.wait_until(lambda: not any(line.pending for line in host.lines), "all works")


class Memory:
    """What a work reads or writes: where it lies and what it must hold. Keeps no storage alive."""

    def __init__(self, tensor: torch.Tensor, role: str) -> None:
        storage = tensor.untyped_storage()
        self._storage = StorageWeakRef(storage)
        self._place = storage.data_ptr(), storage.nbytes()
        self._layout = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        self._content = bits(tensor.detach().clone())
        self.text = f"{role} {text_of(tensor)}"

    def alias(self) -> torch.Tensor | None:
        """Returns a tensor with this memory; None if it was freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None or (storage.data_ptr(), storage.nbytes()) != self._place:
            return None
        dtype, *layout = self._layout
        return torch.empty(0, dtype=dtype).set_(storage, *layout)

    def complaint(self) -> str | None:
        """Returns how the memory broke the rules; None if it keeps them."""
        alias = self.alias()
        if alias is None:
            return f"{self.text} was freed"
        return None if torch.equal(bits(alias), self._content) else f"{self.text} was written"


class Work(dist.Work):
    """An operation from its launch on.

    Args:
        line: the communicator's.
        name: what the operation is.
        travel: executes it.
        inputs: what it reads.
        outputs: what it writes. They are poisoned here.
        keeps_inputs: whether an input that lies in an output can be read meanwhile.
        confirm: called when the work is executed.
    """

    def __init__(
        self,
        line: "Line",
        name: str,
        travel: Travel,
        inputs: Tensors,
        outputs: Tensors,
        keeps_inputs: bool = False,
        confirm: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__()
        for tensor in (*inputs, *outputs):
            _check_carried(tensor)
        self.name, self._line, self._travel, self.confirm = name, line, travel, confirm
        self._copies = [tensor.detach().clone() for tensor in inputs]
        self._values = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in outputs]
        for tensor in outputs:
            Memory(tensor, "output").alias().fill_(_poison(tensor.dtype))
        if keeps_inputs:
            for tensor, copy in zip(inputs, self._copies):
                Memory(tensor, "input").alias().copy_(copy)
        self._outputs = [Memory(tensor, "output") for tensor in outputs]
        self._inputs = [Memory(tensor, "input") for tensor in inputs]
        self.queue: deque[Work] = deque()
        """The hardware queue of its stream. It starts when it is the first there."""
        self.executed = False
        self._failure: Exception | None = None
        self._arrived = False
        delivery = host.delivery
        draws = random.Random(f"{delivery.seed} {line.name} {line.launched}")
        self._polls = 0
        self.held = delivery.when == "late" or (delivery.when == "random" and draws.random() < 0.5)
        self._pause = draws.random() * 0.002 if delivery.when == "random" else 0.0

    def execute(self, gloo: Any) -> None:
        time.sleep(self._pause)
        try:
            self._travel(gloo, self._copies, self._values)
        except Exception as error:
            self._failure = error
        for memory in (*self._inputs, *self._outputs):
            complaint = memory.complaint()
            if complaint:
                host.faults.append(f"{self._line.name}: {self.name} was under way when its {complaint}")
                return

    def wait(self, timeout: timedelta | None = None) -> bool:
        host.wait_until(lambda: self.executed, f"{self._line.name}: {self.name}")
        self._arrive()
        return True

    def is_completed(self) -> bool:
        host.check()
        with host.changed:
            self._polls += 1
            if self._polls == _POLLS:
                self.held = False
                host.changed.notify_all()
            if not self.executed:
                return False
        self._arrive()
        return True

    def synchronize(self) -> None:
        self.wait()

    def _arrive(self) -> None:
        """Fills the outputs. Raises Fault if the memory of the work was not left alone until now."""
        if self._failure is not None:
            raise RuntimeError(f"{self._line.name}: {self.name} failed: {self._failure}") from self._failure
        if not self._arrived:
            self._arrived = True
            # Who waits only now did not know that it was executed.
            for memory in (*self._inputs, *self._outputs):
                complaint = memory.complaint()
                if complaint:
                    raise Fault(f"{self._line.name}: nobody had waited for {self.name} when its {complaint}")
            for memory, values in zip(self._outputs, self._values):
                alias = memory.alias()
                assert alias is not None, "it has no complaint"
                alias.copy_(values)


class Line:
    """The stream of a communicator."""

    made = 0
    """How many there have been in this process."""

    def __init__(self, name: str, gloo: Any) -> None:
        self.name, self._gloo = name, gloo
        self.pending: deque[Work] = deque()
        """Works that are not executed yet, or just now."""
        self.launched = 0
        self._closed = False
        self._number = Line.made
        Line.made += 1
        host.lines.append(self)
        threading.Thread(target=self._execute, name=name, daemon=True).start()

    def __str__(self) -> str:
        first, *others = self.pending
        return f"{self.name}: {', then '.join([f'{first.name} (at its turn)', *(work.name for work in others)])}"

    def append(self, work: Work) -> None:
        with host.changed:
            self.launched += 1
            self.pending.append(work)
            count = host.queue_count
            work.queue = host.queues[count, self._number if count is None else self._number % count]
            work.queue.append(work)
            host.changed.notify_all()

    def close(self) -> None:
        with host.changed:
            self._closed = True
            host.lines.remove(self)
            host.changed.notify_all()

    def _execute(self) -> None:
        for work in self._due():
            work.execute(self._gloo)
            with host.changed:
                self.pending.popleft()
                work.executed = True
                host.executed += 1
                host.changed.notify_all()
            if work.confirm is not None:
                work.confirm(self._gloo)

    def _due(self) -> Iterator[Work]:
        """Yields the works in order, each when it may execute."""
        while True:
            with host.changed:
                host.changed.wait_for(lambda: self.pending or self._closed)
                if self._closed:
                    return
                work = self.pending[0]
                host.changed.wait_for(lambda: not work.held, _HELD_SECONDS)  # noqa: B023
                # What was launched before it in its hardware queue must have started.
                host.changed.wait_for(lambda: work.queue[0] is work or self._closed)  # noqa: B023
                if self._closed:
                    return
                work.queue.popleft()
                host.changed.notify_all()
            yield work


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor, as a view."""
    # A single element may have any stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _poison(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point:
        return torch.nan
    return True if dtype == torch.bool else torch.iinfo(dtype).min if dtype.is_signed else torch.iinfo(dtype).max


def _check_carried(tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise Fault(f"NCCL carries no {text_of(tensor)}")
    if not tensor.is_contiguous():
        raise Fault(f"NCCL carries contiguous tensors only, not {text_of(tensor)} with strides {tensor.stride()}")


def text_of(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
