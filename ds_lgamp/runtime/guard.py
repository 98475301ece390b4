"""Ends the process that has started this one if none of its threads says in time that it runs.

:mod:`ds_lgamp.runtime.last_resort` starts this file as a program. It imports nothing that takes long. It counts seconds
in which it runs itself and the other process is not stopped. So whoever suspends a job, or looks at it in a debugger,
finds it alive afterwards.
"""

import math
import os
import select
import signal
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


def watch(process: int, name: str) -> None:
    """Reads from standard input, line by line, how many seconds ``process`` may be silent from now on. Returns once the
    input ends or ``process`` is no longer the parent of this one.

    Args:
        name: the rank in words.
    """
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


if __name__ == "__main__":
    # Whoever interrupts a job at a terminal interrupts all of its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch(int(sys.argv[1]), sys.argv[2])
