"""The generated tables about checkpoints: their speed, live states, and what a restart costs."""

from benchmarks.record import Row, read
from docs.pivot import by_metric, contender, median, metric, pivot, setting, with_spread
from testing.markdown import table


def checkpoint() -> str:
    """Rates of both contenders at every number of ranks."""
    rows = [row for row in read("checkpoint").rows if row.unit == "MB/s"]
    return pivot(rows, [("ranks", setting("ranks")), ("MB/s", metric)], contender, with_spread(".0f"))


def saving() -> str:
    """The costs of a save in the background."""
    rows = [row for row in read("checkpoint").rows if row.unit != "MB/s"]
    lines = [[row.metric, f"{row.median:.0f}", f"{row.spread:.0f}", row.unit] for row in rows]
    return table(["", "median", "spread", "unit"], lines, numbers_from=1)


def restart() -> str:
    """Seconds until training goes on after a failure, and steps made again, by event."""
    headings = {"until training goes on": "until training goes on, s", "steps made again": "steps made again"}
    cells = {"until training goes on": with_spread(".1f"), "steps made again": median(".0f")}
    return pivot(read("restart").rows, [("what happens", setting("event"))], metric, by_metric(cells), headings)


def live() -> str:
    """The costs of live states."""
    metrics = {"step": ".0f", "end of a step, main thread": ".2f", "written in a step": ".1f"}
    rows = [[row.contender, row.metric, *_rounded(row, metrics[row.metric]), row.unit] for row in read("live").rows]
    return table(["contender", "", "median", "spread", "unit"], rows, numbers_from=2)


def _rounded(row: Row, form: str) -> tuple[str, str]:
    return f"{row.median:{form}}", f"{row.spread:{form}}"
