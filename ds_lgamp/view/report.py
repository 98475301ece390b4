"""A recorded step as text: a Gantt chart of characters, and a table of where the time went."""

from collections.abc import Iterable, Iterator, Sequence

from ds_lgamp.schedule.card import Wait
from ds_lgamp.schedule.simulate import Span, Timeline
from ds_lgamp.view.critical_path import action_of
from ds_lgamp.view.figures import KINDS, LABELS, Figures, Shown
from ds_lgamp.view.peers import Peers
from ds_lgamp.view.recording import Interval
from ds_lgamp.view.text import text_gantt

_BUBBLE = ("activation", "gradient", "send", "data")
"""Waits that the chart leaves as idle time."""


def report(shown: Sequence[Shown], width: int = 120) -> str:
    """The chart of each step's first data-parallel and tensor-parallel ranks, and one table of all steps."""
    parts = [f"{_title(each)}\n{_gantt(each, width)}" for each in shown]
    return "\n\n".join([*parts, "\n".join(_table([each.figures for each in shown]))])


def _title(shown: Shown) -> str:
    figures = shown.figures
    replicas = {rank.data_rank for rank in shown.recording.ranks}
    first = f", data-parallel rank 0 of {len(replicas)}" if len(replicas) > 1 else ""
    return f"{shown.title}{first}: {_seconds(figures.seconds)}, bubble {figures.bubble:.1%} of the compute time"


def _gantt(shown: Shown, width: int) -> str:
    spec = shown.recording.program_spec()
    tensor_ranks = Peers(spec, shown.recording.ranks).tensor_ranks
    first = {
        rank.pipeline_rank: step.intervals
        for rank, step, tensor_rank in zip(shown.recording.ranks, shown.steps, tensor_ranks)
        if rank.data_rank == 0 and tensor_rank == 0
    }
    ranks = [first[rank] for rank in range(spec.pipeline_ranks)]
    computes = [[each for each in intervals if each.lane == "compute"] for intervals in ranks]
    beside = [[each for each in intervals if each.lane not in ("compute", "wait", "send")] for intervals in ranks]
    waits = [[each for each in intervals if each.lane == "wait" and each.kind not in _BUBBLE] for intervals in ranks]
    timeline = Timeline(
        spans=[_spans(shown, (each for each in rank if each.kind != "step")) for rank in computes],
        # A STEP has collectives of its own, such as that of the norm.
        collectives=[_spans(shown, (each for each in rank if each.name != "STEP")) for rank in beside],
        waits=[[Wait(*span) for span in _spans(shown, rank)] for rank in waits],
        updates=[_spans(shown, (each for each in rank if each.kind == "step")) for rank in computes],
        ideal=0.0,
        arrivals={},
    )
    return text_gantt(spec, timeline, width)


def _spans(shown: Shown, intervals: Iterable[Interval]) -> list[Span]:
    """What of the intervals belongs to an action, from the beginning of the step on."""
    actions = [(each, action_of(each.name)) for each in intervals]
    return [
        Span(each.start - shown.start, each.end - shown.start, action) for each, action in actions if action is not None
    ]


def _table(columns: Sequence[Figures]) -> Iterator[str]:
    """Mean seconds of each kind over the ranks, and the rank that has most of it."""
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
