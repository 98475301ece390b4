"""What commands share at a terminal: kinds of options, their examples, completions for shells, progress, tables."""

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from threading import Timer
from typing import Any, Literal, TextIO

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table


def count(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' must be a whole number from 1")
    return int(text)


def positive(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' must be a number above 0")
    return number


def why_not_writable(path: Path) -> str | None:
    """Returns why a file cannot be written, to follow the name of its option; None if it can be. Leaves no file."""
    try:
        existed = path.exists()
        with open(path, "a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        return f"'{path}', which cannot be written ({error.strerror}); name another file"
    return None


def write_file(parser: argparse.ArgumentParser, option: str, path: Path, content: bytes) -> None:
    """Writes the file that an option names. Ends the command with a sentence if that fails."""
    try:
        path.write_bytes(content)
    except OSError as error:
        parser.error(f"{option} is '{path}', which cannot be written ({error.strerror}); name another file")


@contextmanager
def own_output() -> Iterator[TextIO]:
    """Keeps standard output for the command. Whatever scripts and libraries print in between goes to standard error."""
    sys.stdout.flush()
    descriptor = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(descriptor, "w", closefd=False) as output:
            yield output
    finally:
        sys.stdout.flush()
        os.dup2(descriptor, 1)
        os.close(descriptor)


EXAMPLES = {
    "schedule": (
        "ds_lgamp schedule --pipeline-ranks 4 --chunks-per-rank 4 --micro-batches 8",
        "ds_lgamp schedule --schedule 1f1b --json",
        "ds_lgamp schedule --gather 1 --reduce 2 --html schedule.html",
    ),
    "plan": (
        "ds_lgamp plan --model llama-8b --cluster a100 --gpus 64 --batch-size 512",
        "ds_lgamp plan --model config.json --cluster this.json --batch-size 64 --write plan",
        "ds_lgamp plan --calibrate --cluster this.json",
    ),
    "view": (
        "ds_lgamp view runs/trace",
        "ds_lgamp view runs/trace --against simulated --html step.html",
        "ds_lgamp view runs/before --against runs/after --html both.html",
        "ds_lgamp view runs/trace --perfetto trace.pftrace",
    ),
    "run": (
        "torchrun --nproc_per_node 8 -m ds_lgamp run train.py --deepspeed_config ds_config.json",
        "ds_lgamp run --explain --ranks 8 train.py --deepspeed_config ds_config.json",
        "torchrun --nproc_per_node 8 -m ds_lgamp run pretrain_gpt.py FLAGS --ds-lgamp-config ds_config.json",
    ),
    "checkpoint info": ("ds_lgamp checkpoint info runs/checkpoints",),
    "checkpoint verify": ("ds_lgamp checkpoint verify runs/checkpoints/global_step100",),
    "checkpoint export": (
        "ds_lgamp checkpoint export runs/checkpoints weights",
        "ds_lgamp checkpoint export runs/checkpoints stock/start --format deepspeed --pipeline-ranks 2 --data-ranks 4",
    ),
    "checkpoint import": ("ds_lgamp checkpoint import model.safetensors runs/checkpoints/start",),
    "checkpoint publish": ("ds_lgamp checkpoint publish /dev/shm/live runs/checkpoints",),
    "cluster detect": ("torchrun --nnodes 4 --nproc_per_node 8 -m ds_lgamp cluster detect cluster.json",),
    "env": ("ds_lgamp env --json",),
}
"""By command; the first of each does what most people want."""


def add_command(commands: Any, name: str, meaning: str, **defaults: Any) -> argparse.ArgumentParser:
    """Adds a command to the subparsers ``commands`` and returns its parser, which shows its examples.

    Args:
        name: of the command and, before it, of the command that has these subparsers.
        meaning: what it does.
        defaults: if it has a function of its own, ``run``, which gets the parser, too.
    """
    command = commands.add_parser(
        name.split()[-1],
        help=meaning,
        epilog="examples:\n" + "".join(f"  {example}\n" for example in EXAMPLES[name]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if defaults:
        command.set_defaults(parser=command, **defaults)
    return command


PATHS = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
"""What completes a path, by shell. Without it, shtab's scripts complete no paths."""
_OF_PATHS = ("FILE", "DIR", "DIR[/TAG]", "DIR/TAG", "SOURCE", "TARGET", "FOLDER", "RECORDING", "SCRIPT", "OTHER")


def complete_paths(parser: argparse.ArgumentParser) -> None:
    """Marks the arguments of ``parser``, and of its commands, whose metavar names a path."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                complete_paths(command)
        elif isinstance(action.metavar, str) and set(action.metavar.split("|")) & set(_OF_PATHS):
            action.complete = PATHS  # type: ignore[attr-defined]


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


_WIDTH = 140
"""Columns if the output is no terminal."""
_UNLIMITED = 10_000


def print_rows(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], output: TextIO) -> Console:
    """Prints a table whose first column holds words, which may take several lines. If the other columns need more room
    than there is, lines run over. Returns what prints sentences below the table."""
    table = Table(box=SIMPLE, title=title, title_justify="left")
    for number, head in enumerate(heads):
        longest = max(len(word) for row in rows for word in ([row[number]] if number else row[number].split()))
        justify: Literal["left", "right"] = "right" if number else "left"
        table.add_column(head, justify=justify, no_wrap=number > 0, min_width=max(longest, len(head)))
    for row in rows:
        table.add_row(*row)
    console = Console(file=output, width=None if output.isatty() else _WIDTH, highlight=False)
    # With a height too, rich takes the width of a dumb terminal as well.
    needed = Console(width=_UNLIMITED, height=console.height).measure(table).minimum
    Console(file=output, width=max(console.width, needed), height=console.height).print(table)
    return console


def plain(number: float, digits: int) -> str:
    """Returns ``number`` with so many digits and without an exponent: ``plain(1.499e5, 4)`` is "149,900"."""
    return format(Decimal(f"{number:.{digits}g}"), ",f")


def refuse_options(
    parser: argparse.ArgumentParser, options: argparse.Namespace, names: Sequence[str], complaint: str
) -> None:
    """Ends the command if one of the options ``names`` is given. {} in the ``complaint`` stands for the option."""
    for name in names:
        if getattr(options, name) is not None:
            parser.error(complaint.replace("{}", f"--{name.replace('_', '-')}", 1))
