"""Draws a simulated program as a Gantt chart of characters."""

import string
from collections.abc import Iterable, Mapping

from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.orders import chunks_of
from ds_lgamp.schedule.simulate import Span, Timeline
from ds_lgamp.schedule.spec import ProgramSpec

_DIGITS = string.digits
_LETTERS = string.ascii_uppercase[:10]
_SYMBOLS = {Kind.FORWARD: _DIGITS, Kind.BACKWARD: _LETTERS, Kind.GATHER: _DIGITS, Kind.REDUCE: _LETTERS}
_WAITING = "~"
_LEGEND = "digit: forward of the rank's n-th chunk, letter: its backward (A for 0, B for 1, ...), dot: idle"
_LEGEND_OF_COLLECTIVES = "below: digit: gather of the chunk, letter: its reduction; ~: compute waits for one of them"


def text_gantt(spec: ProgramSpec, timeline: Timeline, width: int = 120) -> str:
    """One line per pipeline rank, time from left to right, at most ``width`` columns of it.

    A digit is a forward and numbers its chunk on the rank, modulo 10. A letter is a backward: A for 0, B for 1, and so
    on. A dot is idle time. If collectives take time, a second line per rank shows gathers as digits and reductions as
    letters; a tilde is compute that waits for one of them.
    """
    spans = [span for rank in (*timeline.spans, *timeline.collectives) for span in rank]
    shortest = min((span.end - span.start for span in spans if span.end > span.start), default=0.0)
    unit = max(shortest, timeline.step_time / width) or 1.0
    columns = max(1, round(timeline.step_time / unit))
    timed = any(span.end > span.start for rank in timeline.collectives for span in rank)
    lines = []
    for rank, computes in enumerate(timeline.spans):
        local = {chunk: index for index, chunk in enumerate(chunks_of(spec.placement, rank))}
        row = _row(computes, local, unit, columns)
        for wait in timeline.waits[rank]:
            start, end = round(wait.start / unit), round(wait.end / unit)
            row[start:end] = _WAITING * (end - start)
        lines.append(f"rank {rank:<3d} |{''.join(row)}|")
        if timed:
            lines.append(f"{'network':8} |{''.join(_row(timeline.collectives[rank], local, unit, columns))}|")
    return "\n".join([*lines, _LEGEND, *([_LEGEND_OF_COLLECTIVES] if timed else [])])


def _row(spans: Iterable[Span], local: Mapping[int, int], unit: float, columns: int) -> list[str]:
    """Returns ``columns`` symbols, each of ``unit`` time; ``local`` numbers the chunks of the rank."""
    row = ["."] * columns
    for span in spans:
        start, end = round(span.start / unit), round(span.end / unit)
        row[start:end] = _SYMBOLS[span.action.kind][local[span.action.chunk] % 10] * (end - start)
    return row
