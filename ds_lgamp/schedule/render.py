"""Draws a simulated program as a text Gantt chart."""

import string

from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.orders import chunks_of
from ds_lgamp.schedule.program import ProgramSpec
from ds_lgamp.schedule.simulate import Timeline

_FORWARD_SYMBOLS = string.digits
_BACKWARD_SYMBOLS = string.ascii_uppercase[:10]


def text_gantt(spec: ProgramSpec, timeline: Timeline, width: int = 120) -> str:
    """One line per pipeline rank, time from left to right, at most ``width`` columns of it.

    A forward shows the number of its chunk on the rank (0, 1, ...), a backward the same as a letter (A, B, ...), modulo
    10; a dot is idle time.
    """
    shortest = min((span.end - span.start for spans in timeline.spans for span in spans), default=0.0)
    unit = max(shortest, timeline.step_time / width) or 1.0
    columns = max(1, round(timeline.step_time / unit))
    lines = []
    for rank, spans in enumerate(timeline.spans):
        row = ["."] * columns
        local = {chunk: index for index, chunk in enumerate(chunks_of(spec.placement, rank))}
        for span in spans:
            symbols = _FORWARD_SYMBOLS if span.action.kind is Kind.FORWARD else _BACKWARD_SYMBOLS
            start, end = round(span.start / unit), round(span.end / unit)
            row[start:end] = symbols[local[span.action.chunk] % 10] * (end - start)
        lines.append(f"rank {rank:<3d} |{''.join(row)}|")
    legend = "digit: forward of the rank's n-th chunk, letter: its backward (A for 0, B for 1, ...), dot: idle"
    return "\n".join([*lines, legend])
