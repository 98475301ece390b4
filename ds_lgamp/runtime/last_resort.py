"""The last means of a process that no longer runs: its last message, its guard, the device library's record."""

import faulthandler
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ds_lgamp.runtime import exit_handlers, guard

_LATER = 10.0
"""Seconds beyond the limit, in which others name this rank. Its sudden end would be the news otherwise. The guard hears
of this process after half of them."""
_RECORDER = 5.0
"""Seconds to wait for the record of NCCL."""
_FAILED = 1


class LastResort:
    """Ends the process, with the calls of all its threads, if none of them gets the interpreter's lock for too long.

    A process of its own does that (:mod:`ds_lgamp.runtime.guard`). A timer of this process would also go off when it
    wakes up after somebody has suspended it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._guard: subprocess.Popen[bytes] | None = None
        self._armed: tuple[float, float] | None = None
        """When the guard heard of this process, and of which limit."""

    def begin(self) -> None:
        """Starts the guard."""
        faulthandler.register(guard.SHOW, file=2, all_threads=True)
        words = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), self._name]
        # Where no process can start, there is no guard.
        with suppress(OSError):
            self._guard = subprocess.Popen(words, stdin=subprocess.PIPE)
            os.set_blocking(self._input, False)

    def arm(self, limit: float, now: float) -> None:
        """Ends the process shortly after ``limit``, in seconds from ``now``, unless this is called again before. An
        infinite limit ends nothing."""
        heard = self._armed is not None and now < self._armed[0] + _LATER / 2 and limit == self._armed[1]
        if self._guard is not None and not heard:
            self._armed = now, limit
            # The guard may be gone.
            with suppress(OSError):
                os.write(self._input, f"{limit + _LATER}\n".encode())

    def disarm(self) -> None:
        """Ends nothing any more."""
        if self._guard is not None:
            self.arm(math.inf, -math.inf)
            self.let_go()
            # It ends at once, unless it is stopped.
            with suppress(subprocess.TimeoutExpired):
                self._guard.wait(1.0)
            self._guard = None

    def let_go(self) -> None:
        """Closes the connection to the guard. A forked process must not keep it open."""
        if self._guard is not None and self._guard.stdin is not None:
            with suppress(OSError):
                self._guard.stdin.close()

    @property
    def _input(self) -> int:
        assert self._guard is not None and self._guard.stdin is not None, "the guard runs"
        return self._guard.stdin.fileno()


def dump_flight_recorder(rank: int) -> Path | None:
    """Writes what NCCL's flight recorder has of this rank, to ``TORCH_NCCL_DEBUG_INFO_TEMP_FILE`` and the rank.

    Returns the file; None if this torch has no recorder. Never ran on a GPU.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump is None or not dist.is_initialized() or dist.get_backend() != "nccl":
        return None
    default = Path(tempfile.gettempdir()) / "nccl_trace_rank_"
    file = Path(f"{os.environ.get('TORCH_NCCL_DEBUG_INFO_TEMP_FILE', default)}{rank}")
    file.write_bytes(dump())
    return file


def end(sentence: str, rank: int) -> NoReturn:
    """Ends the process, even where the main thread holds the lock of a stream, or nobody reads one any more. Runs what
    the script has registered for its exit, because it may keep the last lines of a log."""
    say(sentence)
    lasts = ((sys.stdout.flush, 1.0), (partial(dump_flight_recorder, rank), _RECORDER))
    for last, seconds in (*lasts, (partial(exit_handlers.run, _FAILED), exit_handlers.SECONDS)):
        _try(last, seconds)
    os._exit(_FAILED)


def say(text: str) -> None:
    """Writes to standard error, but does not wait for a reader."""
    _try(partial(_write, text.encode()), 1.0)


def _write(text: bytes) -> None:
    while text:
        # The system may write a part of it only.
        text = text[os.write(2, text) :]


def _try(act: Callable[[], Any], seconds: float) -> None:
    """Acts, but does not wait for longer than ``seconds``."""

    def attempt() -> None:
        with suppress(Exception):
            act()

    actor = threading.Thread(target=attempt, daemon=True)
    try:
        actor.start()
    except RuntimeError:
        # From Python 3.12 on, none starts once the interpreter shuts down.
        attempt()
    else:
        actor.join(seconds)
