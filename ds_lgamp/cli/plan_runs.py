"""``ds_lgamp plan --runs``: predicts the steps of given configurations."""

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from ds_lgamp.cli.progress import at_work
from ds_lgamp.planner.cluster import CLUSTERS, read_cluster, sized
from ds_lgamp.planner.fields import read_text
from ds_lgamp.planner.predict import Prediction
from ds_lgamp.planner.runs import Run, read_runs


def predict_runs(path: Path, cluster_source: str, as_json: bool, output: TextIO) -> int:
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
        predictions = _predictions(runs, cluster_source)
    if as_json:
        json.dump({"runs": [_as_json(prediction) for prediction in predictions]}, output)
        output.write("\n")
    else:
        output.write(_as_text(runs, predictions))
    _summarise(runs, predictions)
    return 0


def _predictions(runs: list[Run], cluster_source: str) -> list[Prediction]:
    cluster = read_cluster(cluster_source)
    predictions = []
    for number, run in enumerate(runs, 1):
        # A ready cluster has as many nodes as a row needs.
        fitting = sized(cluster, run.configuration.gpus) if cluster_source in CLUSTERS else cluster
        try:
            predictions.append(run.predict(fitting))
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from None
    return predictions


def _as_json(prediction: Prediction) -> dict[str, Any]:
    return {"seconds": prediction.seconds, "mfu": prediction.mfu, "parts_seconds": prediction.parts}


def _as_text(runs: list[Run], predictions: list[Prediction]) -> str:
    heads = ["row", "seconds", "measured", "MFU", *predictions[0].parts]
    lines = [heads]
    for number, (run, prediction) in enumerate(zip(runs, predictions), 1):
        measured = "" if run.measured is None else f"{run.measured:.4g}"
        parts = [f"{seconds:.3g}" for seconds in prediction.parts.values()]
        lines.append([str(number), f"{prediction.seconds:.4g}", measured, f"{prediction.mfu:.1%}", *parts])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) + "\n" for line in lines)


def _summarise(runs: list[Run], predictions: list[Prediction]) -> None:
    told = [(run.measured, prediction.seconds) for run, prediction in zip(runs, predictions) if run.measured]
    if told:
        errors = [seconds / measured - 1 for measured, seconds in told]
        print(
            f"{len(told)} rows are measured: mean absolute error {fmean(map(abs, errors)):.1%}, mean error "
            f"{fmean(errors):+.1%}, largest {max(errors, key=abs):+.1%}",
            file=sys.stderr,
        )
