"""Tables of the planner, as Markdown, from recorded runs."""

from dataclasses import replace

from benchmarks.record import Row, read
from docs.pivot import contender, median, metric, pivot, setting, with_spread
from testing.markdown import table


def planner_errors() -> str:
    """Errors of predicted steps of published runs, by what the constants were fitted to."""
    rows = [row for row in read("planner_fit").rows if row.unit == "ratio"]
    return pivot(rows, [("fitted to", setting("fitted")), ("rows", setting("rows"))], metric, median(".1%"))


def planner_constants() -> str:
    """The planner's fitted constants."""
    rows = [row for row in read("planner_fit").rows if row.unit == "constant"]
    return table(["constant", "value"], [[row.metric, f"{row.median:g}"] for row in rows], numbers_from=1)


def one_machine() -> str:
    """Tokens per second of the fastest plan, by machine, training and model; h: with something on the host."""
    rows = [row for row in read("one_machine").rows if row.metric == "tokens"]
    labels = [
        ("cards", lambda row: "{cards} x {card}".format(**row.config)),
        ("host, GB", setting("host")),
        ("trains", setting("trains")),
    ]

    def cell(found: list[Row]) -> str:
        (row,) = found
        return f"{row.median:,.0f}{' h' if 'on the host' in row.contender else ''}"

    return pivot(rows, labels, setting("model"), cell)


def sources() -> str:
    """What sources say, and the planner's numbers."""
    rows = read("sources").rows
    return pivot(
        rows, [("source", contender), ("what", setting("what")), ("unit", lambda row: row.unit)], metric, median(".4g")
    )


def prediction() -> str:
    """Measured and predicted steps of every configuration."""
    names = {
        "schedule": "schedule",
        "rate": "rate",
        "pipeline_ranks": "P",
        "data_ranks": "W",
        "chunks_per_rank": "chunks",
        "micro_batches": "micro-batches",
        "zero_stage": "ZeRO",
        "resident_chunks": "resident",
        "lengths": "lengths",
    }
    rows = [
        replace(row, metric=f"{row.metric}, ms" if row.unit == "ms" else row.metric) for row in read("prediction").rows
    ]
    keys = [(heading, setting(name)) for name, heading in names.items()]
    return pivot(rows, [*keys, ("KB of message / chunk", _sizes)], metric, with_spread(".4g"))


def _sizes(row: Row) -> str:
    return "{message_kb:g} / {chunk_kb:g}".format(**row.config)
