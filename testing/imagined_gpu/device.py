"""The imagined device as torch knows it: ``torch.gpu``."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration

NAME = "gpu"
AVAILABLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
"""Whether this torch lets Python describe a device."""
_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


class HostWaits(Exception):
    """The host would have waited for the device in a step."""


class Event:
    """An event or a stream. The device is never further behind than one step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._step = -1

    def record(self, stream: Any = None) -> None:
        self._step = DEVICE.steps

    def wait_event(self, event: "Event") -> None: ...

    def synchronize(self) -> None:
        if self._step == DEVICE.steps:
            DEVICE.host_waits("an event of this step is awaited")

    def query(self) -> bool:
        return self._step < DEVICE.steps

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


class MemPool:
    """A pool of memory."""


class Device:
    """The functions of a device module. There is one device, and its generator has a state on the host, as CUDA's."""

    Event = Event
    MemPool = MemPool

    def __init__(self) -> None:
        self.steps = 0
        self.pool: MemPool | None = None
        """Where memory comes from; None for the memory that all share."""
        self._in_step = False
        self._random_state = torch.zeros(16, dtype=torch.uint8)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside the block, the host must not wait for the device."""
        self._in_step = True
        self.steps += 1
        try:
            yield
        finally:
            self._in_step = False

    @contextmanager
    def use_mem_pool(self, pool: MemPool, device: Any = None) -> Iterator[None]:
        """Inside the block, memory comes from ``pool``."""
        self.pool = pool
        try:
            yield
        finally:
            self.pool = None

    def host_waits(self, reason: str) -> None:
        """Called where the host would wait. Inside a step raises HostWaits, which names the line that caused it."""
        if self._in_step:
            frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith((_HERE, _TORCH))]
            raise HostWaits(f"{reason} at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}")

    def synchronize(self, device: Any = None) -> None:
        self.host_waits("the device is synchronised")

    def memory_allocated(self, device: Any = None) -> int:
        return 1 << 30

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self._random_state.clone()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self._random_state.copy_(state)

    def manual_seed(self, seed: int) -> None: ...

    manual_seed_all = manual_seed


DEVICE = Device()


def register() -> None:
    """Makes the device known to torch in this process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, DEVICE)
