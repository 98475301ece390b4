"""Runs a user's script, unedited, and ends its process: at once if this rank or another one fails, and without an abort
if it is done."""

import atexit
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.watch.last_words import cause, flush_files, in_flight, unhandled
from ds_lgamp.watch.this_rank import this_rank

_FAILED, _REFUSED = 1, 2
_GLOO_THREAD = "pt_gloo_runloop"
"""The name that torch gives the threads that run gloo's collectives."""
_THREADS = Path("/proc/self/task")
_QUIET_LOOKS = 3
"""How often in a row all of gloo's threads must be found asleep. At a single look, a user's thread may hold the
interpreter, for which a gloo thread then waits."""
_PATIENCE = 10.0
"""Seconds to wait at the end for collectives that nobody awaited."""


def find_modules_beside(script: str) -> None:
    """Lets imports look beside ``script`` first, as when Python runs it. Raises ConfigError if there is no such
    file."""
    if not Path(script).is_file():
        raise ConfigError(f"'{script}' is no file; name the script to run")
    sys.path[0] = str(Path(script).resolve().parent)


def run_as_main(script: str, arguments: Sequence[str]) -> None:
    """Runs ``script`` as Python would. Raises SystemExit only if the script exits with a failing status."""
    sys.argv = [script, *arguments]
    find_modules_beside(script)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code:
            raise


def say_without_effect(keys: Iterable[str]) -> None:
    """Says that the options of the command line for these keys of the block have no effect, because none is enabled."""
    given = " and ".join(f"--{key.replace('_', '-')}" for key in keys)
    print(f"ds_lgamp: {given} without effect: no {BLOCK} block is enabled", file=sys.stderr)


def end_well(undo: ExitStack) -> None:
    """From now on, a rank that fails leaves at once, so that the launcher ends the job. A rank that is done finishes
    what its engines have begun, which may fail too, and waits for its collectives, so that it most likely ends without
    an abort. Both endings are restored when ``undo`` is closed."""

    def end() -> None:
        this_rank.exit.handlers_run = True
        if leaves_because_of_an_error():
            return
        # Python would go on to end with the status of the script, which knows nothing of a last save that failed.
        with failures_end_the_process():
            finish_engines()
        await_gloo_threads()

    _leave_at_unhandled_errors(undo)
    atexit.register(end)
    undo.callback(atexit.unregister, end)


def finish_engines() -> None:
    """Waits for the gathers and saves that engines have under way, and ends their live states. Collective over all
    ranks; raises CheckpointError on every rank if a save failed."""
    # torch's checkpoints take long to import.
    from ds_lgamp.checkpoint.saver import wait_for_all

    for agree in list(this_rank.agreements):
        # Once, also where ranks disagree.
        del this_rank.agreements[agree]
        agree()
    for engine in this_rank.engines:
        engine.finish_gathers()
    try:
        wait_for_all()
    finally:
        # If a save has failed, live states are all that the next run can resume from.
        for live in list(this_rank.live_checkpoints):
            live.end()


def leave() -> NoReturn:
    """Ends the process of a script that is done. Does everything that an exit does for Python code, but does not shut
    the interpreter down: a gloo thread that needs the interpreter during the shutdown would abort the process."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    flush_files()
    os._exit(0)


@contextmanager
def failures_end_the_process(stock_refusal: str | None = None, hint: str = "") -> Iterator[None]:
    """A ConfigError ends the process with its sentence, any other error with its traceback and ``hint``.

    The process ends at once. The interpreter's orderly exit could wait for ranks that wait for this one, and the
    launcher would not end the job.

    Args:
        stock_refusal: words of an error of the host that is already a sentence for the user; it is printed without a
            traceback.
        hint: a line that follows the traceback.
    """
    try:
        yield
    except SystemExit as error:
        if error.code:
            # Its process ends in order, with this status, but does not wait for ranks that wait for it.
            this_rank.fail(cause(error))
            this_rank.exit.failing = True
        raise
    except ConfigError as error:
        _refuse(error)
    except Exception as error:
        if stock_refusal is not None and stock_refusal in str(error):
            _refuse(error, hint, "; change one of them")
        _fail(traceback.format_exc() + hint, error)


def leaves_because_of_an_error() -> bool:
    """Whether the script is about to end because of an error, and cannot wait for ranks that may wait for it. They
    then know of the error. A checkpoint that is being written is complete."""
    last = unhandled()
    error = last or in_flight()
    if last is not None:
        this_rank.fail(cause(last))
    elif error is not None and not this_rank.exit.failing:
        _announce("".join(traceback.format_exception(error)), error)
    return error is not None or this_rank.exit.failing


def await_gloo_threads() -> None:
    """Waits until none of gloo's threads has anything left to do, or for 10 seconds.

    A thread reports that a collective is done before it frees the tensors, and it needs the interpreter to free them.
    An interpreter that shuts down in between ends the thread at once. That aborts the process, or leaves the
    thread with a lock for which the shutdown waits.
    """
    quiet, deadline = 0, time.monotonic() + _PATIENCE
    while quiet < _QUIET_LOOKS and time.monotonic() < deadline:
        # Sleeping gives the interpreter to the threads that wait for it. A thread that still needs it is running now.
        time.sleep(0.001)
        quiet = 0 if any(_runs(thread) for thread in _gloo_threads()) else quiet + 1


def _gloo_threads() -> list[Path]:
    """The folders under /proc that describe gloo's threads; none where the system has no /proc."""
    return [thread for thread in _THREADS.glob("*") if _read(thread / "comm").strip() == _GLOO_THREAD]


def _runs(thread: Path) -> bool:
    state = _read(thread / "stat").rpartition(") ")[2][:1]
    return state not in ("", "S")


def _read(file: Path) -> str:
    """The text of ``file``; "" if the thread has ended."""
    try:
        return file.read_text()
    except OSError:
        return ""


def _leave_at_unhandled_errors(undo: ExitStack) -> None:
    """Does what :func:`failures_end_the_process` does, for a script that runs without ``ds_lgamp run``."""
    previous = sys.excepthook
    installed = True

    def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not (installed and issubclass(kind, Exception) and _script_is_over() and _has_peers()):
            previous(kind, error, trace)
            return
        if isinstance(error, ConfigError):
            _refuse(error)
        # The message is written in one piece, because other ranks may print at the same time.
        with redirect_stderr(StringIO()) as printed:
            previous(kind, error, trace)
        _fail(printed.getvalue(), error)

    def take_back() -> None:
        nonlocal installed
        installed = False
        # If another hook was set later, it still calls this one, which then only calls the previous hook.
        if sys.excepthook is leave:
            sys.excepthook = previous

    sys.excepthook = leave
    undo.callback(take_back)


def _script_is_over() -> bool:
    """Whether the interpreter itself calls, with nothing left to run but its exit. False inside the user's code and at
    a prompt."""
    if threading.current_thread() is not threading.main_thread() or sys.flags.interactive or hasattr(sys, "ps1"):
        return False
    frame: FrameType = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name != "<module>"


def _has_peers() -> bool:
    """Whether other ranks may wait for this one."""
    import torch.distributed as dist

    # A script may destroy its process group in a ``finally``. Other ranks then still wait for news of this one.
    return this_rank.lifeline is not None or (dist.is_initialized() and dist.get_world_size() > 1)


def _fail(message: str, error: BaseException) -> NoReturn:
    """Ends the process because of ``error``, once no thread writes a checkpoint any more."""
    if this_rank.savers:
        _announce(message, error)
        message = ""
    _leave(message, _FAILED, error)


def _announce(message: str, error: BaseException) -> None:
    """Tells the other ranks of ``error``, so that they blame no other rank. If a checkpoint is being written, this rank
    shows ``message`` and completes it. Other ranks write their part of it without a pause."""
    writes = bool(this_rank.savers)
    meanwhile = " and completes a checkpoint" if writes else ""
    this_rank.announce(cause(error), meanwhile, isinstance(error, SystemExit))
    if writes:
        from ds_lgamp.checkpoint.files import CheckpointError
        from ds_lgamp.checkpoint.saver import wait_for_all

        _print(message)
        with suppress(CheckpointError):
            wait_for_all()


def _is_of_a_checkpoint(error: BaseException) -> bool:
    """Whether all ranks raise this error together. It names the rank that could not save or load, and would be
    mistaken for the failure of whichever rank ends first."""
    from ds_lgamp.checkpoint.files import CheckpointError

    return isinstance(error, CheckpointError)


def _refuse(error: Exception, hint: str = "", fix: str = "") -> NoReturn:
    """Ends the process with the sentence of a refusal."""
    _leave(f"{hint}ds_lgamp: {error}{fix}\n", _REFUSED, error)


def _leave(message: str, status: int, error: BaseException) -> NoReturn:
    """Ends the process with ``message``. The reason comes first if it is another rank's. The other ranks learn the
    ``error`` that ends it."""
    sys.stdout.flush()
    this_rank.exit.failing = True
    # A refusal is a sentence already, and other ranks refuse the same.
    shared = status == _REFUSED or _is_of_a_checkpoint(error)
    _print(message if shared else this_rank.news() + message)
    left = this_rank.fail(cause(error), shared)
    if not shared:
        _print(left)
    this_rank.exit.run_handlers(status)
    os._exit(status)


def _print(text: str) -> None:
    # torch's hook, which may have called the hook of this module, collects in memory what is printed. Leaving would
    # lose that.
    stream = sys.__stderr__ if isinstance(sys.stderr, StringIO) else sys.stderr
    if stream is not None:
        stream.write(text)
        stream.flush()
