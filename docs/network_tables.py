"""Tables of networks, slow and unlike ones, and of what travels rounded over them, as Markdown, from recorded runs."""

from collections.abc import Callable, Sequence

from benchmarks import unlike as unlike_networks
from benchmarks.curves import LAST, STEPS
from benchmarks.record import OURS, PART, Row, read
from benchmarks.rounded import RATES
from benchmarks.training import LOOPBACK
from docs.pivot import CONTENDER, LAYOUT, Label, by_metric, median, metric, pivot, setting, with_spread
from docs.tables import MB

_Cell = Callable[[list[Row]], str]
_PLACE: list[Label] = [("network", setting(PART)), ("between", setting("between")), ("ranks", setting("order"))]
_MILLISECONDS = {"step": "step, ms", "clock": "clock, ms"}


def latency() -> str:
    """The bubble of every contender at every length of compute, also relative to both simulations."""
    lengths = ("forward + backward, ms", lambda row: "{forward_ms:g} + {backward_ms:g}".format(**row.config))
    metrics = ("bubble", "bubble / simulated bubble", "bubble / simulated bubble, one message after another")
    headings = {name: name for name in metrics}
    return pivot(read("latency").rows, [lengths, CONTENDER], metric, with_spread(".3f"), headings)


def network() -> str:
    """The time of a step in every layout, at every rate and in every order; the bound beside the layered order."""
    headings = {"step": "step, ms", "bound": "bound, ms", "step / bound": "step / bound", "simulated": "simulated, ms"}
    whole = median(".0f")
    cells = {"step": with_spread(".0f"), "bound": whole, "step / bound": median(".3f"), "simulated": whole}
    return pivot(
        read("network").rows, [LAYOUT, ("rate", setting("rate")), CONTENDER], metric, by_metric(cells), headings
    )


def updates() -> str:
    """The time of a step with each way to update, in every layout, at every rate and stage; the ratio to all updates at
    the step."""
    ratio = "all at the step / one by one"
    headings = {"step": "step, ms", "simulated": "simulated, ms", ratio: ratio}
    cells = {"step": with_spread(".0f"), "simulated": median(".0f"), ratio: median(".3f")}
    keys = [("link", setting("rate")), ("stage", setting("zero_stage")), CONTENDER]
    return pivot(read("updates").rows, [LAYOUT, *keys], metric, by_metric(cells), headings)


def gathers() -> str:
    """Seconds of a step with gathers behind it and with deferred ones, in every layout on every link."""
    return pivot(
        read("gathers").rows,
        [LAYOUT, ("link", setting("link")), ("stage", setting("zero_stage"))],
        lambda row: row.contender.removeprefix(f"{OURS}, gathers ") + ", s" if row.unit == "s" else "ratio",
        lambda rows: with_spread(".3f")(rows) if rows[0].unit == "s" else median(".3f")(rows),
        numbers_from=2,
    )


def unlike() -> str:
    """Seconds of a step, MB between islands, and both relative to a fast network, on every network in both orders."""
    cells = {"step": with_spread(".2f"), "bytes between islands": median(".1f", MB)}
    cells |= dict.fromkeys((unlike_networks.RATIO, unlike_networks.BOUND), median(".2f"))
    return _table("unlike", _PLACE, cells, {"step": "step, s", "bytes between islands": "MB between islands"})


def islands() -> str:
    """Milliseconds of a step of virtual compute, measured and on the clock, on every network in its orders of ranks."""
    return _table("islands", _PLACE, _on_clock("step / fast everywhere"), _MILLISECONDS)


def speeds() -> str:
    """Milliseconds of a step with equal work and with work by speed, and on the clock."""
    keys: list[Label] = [("key", setting("key")), ("speeds", setting("speeds"))]
    return _table("speeds", keys, _on_clock("step / all busy"), _MILLISECONDS)


def curves(name: str, *keys: Label) -> str:
    """Losses of a training with exact and with rounded numbers, and MB that it sends if they count, by ``keys``."""
    cells = {"bytes sent": median(".2f", MB)}
    return pivot(
        [row for row in read(name).rows if row.config[PART] == "curves"],
        [*keys, CONTENDER],
        metric,
        lambda rows: cells.get(rows[0].metric, median(".4f"))(rows),
        numbers_from=1 + len(keys),
    ).replace("bytes sent", "MB sent")


def quantised_seconds(part: str = "seconds") -> str:
    """Seconds of a step with exact and with rounded travel, for every number of micro-batches on every link."""
    return pivot(
        [row for row in read("quantised").rows if row.config[PART] == part and row.metric == "step"],
        [("micro-batches", setting("micro_batches")), CONTENDER],
        lambda row: f"{row.config['link']}, s",
        with_spread(".3f"),
        numbers_from=2,
    )


def _on_clock(ratio: str) -> dict[str, _Cell]:
    ratios = dict.fromkeys(("step / clock", ratio), median(".2f"))
    return {"step": with_spread(".0f"), "clock": median(".0f"), **ratios}


def _table(name: str, keys: Sequence[Label], cells: dict[str, _Cell], headings: dict[str, str]) -> str:
    """Returns the rows of a record by ``keys`` and contender, with a column for each metric of ``cells``."""
    names = {metric: metric for metric in cells} | headings
    by = [*keys, CONTENDER]
    return pivot(read(name).rows, by, metric, by_metric(cells), names, numbers_from=len(by))


def rounded() -> str:
    """Losses, MB of messages and seconds of a step whose hidden states travel exactly or rounded."""
    rows, first, last = read("rounded").rows, "loss of the first step", f"mean loss of the last {LAST} of {STEPS} steps"
    links = {row.config["link"] for row in rows if "link" in row.config}
    cells = {"bytes of messages": median(".2f", MB), "step": with_spread(".2f")}
    return pivot(
        rows,
        [CONTENDER],
        lambda row: f"{row.config.get('link', row.metric)}",
        lambda rows: cells.get(rows[0].metric, median(".4f"))(rows),
        {
            first: "loss, first step",
            last: f"loss, last {LAST} of {STEPS}",
            "bytes of messages": "MB of messages",
            **{link: f"step, {link}, s" for link in (LOOPBACK, *RATES) if link in links},
        },
        numbers_from=1,
    )
