"""Shows at a terminal that a command is still at work."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

PATIENCE = 2.0
"""Seconds after which to show it."""


@contextmanager
def at_work(on: str, console: Console | None = None, patience: float = PATIENCE) -> Iterator[None]:
    """If the block takes longer than ``patience`` seconds, shows what it works ``on`` and for how long, until it ends.

    Args:
        console: where to show it; by default standard error. Shows nothing if that is no terminal.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    progress = Progress(*columns, console=console, transient=True)
    progress.add_task(on)
    timer = Timer(patience, progress.start)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        progress.stop()
