"""Which error a script is about to end with, wherever it stands: in ``finally``, in ``except``, in an exit handler."""

import sys


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
