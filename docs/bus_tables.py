"""Tables of docs/offload.md, from recorded runs."""

from benchmarks.bus import RATIO
from benchmarks.record import Row, read
from docs.pivot import CONTENDER, by_metric, median, metric, micro_batches, pivot, setting, with_spread

MB = 1e-6


def moved() -> str:
    """MB that every contender loads and stores in a step, by micro-batches."""
    rows = [row for row in read("offload").rows if row.unit == "bytes"]

    def cell(found: list[Row]) -> str:
        amounts = {row.metric: row.median * MB for row in found}
        return f"{amounts['loaded']:.2f} + {amounts['stored']:.2f}"

    return pivot(rows, [CONTENDER], micro_batches, cell)


def updates() -> str:
    """Nanoseconds of an update on the host for each parameter, and how many times its bound that is, by threads."""
    cells = {"update": with_spread(".2f"), "update / bound": median(".2f"), "read and written": with_spread(".1f")}
    headings = {"update": "update, ns", "update / bound": "update / bound", "read and written": "GB/s"}
    return pivot(
        read("host_update").rows, [("threads", setting("threads")), CONTENDER], metric, by_metric(cells), headings, 1
    )


def on_disk() -> str:
    """GB per second of updates of state on a disk, and of as many bytes front to back, by state and contender."""
    cells = {name: with_spread(".2f") for name in ("read alone", "written alone", "read and written")}
    cells["share of the disk's rate"] = median(".0%")
    headings = {
        "read alone": "read alone, GB/s",
        "written alone": "written alone, GB/s",
        "read and written": "both at once, GB/s",
        "share of the disk's rate": "share",
    }
    keys = [("state", setting("state")), CONTENDER]
    return pivot(read("disk_update").rows, keys, metric, by_metric(cells), headings)


def throttled() -> str:
    """Milliseconds of a step behind a throttled bus, measured and on the clock."""
    cells = {"step": with_spread(".0f"), "simulated": median(".0f"), RATIO: median(".2f")}
    headings = {"step": "step, ms", "simulated": "clock, ms", RATIO: RATIO}
    keys = [("load, ms", setting("load_ms")), ("micro-batches", setting("micro_batches")), CONTENDER]
    return pivot(read("bus").rows, keys, metric, by_metric(cells), headings, numbers_from=3)
