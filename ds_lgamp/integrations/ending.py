"""How the process of a rank ends: at once where it fails, and without an abort where it is done."""

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from ds_lgamp.config import ConfigError

_FAILED, _REFUSED = 1, 2
_GLOO_THREAD = "pt_gloo_runloop"
"""What torch names the threads that run gloo's collectives."""
_THREADS = Path("/proc/self/task")
_QUIET_LOOKS = 3
"""So often in a row must all of gloo's threads sleep; a thread of the user's may hold the interpreter at one look."""
_PATIENCE = 10.0
"""Seconds that the end waits for collectives which nobody awaited."""


def end_well(undo: ExitStack, finish: Callable[[], None]) -> None:
    """From now on, a rank that fails leaves at once, so that the launcher ends the job; and one that is done calls
    ``finish``, which waits for its collectives, and most likely ends without an abort. ``undo`` takes both back."""

    def end() -> None:
        finish()
        await_gloo_threads()

    _leave_at_unhandled_errors(undo)
    atexit.register(end)
    undo.callback(atexit.unregister, end)


def leave() -> NoReturn:
    """Ends the process of a script that is done: everything that an exit does for Python code, but the interpreter is
    not taken down. A thread of gloo's that wants it meanwhile would abort the process."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _leave("", 0)


@contextmanager
def failures_end_the_process(stock_refusal: str | None = None, hint: str = "") -> Iterator[None]:
    """A ConfigError ends it with its sentence, any other error with its traceback and ``hint``.

    At once, without the interpreter's orderly exit, which could wait for ranks that wait for this one: so the launcher
    notices and ends the job.

    Args:
        stock_refusal: words of an error of the host that is a sentence for the user already.
    """
    try:
        yield
    except ConfigError as error:
        _leave(_sentence(error), _REFUSED)
    except Exception as error:
        if stock_refusal is not None and stock_refusal in str(error):
            _leave(f"{hint}ds_lgamp: {error}; change one of them\n", _REFUSED)
        message = traceback.format_exc() + hint
        _finish_checkpoints()
        _leave(message, _FAILED)


def await_gloo_threads() -> None:
    """Until none of gloo's threads has anything left to do.

    A thread reports that a collective is done before it lets go of the tensors, for which it needs the interpreter. An
    interpreter that shuts down meanwhile ends the thread where it stands, which aborts the process, or leaves it with a
    lock that the shutdown waits for.
    """
    quiet, deadline = 0, time.monotonic() + _PATIENCE
    while quiet < _QUIET_LOOKS and time.monotonic() < deadline:
        # Sleeping lends the interpreter to every thread that waits for it; one that still wants it is running now.
        time.sleep(0.001)
        quiet = 0 if any(_runs(thread) for thread in _gloo_threads()) else quiet + 1


def _gloo_threads() -> list[Path]:
    """The folders that describe them; none where the system has no such folders."""
    return [thread for thread in _THREADS.glob("*") if _read(thread / "comm").strip() == _GLOO_THREAD]


def _runs(thread: Path) -> bool:
    state = _read(thread / "stat").rpartition(") ")[2][:1]
    return state not in ("", "S")


def _read(file: Path) -> str:
    """Empty if the thread has ended."""
    try:
        return file.read_text()
    except OSError:
        return ""


def _leave_at_unhandled_errors(undo: ExitStack) -> None:
    """As :func:`failures_end_the_process` does around a whole script, for a script that runs on its own."""
    previous = sys.excepthook
    installed = True

    def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not (installed and issubclass(kind, Exception) and _script_is_over() and _has_peers()):
            previous(kind, error, trace)
            return
        if isinstance(error, ConfigError):
            _leave(_sentence(error), _REFUSED)
        # In one piece: other ranks may print at the same time.
        with redirect_stderr(StringIO()) as printed:
            previous(kind, error, trace)
        _finish_checkpoints()
        _leave(printed.getvalue(), _FAILED)

    def take_back() -> None:
        nonlocal installed
        installed = False
        # Otherwise a later hook calls this one, which only passes on.
        if sys.excepthook is leave:
            sys.excepthook = previous

    sys.excepthook = leave
    undo.callback(take_back)


def _script_is_over() -> bool:
    """Whether the interpreter calls, which has nothing left to run but its exit; not the user's code, nor a prompt."""
    if threading.current_thread() is not threading.main_thread() or sys.flags.interactive or hasattr(sys, "ps1"):
        return False
    frame: FrameType = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name != "<module>"


def _has_peers() -> bool:
    """Whether other ranks may wait for this one."""
    import torch.distributed as dist

    return dist.is_initialized() and dist.get_world_size() > 1


def _finish_checkpoints() -> None:
    """Those that threads write; leaving would end the threads."""
    from ds_lgamp.checkpoint.errors import CheckpointError
    from ds_lgamp.checkpoint.saver import wait_for_all

    with suppress(CheckpointError):
        wait_for_all()


def _sentence(error: ConfigError) -> str:
    return f"ds_lgamp: {error}\n"


def _leave(message: str, status: int) -> NoReturn:
    sys.stdout.flush()
    # torch's hook, which may have called this module's, collects in memory what others print: leaving would lose it.
    stream = sys.__stderr__ if isinstance(sys.stderr, StringIO) else sys.stderr
    if stream is not None:
        stream.write(message)
        stream.flush()
    os._exit(status)
