"""Whether processes still run, and waiting until they do not."""

import time
from collections.abc import Callable
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether a process has not ended. One that has may wait for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] not in "ZX"
    except OSError:
        return False


def wait(over: Callable[[], bool], seconds: float) -> None:
    """Waits until ``over()``, but no longer than so many seconds."""
    deadline = time.monotonic() + seconds
    while not over() and time.monotonic() < deadline:
        time.sleep(0.05)
