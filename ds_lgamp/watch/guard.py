"""A guard: a process that ends its parent if none of the parent's threads gets the interpreter's lock in time.

:class:`Guard` starts this file as a program, so the file imports nothing that takes long. The program counts the
seconds in which it runs itself and its parent is not stopped. So whoever suspends a job, or looks at it in a debugger,
finds it alive afterwards. A timer of the parent would go off when the parent wakes up.
"""

import faulthandler
import math
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

TICK = 1.0
SHOW = signal.SIGRTMAX
"""The signal at which the other process shows the calls of its threads."""
_SHOWING = 1.0
"""Seconds that it has for that."""
_STOPPED = ("T", "t")
"""States of a process that a signal or a debugger has stopped."""
_LATER = 10.0
"""Seconds beyond the limit, in which other ranks name this one. Otherwise its sudden end would be the news. The guard
hears of this process after half of them."""


def watch(process: int, name: str) -> None:
    """Reads from standard input, line by line, how many seconds ``process`` may be silent from now on. Returns once the
    input ends or ``process`` is no longer the parent of this one."""
    limit, silent = math.inf, 0.0
    while os.getppid() == process:
        if select.select([0], [], [], TICK)[0]:
            lines = os.read(0, 65536).split()
            if not lines:
                return
            limit, silent = float(lines[-1]), 0.0
        elif _state(process) not in _STOPPED:
            silent += TICK
        if silent >= limit:
            _end(process, f"ds_lgamp: {name} keeps Python's interpreter lock: no other thread ran for {silent:.0f} s")
            return


def _state(process: int) -> str:
    """The state of a process; "" if it has ended."""
    with suppress(OSError), open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(") ")[2][:1]
    return ""


def _end(process: int, sentence: str) -> None:
    with suppress(OSError):
        os.write(2, f"{sentence}; it ends\n".encode())
    with suppress(ProcessLookupError):
        os.kill(process, SHOW)
        time.sleep(_SHOWING)
        os.kill(process, signal.SIGKILL)


class Guard:
    """The guard of this process. It ends the process, with the calls of all its threads, if none of them gets the
    interpreter's lock for too long."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._armed: tuple[float, float] | None = None
        """When the guard heard of this process, and of which limit."""

    def begin(self) -> None:
        """Starts the guard."""
        faulthandler.register(SHOW, file=2, all_threads=True)
        words = [sys.executable, "-I", "-S", __file__, str(os.getpid()), self._name]
        # Where no process can start, there is no guard.
        with suppress(OSError):
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE)
            os.set_blocking(self._input, False)

    def arm(self, limit: float, now: float) -> None:
        """Ends the process shortly after ``limit``, in seconds from ``now``, unless this is called again before. An
        infinite limit ends nothing."""
        heard = self._armed is not None and now < self._armed[0] + _LATER / 2 and limit == self._armed[1]
        if self._process is not None and not heard:
            self._armed = now, limit
            # The guard may be gone.
            with suppress(OSError):
                os.write(self._input, f"{limit + _LATER}\n".encode())

    def disarm(self) -> None:
        """Ends nothing any more."""
        if self._process is not None:
            self.arm(math.inf, -math.inf)
            self.let_go()
            # It ends at once, unless it is stopped.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._process = None

    def let_go(self) -> None:
        """Closes the connection to the guard. A forked process must not keep it open."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    @property
    def _input(self) -> int:
        assert self._process is not None and self._process.stdin is not None, "the guard runs"
        return self._process.stdin.fileno()


if __name__ == "__main__":
    # Whoever interrupts a job at a terminal interrupts all of its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch(int(sys.argv[1]), sys.argv[2])
