"""Draws a simulated program as a Gantt chart of characters."""

import string
from collections.abc import Collection, Iterable, Mapping, Sequence

from ds_lgamp.schedule.actions import BETWEEN_NODES, COLLECTIVES, Kind
from ds_lgamp.schedule.orders import chunks_of
from ds_lgamp.schedule.simulate import Span, Timeline
from ds_lgamp.schedule.spec import ProgramSpec

_DIGITS = string.digits
_LETTERS = string.ascii_uppercase[:10]
_SYMBOLS = {
    **dict.fromkeys((Kind.FORWARD, Kind.GATHER, Kind.REFRESH, Kind.LOAD), _DIGITS),
    **dict.fromkeys((Kind.BACKWARD, Kind.REDUCE, Kind.COMBINE, Kind.STORE, Kind.UPDATE), _LETTERS),
}
_OF_OFFLOADING = {"loads": Kind.LOAD, "stores": Kind.STORE, "updates": Kind.UPDATE}
_WAITING, _UPDATING = "~", "u"
_LEGEND = "digit: forward of the rank's n-th chunk, letter: its backward (A for 0, B for 1, ...), dot: idle"
_LEGEND_OF_UPDATES = "u: update of one chunk or of all"
_LEGEND_OF_COLLECTIVES = "below: digit: gather of the chunk, letter: its reduction; ~: compute waits for one of them"
_LEGEND_OF_OFFLOADING = (
    "loads: weights of the chunk from the host, stores: its gradient to the host, updates: those of the host; ~: "
    "compute waits"
)


def text_gantt(spec: ProgramSpec, timeline: Timeline, width: int = 120) -> str:
    """One line per pipeline rank, time from left to right, at most ``width`` columns of it.

    A digit is a forward and numbers its chunk on the rank, modulo 10. A letter is a backward: A for 0, B for 1, and so
    on. A u is the optimizer's update. A dot is idle time. If collectives take time, a second line per rank shows
    gathers as digits and reductions as letters; a tilde is compute that waits for one of them. With hierarchical shards
    these are inside nodes, and a third line shows those between nodes. With offloading, a line each shows loads as
    digits, and stores and the host's updates as letters, unless they take no time.
    """
    spans = [span for rank in (*timeline.spans, *timeline.collectives) for span in rank]
    shortest = min((span.end - span.start for span in spans if span.end > span.start), default=0.0)
    unit = max(shortest, timeline.step_time / width) or 1.0
    columns = max(1, round(timeline.step_time / unit))
    timed = {span.action.kind for rank in timeline.collectives for span in rank if span.end > span.start}
    lines = []
    for rank, computes in enumerate(timeline.spans):
        local = {chunk: index for index, chunk in enumerate(chunks_of(spec.placement, rank))}
        row = _row(computes, local, unit, columns)
        for wait in timeline.waits[rank]:
            start, end = round(wait.start / unit), round(wait.end / unit)
            row[start:end] = _WAITING * (end - start)
        for update in timeline.updates[rank]:
            start, end = round(update.start / unit), round(update.end / unit)
            row[start:end] = _UPDATING * (end - start)
        lines.append(f"rank {rank:<3d} |{''.join(row)}|")
        for name, beside in _beside(timeline.collectives[rank], timed).items():
            lines.append(f"{name:8} |{''.join(_row(beside, local, unit, columns))}|")
    legends = [_LEGEND, *([_LEGEND_OF_UPDATES] if any(timeline.updates) else [])]
    legends += [_LEGEND_OF_COLLECTIVES] if timed & COLLECTIVES else []
    legends += [_LEGEND_OF_OFFLOADING] if timed - COLLECTIVES else []
    return "\n".join([*lines, *legends])


def _beside(spans: Sequence[Span], timed: Collection[Kind]) -> dict[str, list[Span]]:
    """Returns what a rank has beside its compute, by the name of its line.

    Args:
        timed: kinds that take time on some rank.
    """
    lanes: dict[str, list[Span]] = {}
    if any(kind in COLLECTIVES for kind in timed):
        between = [span for span in spans if span.action.kind in BETWEEN_NODES]
        inside = [span for span in spans if span.action.kind in COLLECTIVES - BETWEEN_NODES]
        lanes = {"network": inside} if not between else {"inside": inside, "between": between}
    for name, kind in _OF_OFFLOADING.items():
        if kind in timed:
            lanes[name] = [span for span in spans if span.action.kind is kind]
    return lanes


def _row(spans: Iterable[Span], local: Mapping[int, int], unit: float, columns: int) -> list[str]:
    """Returns ``columns`` symbols, each of ``unit`` time; ``local`` numbers the chunks of the rank."""
    row = ["."] * columns
    for span in spans:
        start, end = round(span.start / unit), round(span.end / unit)
        row[start:end] = _SYMBOLS[span.action.kind][local[span.action.chunk] % 10] * (end - start)
    return row
