"""Runs what a script registers for its exit, such as the last upload of a logger, though the process fails."""

import atexit
import gc
import io
import os
import threading
import time
from contextlib import suppress

SECONDS = 10.0
"""How long the handlers of a process that fails may take. One that waits for other ranks never returns."""
_failing = _running = False


def failing() -> bool:
    """Whether this process is about to end because of a failure, and does not wait for other ranks any more."""
    return _failing


def run(status: int) -> None:
    """Runs the exit handlers of a process that fails, and writes what its files hold. Ends the process with ``status``
    if that takes too long. Inside an exit handler, it runs none: those called before would run twice."""
    begin()
    watchdog = threading.Thread(target=_end_later, args=(status,), daemon=True)
    with suppress(RuntimeError):
        # From Python 3.12 on, no thread starts once the interpreter shuts down. Nobody would bound the handlers then.
        watchdog.start()
        flush_files()
        if not _running:
            enter()
            atexit._run_exitfuncs()
        flush_files()


def begin() -> None:
    """From now on this process fails: what ds_lgamp does at its end does not wait for other ranks."""
    global _failing
    _failing = True


def enter() -> None:
    """From now on the exit handlers run."""
    global _running
    _running = True


def flush_files() -> None:
    """Writes what open files hold in memory, as the interpreter does when it shuts down."""
    for each in gc.get_objects():
        # The class of a proxy may be anything, and asking for it may run code.
        if issubclass(type(each), io.IOBase):
            with suppress(Exception):
                each.flush()


def _end_later(status: int) -> None:
    time.sleep(SECONDS)
    os._exit(status)
