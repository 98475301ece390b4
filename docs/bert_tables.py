"""Tables of docs/bert.md, from recorded runs."""

from benchmarks.bert import EFFICIENCY, PREDICTED
from benchmarks.bert_learning import METRICS
from benchmarks.record import read
from docs.pivot import CONTENDER, by_metric, median, metric, pivot, setting, with_spread


def scaling() -> str:
    """Seconds of a step, CPU seconds of all nodes, efficiency and the planner's, by micro-batches."""
    share = median(".1%")
    cells = {"step": with_spread(".2f"), "CPU": median(".2f"), EFFICIENCY: share, PREDICTED: share}
    headings = {"step": "step, s", "CPU": "CPU, s", EFFICIENCY: EFFICIENCY, PREDICTED: PREDICTED}
    labels = [("compute", setting("compute")), ("micro-batches", setting("micro_batches")), CONTENDER]
    return pivot(read("bert").rows, labels, metric, by_metric(cells), headings)


def learning() -> str:
    """Losses and accuracies on held-out text of both runs, by step."""
    rows = [row for row in read("bert_learning").rows if "step" in row.config]
    headings = {name: name for name in METRICS}
    return pivot(rows, [("step", setting("step")), CONTENDER], metric, median(".4f"), headings)


def learned() -> str:
    """The loss of unigrams, the seconds of both runs, and the accuracies of fine-tuning."""
    rows = [row for row in read("bert_learning").rows if "step" not in row.config]
    return pivot(rows, [CONTENDER, ("what", metric)], lambda _: "value", median(".4g"), numbers_from=2)


def plan() -> str:
    """Steps, exposed network, memory, days and cost of every method in every phase."""
    rows = [row for row in read("bert_plan").rows if row.config["sequence"] != "both"]
    keys = {"sequence": "sequence", "micro_batches": "micro-batches", "zero_stage": "ZeRO", "recompute": "recompute"}
    labels = [CONTENDER, *((heading, setting(key)) for key, heading in keys.items())]
    cells = {"step": ".2f", "network": ".1%", "memory": ".1f", "days": ".3f", "cost": ".0f"}
    headings = {"step": "step, s", "network": "exposed network", "memory": "GB", "days": "days", "cost": "dollars"}
    return pivot(rows, labels, metric, by_metric({key: median(form) for key, form in cells.items()}), headings)
