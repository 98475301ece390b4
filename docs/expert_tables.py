"""Tables of the benchmark of experts that ranks divide, from its recorded run."""

from benchmarks.divided_experts import NAME
from benchmarks.record import read
from benchmarks.training import LOOPBACK
from benchmarks.training_slow import SLOW
from docs.pivot import CONTENDER, LAYOUT, median, metric, pivot, setting, with_spread
from docs.tables import MB

_COUNTED = {
    "gathers": "gathers",
    "reductions": "reductions",
    "sent": "MB sent",
    "expert_gathers": "of experts: gathers",
    "expert_reductions": "reductions",
    "expert_sent": "MB sent",
    "all_to_alls": "all-to-alls",
    "tokens_sent": "MB sent",
    "peak": "peak MB",
}
_LABELS = [("micro-batches", setting("micro_batches")), CONTENDER, LAYOUT]


def counts() -> str:
    """What a step moves and holds, for every number of ranks and of micro-batches."""
    rows = [row for row in read(NAME).rows if row.metric in _COUNTED]
    rows.sort(key=lambda row: (row.config["micro_batches"], row.config["data_ranks"]))
    return pivot(
        rows,
        _LABELS,
        metric,
        lambda rows: median(".1f", MB)(rows) if rows[0].unit == "bytes" else median(".0f")(rows),
        _COUNTED,
        numbers_from=3,
    )


def seconds() -> str:
    """Seconds of a step on both links."""
    return pivot(
        [row for row in read(NAME).rows if row.metric == "step"],
        _LABELS,
        setting("link"),
        with_spread(".2f"),
        {link: f"{link}, s" for link in (LOOPBACK, SLOW)},
        numbers_from=3,
    )
