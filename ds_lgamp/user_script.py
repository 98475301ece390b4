"""A user's script, run unedited."""

import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ds_lgamp.config import ConfigError

_FAILED, _REFUSED = 1, 2


def find_modules_beside(script: str) -> None:
    """Imports look beside ``script`` first, as when Python runs it."""
    if not Path(script).is_file():
        raise ConfigError(f"'{script}' is no file; name the script to run")
    sys.path[0] = str(Path(script).resolve().parent)


def run_as_main(script: str, arguments: Sequence[str]) -> None:
    """Runs ``script`` as Python would. Its failing exit is passed on."""
    sys.argv = [script, *arguments]
    find_modules_beside(script)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code:
            raise


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
        _leave(f"ds_lgamp: {error}\n", _REFUSED)
    except Exception as error:
        if stock_refusal is not None and stock_refusal in str(error):
            _leave(f"{hint}ds_lgamp: {error}; change one of them\n", _REFUSED)
        message = traceback.format_exc() + hint
        _finish_checkpoints()
        _leave(message, _FAILED)


def _finish_checkpoints() -> None:
    """Those that threads write; leaving would end the threads."""
    from ds_lgamp.checkpoint.errors import CheckpointError
    from ds_lgamp.checkpoint.saver import wait_for_all

    with suppress(CheckpointError):
        wait_for_all()


def _leave(message: str, status: int) -> None:
    sys.stdout.flush()
    sys.stderr.write(message)
    sys.stderr.flush()
    os._exit(status)
