"""What ``ds_lgamp plan`` says without a search for a batch: the shortest training, and predictions of given runs."""

import json
import sys
from pathlib import Path
from statistics import fmean

from ds_lgamp.cli.terminal import at_work
from ds_lgamp.fields import read_text
from ds_lgamp.planner.cluster import Cluster
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.predict import Prediction
from ds_lgamp.planner.runs import Run, predict_all, read_runs
from ds_lgamp.planner.shortest import BUSY, critical_batch, shortest
from ds_lgamp.planner.write import describe
from ds_lgamp.view.report import table


def run_shortest(model: Model, cluster: Cluster, tokens: float, law: str, as_json: bool) -> int:
    """Prints the shortest training of each method. Returns the exit status. Raises ValueError if none is possible."""
    with at_work("looking for the shortest training"):
        found = shortest(model, cluster, tokens, law)
    if not found:
        raise ValueError(f"{model.name} does not fit {cluster.name} with any layout at its critical batch")
    batch = critical_batch(model, law)
    if as_json:
        rows = {
            name: {"days": entry.days, "gpus": entry.plan.configuration.gpus, **entry.plan.configuration.to_json()}
            for name, entry in found.items()
        }
        print(json.dumps({"critical_batch": batch, "methods": rows}))
        return 0
    print(
        f"{model.name}, {model.parameters / 1e9:.4g} billion parameters, {tokens:g} tokens: critical batch {batch} "
        f"sequences ({law}); at least {BUSY:.0%} of all GPUs' time is compute."
    )
    for entry in sorted(found.values(), key=lambda entry: entry.days):
        of = entry.plan.configuration
        print(f"{entry.days:8.3g} days on {of.gpus:,} GPUs: {describe(of)}")
    return 0


def predict_runs(path: Path, cluster_source: str, as_json: bool) -> int:
    """Predicts every row of the table at ``path`` and prints the predictions in its order. A table with measured times
    gets a summary of the errors on standard error.

    Raises ValueError with the row and the field of the first wrong one.
    """
    # Spreadsheets put a byte order mark in front.
    text = sys.stdin.read().removeprefix("\ufeff") if str(path) == "-" else read_text(path, "--runs")
    runs, unknown = read_runs(text.splitlines())
    if unknown:
        print(f"columns that mean nothing here: {', '.join(unknown)}", file=sys.stderr)
    with at_work("predicting"):
        predictions = predict_all(runs, cluster_source)
    if as_json:
        found = [{"seconds": each.seconds, "mfu": each.mfu, "parts_seconds": each.parts} for each in predictions]
        print(json.dumps({"runs": found}))
    else:
        print(_as_text(runs, predictions))
    _summarise(runs, predictions)
    return 0


def _as_text(runs: list[Run], predictions: list[Prediction]) -> str:
    # The models of a table have no experts.
    names = [name for name in predictions[0].parts if name != "expert_parallel"]
    heads = ["row", "seconds", "measured", "MFU", *names]
    rows = []
    for number, (run, prediction) in enumerate(zip(runs, predictions), 1):
        measured = "" if run.measured is None else f"{run.measured:.4g}"
        parts = [f"{prediction.parts[name]:.3g}" for name in names]
        rows.append([str(number), f"{prediction.seconds:.4g}", measured, f"{prediction.mfu:.1%}", *parts])
    return table(heads, rows)


def _summarise(runs: list[Run], predictions: list[Prediction]) -> None:
    pairs = [(run.measured, prediction.seconds) for run, prediction in zip(runs, predictions) if run.measured]
    if pairs:
        errors = [seconds / measured - 1 for measured, seconds in pairs]
        print(
            f"{len(pairs)} rows are measured: mean absolute error {fmean(map(abs, errors)):.1%}, mean error "
            f"{fmean(errors):+.1%}, largest {max(errors, key=abs):+.1%}",
            file=sys.stderr,
        )
