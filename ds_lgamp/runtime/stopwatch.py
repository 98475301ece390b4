"""Measures where the time of a step goes: compute, and waits that nothing hides."""

import time
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

EXPOSED_WAITS = ("data", "gather", "reduce", "activation", "gradient", "send", "load", "store")
"""What each wait is for: micro-batches (data), parameters (gather), the end of reductions (reduce), results of
neighbours (activation, gradient), sends (send), and copies between host and device (load, store)."""
COMPUTE = ("forward", "backward", "step")

_OFF: AbstractContextManager[None] = nullcontext()


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
