"""The one helper of the tables of recorded runs: rows of a record become lines, columns and cells."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.record import Failure, Row
from testing.markdown import table

Entry = Row | Failure
Label = tuple[str, Callable[[Entry], str]]
"""The heading and the text of a column that names the line."""


def pivot(
    entries: Iterable[Entry],
    labels: Sequence[Label],
    column: Callable[[Entry], str],
    cell: Callable[[list], str],
    headings: Mapping[str, str] | None = None,
    numbers_from: int | None = None,
) -> str:
    """A Markdown table of ``entries``.

    Entries with the same ``labels`` share a line. Those that also have the same ``column`` share a cell, whose text
    ``cell`` makes from the list of them. Lines and columns come in the order of the entries. ``headings`` chooses the
    columns instead, orders and renames them; a line without any of them is left out. Columns from ``numbers_from`` on
    are aligned right; by default those behind the labels.
    """
    lines: dict[tuple[str, ...], dict[str, list[Entry]]] = {}
    found: dict[str, str] = {}
    for entry in entries:
        name = column(entry)
        if headings is None or name in headings:
            found.setdefault(name, name)
            line = tuple(label(entry) for _, label in labels)
            lines.setdefault(line, {}).setdefault(name, []).append(entry)
    columns = found if headings is None else headings
    cells = [[*line, *(cell(here[name]) if name in here else "" for name in columns)] for line, here in lines.items()]
    header = [*(heading for heading, _ in labels), *columns.values()]
    return table(header, cells, len(labels) if numbers_from is None else numbers_from)


def contender(entry: Entry) -> str:
    """A column: the contender."""
    return entry.contender


def metric(row: Row) -> str:
    """A column: the metric."""
    return row.metric


def setting(key: str) -> Callable[[Entry], str]:
    """A label or column: the value of ``key`` in the configuration."""
    return lambda entry: f"{entry.config[key]}"


def layout(entry: Entry) -> str:
    """Pipeline ranks x data-parallel ranks."""
    return "{pipeline_ranks} x {data_ranks}".format(**entry.config)


CONTENDER: Label = ("", contender)
LAYOUT: Label = ("P x W", layout)


def micro_batches(entry: Entry) -> str:
    """The column of a number of micro-batches."""
    return f"M = {entry.config['micro_batches']}"


def median(form: str, factor: float = 1) -> Callable[[list[Row]], str]:
    """A cell: the median times ``factor``."""
    return lambda rows: format(rows[0].median * factor, form)


def with_spread(form: str) -> Callable[[list[Row]], str]:
    """A cell: the median ± half the spread."""
    return lambda rows: f"{rows[0].median:{form}} ± {rows[0].spread / 2:{form}}"


def by_metric(cells: Mapping[str, Callable[[list[Row]], str]]) -> Callable[[list[Row]], str]:
    """A cell whose form depends on the metric of its first row."""
    return lambda rows: cells[rows[0].metric](rows)
