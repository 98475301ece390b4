"""Simulated and recorded steps as text: a Gantt chart of characters, and a table of where the time went.
And aligned columns, for whatever else is text."""

import string
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence

from ds_lgamp.schedule.actions import BETWEEN_NODES, COLLECTIVES, OF_WEIGHTS, Kind
from ds_lgamp.schedule.card import Wait
from ds_lgamp.schedule.orders import chunks_of
from ds_lgamp.schedule.simulate import Span, Timeline
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.view.critical_path import Peers, action_of
from ds_lgamp.view.figures import KINDS, LABELS, Figures, Shown
from ds_lgamp.view.recording import Interval

_DIGITS = string.digits
_LETTERS = string.ascii_uppercase[:10]
_SYMBOLS = {
    **dict.fromkeys((Kind.FORWARD, Kind.GATHER, Kind.REFRESH, Kind.LOAD, Kind.LOAD_WEIGHTS), _DIGITS),
    **dict.fromkeys((Kind.BACKWARD, Kind.REDUCE, Kind.COMBINE, Kind.STORE, Kind.STORE_WEIGHTS, Kind.UPDATE), _LETTERS),
}
_ON_THE_BUS = {
    "loads": {Kind.LOAD, Kind.LOAD_WEIGHTS},
    "stores": {Kind.STORE, Kind.STORE_WEIGHTS},
    "updates": {Kind.UPDATE},
}
_SYMBOLS[Kind.WEIGHTS_BACKWARD] = _LETTERS.lower()
_WIDTH = 120
"""Columns of a chart."""
_LEGEND = "digit: forward of the rank's n-th chunk, letter: its backward (A for 0, B for 1, ...), dot: idle"
_LEGEND_OF_SECOND_PARTS = "small letter: the second part of a backward"
_LEGEND_OF_UPDATES = "u: update of one chunk or of all"
_LEGEND_OF_COLLECTIVES = "below: digit: gather of the chunk, letter: its reduction; ~: compute waits for one of them"
_LEGEND_OF_OFFLOADING = (
    "loads: weights of the chunk from the host, stores: its gradient to the host, updates: those of the host; ~: "
    "compute waits"
)
_LEGEND_OF_WEIGHTS = "loads and stores: weights of the chunk from the host and to it; ~: compute waits"


def text_gantt(spec: ProgramSpec, timeline: Timeline) -> str:
    """Returns a chart with one line per pipeline rank, time from left to right, at most 120 columns of it.

    A digit is a forward and numbers its chunk on the rank, modulo 10. A letter is a backward: A for 0, B for 1, and so
    on; a small letter is the second part of one. A u is the optimizer's update, a dot is idle time, and a tilde is
    compute that waits for something on the lines below. These show, as far as they take time: gathers as digits and
    reductions as letters, inside and between nodes with hierarchical shards; loads from the host as digits, stores and
    the host's updates as letters.
    """
    spans = [span for rank in (*timeline.spans, *timeline.collectives) for span in rank]
    shortest = min((span.end - span.start for span in spans if span.end > span.start), default=0.0)
    unit = max(shortest, timeline.step_time / _WIDTH) or 1.0
    columns = max(1, round(timeline.step_time / unit))
    timed = {span.action.kind for rank in timeline.collectives for span in rank if span.end > span.start}
    lines = []
    for rank, computes in enumerate(timeline.spans):
        local = {chunk: index for index, chunk in enumerate(chunks_of(spec.placement, rank))}
        row = _row(computes, local, unit, columns)
        marks: dict[str, Sequence[Span | Wait]] = {"~": timeline.waits[rank], "u": timeline.updates[rank]}
        for symbol, marked in marks.items():
            for each in marked:
                start, end = round(each.start / unit), round(each.end / unit)
                row[start:end] = symbol * (end - start)
        lines.append(f"rank {rank:<3d} |{''.join(row)}|")
        for name, beside in _beside(timeline.collectives[rank], timed).items():
            lines.append(f"{name:8} |{''.join(_row(beside, local, unit, columns))}|")
    legends = [_LEGEND, *([_LEGEND_OF_SECOND_PARTS] if spec.split_chunks else [])]
    legends += [_LEGEND_OF_UPDATES] if any(timeline.updates) else []
    legends += [_LEGEND_OF_COLLECTIVES] if timed & COLLECTIVES else []
    legends += [_LEGEND_OF_WEIGHTS] if timed & OF_WEIGHTS else []
    legends += [_LEGEND_OF_OFFLOADING] if timed - COLLECTIVES - OF_WEIGHTS else []
    return "\n".join([*lines, *legends])


def _beside(spans: Sequence[Span], timed: Collection[Kind]) -> dict[str, list[Span]]:
    """Returns what a rank has beside its compute, by the name of its line: of kinds that take time on some rank."""
    lanes: dict[str, list[Span]] = {}
    if any(kind in COLLECTIVES for kind in timed):
        between = [span for span in spans if span.action.kind in BETWEEN_NODES]
        inside = [span for span in spans if span.action.kind in COLLECTIVES - BETWEEN_NODES]
        lanes = {"network": inside} if not between else {"inside": inside, "between": between}
    for name, kinds in _ON_THE_BUS.items():
        if not kinds.isdisjoint(timed):
            lanes[name] = [span for span in spans if span.action.kind in kinds]
    return lanes


def _row(spans: Iterable[Span], local: Mapping[int, int], unit: float, columns: int) -> list[str]:
    """Returns ``columns`` symbols, each of ``unit`` time; ``local`` numbers the chunks of the rank."""
    row = ["."] * columns
    for span in spans:
        start, end = round(span.start / unit), round(span.end / unit)
        row[start:end] = _SYMBOLS[span.action.kind][local[span.action.chunk] % 10] * (end - start)
    return row


_BUBBLE = ("activation", "gradient", "send", "data")
"""Waits that the chart leaves as idle time."""


def report(shown: Sequence[Shown]) -> str:
    """Returns the chart of each step's first data-parallel and tensor-parallel ranks, and one table of all steps."""
    parts = [f"{_title(each)}\n{_gantt(each)}" for each in shown]
    return "\n\n".join([*parts, "\n".join(_table([each.figures for each in shown]))])


def _title(shown: Shown) -> str:
    figures = shown.figures
    replicas = {rank.data_rank for rank in shown.recording.ranks}
    first = f", data-parallel rank 0 of {len(replicas)}" if len(replicas) > 1 else ""
    return f"{shown.title}{first}: {_seconds(figures.seconds)}, bubble {figures.bubble:.1%} of the compute time"


def _gantt(shown: Shown) -> str:
    spec = shown.recording.program_spec()
    tensor_ranks = Peers(spec, shown.recording.ranks).tensor_ranks
    first = {
        rank.pipeline_rank: step.intervals
        for rank, step, tensor_rank in zip(shown.recording.ranks, shown.steps, tensor_ranks)
        if rank.data_rank == 0 and tensor_rank == 0
    }

    def spans(drawn: Callable[[Interval], bool]) -> list[list[Span]]:
        """Returns, for each rank, what is drawn and belongs to an action, from the beginning of the step on."""
        return [
            [
                Span(each.start - shown.start, each.end - shown.start, action)
                for each in filter(drawn, first[rank])
                if (action := action_of(each.name)) is not None
            ]
            for rank in range(spec.pipeline_ranks)
        ]

    waits = spans(lambda each: each.lane == "wait" and each.kind not in _BUBBLE)
    timeline = Timeline(
        spans=spans(lambda each: each.lane == "compute" and each.kind != "step"),
        # A STEP has collectives of its own, such as that of the norm.
        collectives=spans(lambda each: each.lane not in ("compute", "wait", "send") and each.name != "STEP"),
        waits=[[Wait(*span) for span in rank] for rank in waits],
        updates=spans(lambda each: each.lane == "compute" and each.kind == "step"),
        ideal=0.0,
        arrivals={},
    )
    return text_gantt(spec, timeline)


def _table(columns: Sequence[Figures]) -> Iterator[str]:
    """Yields the mean seconds of each kind over the ranks, and the rank that has most of it."""
    yield f"{'':<12}" + "".join(f"{each.source:>14}{'share':>9}{'most, on rank':>22}" for each in columns)
    for kind in KINDS:
        if any(each.mean(kind) for each in columns):
            yield f"{LABELS.get(kind, kind):<12}" + "".join(_cells(each, kind) for each in columns)
    yield f"{'whole step':<12}" + "".join(f"{_seconds(each.seconds):>14}{'':>31}" for each in columns)
    for each in columns:
        parts = ", ".join(f"{LABELS.get(kind, kind)} {_seconds(time)}" for kind, time in each.critical_path.items())
        yield f"critical path of {each.source}: {parts}"


def _cells(figures: Figures, kind: str) -> str:
    mean, (most, rank) = figures.mean(kind), figures.most(kind)
    worst = f"{_seconds(most)} on {rank}" if most else ""
    share = mean / figures.seconds if figures.seconds else 0.0
    return f"{_seconds(mean):>14}{share:>9.1%}{worst:>22}"


def _seconds(time: float) -> str:
    return f"{time:.4g}"


def table(titles: Sequence[str], rows: Sequence[Sequence[object]], left: Container[int] = ()) -> str:
    """Returns aligned columns. Columns with an index in ``left`` align to the left, other columns to the right."""
    cells = [titles, *([f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = (
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths))
        )
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)
