"""The tables of ``ds_lgamp plan``: their figures are whole at any width."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Literal, TextIO

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

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
