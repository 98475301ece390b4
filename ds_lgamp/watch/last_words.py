"""How a process that fails ends: with which error, with which last words, and what still runs before."""

import atexit
import gc
import io
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

SECONDS = 10.0
"""How long the exit handlers of a process that fails may take. One that waits for other ranks never returns."""
_RECORDER = 5.0
"""Seconds to wait for the record of NCCL."""
_FAILED = 1


class Exit:
    """The exit of this process."""

    def __init__(self) -> None:
        self.failing = False
        """Whether this process is about to end because of a failure, and does not wait for other ranks any more."""
        self.handlers_run = False
        """Whether its exit handlers run, or have run."""

    def run_handlers(self, status: int) -> None:
        """Runs the exit handlers of this process, which fails, such as the last upload of a logger; and writes what its
        files hold. Ends the process with ``status`` if that takes too long. Inside an exit handler, it runs none: some
        would run twice."""
        self.failing = True
        watchdog = threading.Thread(target=_end_later, args=(status,), daemon=True)
        with suppress(RuntimeError):
            # From Python 3.12 on, no thread starts once the interpreter shuts down. Nobody would bound the handlers
            # then.
            watchdog.start()
            flush_files()
            if not self.handlers_run:
                self.handlers_run = True
                atexit._run_exitfuncs()
            flush_files()

    def end(self, sentence: str, rank: int) -> NoReturn:
        """Ends the process, even where the main thread holds the lock of a stream, or nobody reads one any more. Runs
        what the script has registered for its exit, because it may keep the last lines of a log."""
        say(sentence)
        lasts = ((sys.stdout.flush, 1.0), (partial(dump_flight_recorder, rank), _RECORDER))
        for last, seconds in (*lasts, (partial(self.run_handlers, _FAILED), SECONDS)):
            _try(last, seconds)
        os._exit(_FAILED)


def flush_files() -> None:
    """Writes what open files hold in memory, as the interpreter does when it shuts down."""
    for each in gc.get_objects():
        # The class of a proxy may be anything, and asking for it may run code.
        if issubclass(type(each), io.IOBase):
            with suppress(Exception):
                each.flush()


def in_flight() -> BaseException | None:
    """Returns the error because of which the calling code runs: that of its ``except``, its ``finally``, or the
    ``__exit__`` of its context. None without one, or where the script ends with status 0."""
    return _reason(sys.exc_info()[1])


def in_flight_of(thread: int) -> BaseException | None:
    """The same for another thread."""
    current = sys._current_exceptions().get(thread)
    # Until Python 3.12, there are the type and the traceback beside it.
    return _reason(current[1] if isinstance(current, tuple) else current)


def unhandled() -> BaseException | None:
    """Returns the error with which the script has ended, once the interpreter has shown it. Unknown after
    ``sys.exit``."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def cause(error: BaseException) -> str:
    """Returns one line that names ``error``, or the one in whose handling the script called ``sys.exit``."""
    if isinstance(error, SystemExit) and error.__context__ is not None:
        return cause(error.__context__)
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _reason(error: BaseException | None) -> BaseException | None:
    while isinstance(error, GeneratorExit):
        # Somebody closes a generator, perhaps because of an error.
        error = error.__context__
    is_end = isinstance(error, StopIteration) or (isinstance(error, SystemExit) and not error.code)
    return None if is_end else error


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


def _end_later(status: int) -> None:
    time.sleep(SECONDS)
    os._exit(status)
