"""Where the time of a step goes: a stopwatch for each rank, and clocks that show the same time on all ranks."""

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ds_lgamp.partition.agreement import everyone, host_group, machine

EXPOSED_WAITS = ("data", "gather", "reduce", "activation", "gradient", "send", "load", "store")
"""What each wait is for: micro-batches (data), parameters (gather), the end of reductions (reduce), results of
neighbours (activation, gradient), sends (send), and copies between host and device (load, store)."""
COMPUTE = ("forward", "backward", "step")

_OFF: AbstractContextManager[None] = nullcontext()
ROUNDS = 8
"""How often to ask the first rank. The fastest answer counts."""

Mark = Any
"""A moment: seconds of the host's clock, or an event of the device."""
Clock = Callable[[], float]
"""Returns seconds."""


class Timing(Protocol):
    """Records where the time goes."""

    def time(self, kind: str) -> AbstractContextManager[Any]:
        """Times the block as ``kind``, one of COMPUTE or EXPOSED_WAITS."""
        ...


class Stopwatch:
    """Adds up seconds by kind on this rank.

    On the CPU it reads the host's clock. On an accelerator it records events around the work in the current stream, so
    nothing waits for the device before :meth:`read`. The time between the events of a wait is the time the stream was
    idle.
    """

    def __init__(self, device: torch.device) -> None:
        self.running = False
        """While this is False, timing costs almost nothing."""
        self._device = device
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, Any, Any]] = []

    def time(self, kind: str) -> AbstractContextManager[None]:
        """Times the block as ``kind``."""
        if not self.running:
            return _OFF
        return _HostTiming(self._seconds, kind) if self._device.type == "cpu" else _DeviceTiming(self, kind)

    def read(self) -> dict[str, float]:
        """Returns seconds by kind since the last reading. On an accelerator, it waits for the timed work."""
        for kind, start, end in self._events:
            end.synchronize()
            self._seconds[kind] += start.elapsed_time(end) / 1000
        seconds = {kind: self._seconds[kind] for kind in (*COMPUTE, *EXPOSED_WAITS)}
        self._events.clear()
        self._seconds.clear()
        return seconds


class _HostTiming(AbstractContextManager):
    def __init__(self, seconds: defaultdict[str, float], kind: str) -> None:
        self._seconds, self._kind = seconds, kind

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        self._seconds[self._kind] += time.perf_counter() - self._start


class _DeviceTiming(AbstractContextManager):
    def __init__(self, stopwatch: Stopwatch, kind: str) -> None:
        self._events, self._kind = stopwatch._events, kind
        event = torch.get_device_module(stopwatch._device).Event
        self._start, self._end = event(enable_timing=True), event(enable_timing=True)

    def __enter__(self) -> None:
        self._start.record()

    def __exit__(self, *_: Any) -> None:
        self._end.record()
        self._events.append((self._kind, self._start, self._end))


def common_zero(own_machine: str, clock: Clock = time.perf_counter) -> float:
    """Returns what this rank's clock showed at one moment, the same for all ranks. Collective over all ranks.

    Ranks on the machine of the first rank have its clock. Others ask it for the time, and are off by at most half a
    round trip.
    """
    group = host_group()
    facts = everyone((own_machine, clock()), group)
    first = facts[0][0]
    # When the last rank that shares the first one's clock has come.
    zero = max(shown for there, shown in facts if there == first)
    others = [rank for rank, (there, _) in enumerate(facts) if there != first]
    rank = dist.get_rank()
    if rank == 0:
        for other in others:
            _answer(other, group, clock)
    return zero + _ahead(group, clock) if rank in others else zero


def _answer(rank: int, group: dist.ProcessGroup, clock: Clock) -> None:
    question = torch.zeros(1, dtype=torch.float64, device="cpu")
    for _ in range(ROUNDS):
        dist.recv(question, rank, group=group)
        dist.send(torch.tensor([clock()], dtype=torch.float64, device="cpu"), rank, group=group)


def _ahead(group: dist.ProcessGroup, clock: Clock) -> float:
    """Returns by how much this rank's clock is later than the first rank's."""
    answer, measured = torch.zeros(1, dtype=torch.float64, device="cpu"), []
    for _ in range(ROUNDS):
        asked = clock()
        dist.send(answer, 0, group=group)
        dist.recv(answer, 0, group=group)
        answered = clock()
        measured.append((answered - asked, (asked + answered) / 2 - answer.item()))
    return min(measured)[1]


class HostClock:
    """Marks are seconds of the host."""

    runs = False
    """Whether the ranks have agreed on a beginning."""

    def start(self) -> None:
        """Counts from now on. Collective over all ranks."""
        self._zero, self.runs = common_zero(machine()), True

    now = staticmethod(time.perf_counter)

    def base_on(self, mark: Mark) -> float:
        """Returns the seconds at ``mark``; the next marks are near to it."""
        return self.seconds(mark)

    def seconds(self, mark: Mark) -> float:
        """Returns the seconds at ``mark`` since all ranks began. Waits for ``mark`` if it is to come."""
        return mark - self._zero

    def is_past(self, mark: Mark) -> bool:
        """Whether :meth:`seconds` would not wait."""
        return True


class DeviceClock(HostClock):
    """Marks are events in the current stream, or seconds of the host."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)

    def start(self) -> None:
        """As the host's. Waits for the device, once, to know what its events mean."""
        super().start()
        self._module.synchronize(self._device)
        self._base = self.now()
        self._module.synchronize(self._device)
        self._base_seconds = HostClock.seconds(self, time.perf_counter())

    def now(self) -> Mark:  # type: ignore[override]
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def base_on(self, mark: Mark) -> float:
        """Counts from ``mark`` from now on: the time between two events is less exact, the longer it is."""
        self._base_seconds, self._base = self.seconds(mark), mark
        return self._base_seconds

    def seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return HostClock.seconds(self, mark)
        mark.synchronize()
        return self._base_seconds + self._base.elapsed_time(mark) / 1000

    def is_past(self, mark: Mark) -> bool:
        return isinstance(mark, float) or mark.query()
