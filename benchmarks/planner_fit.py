"""Fits the planner's constants to published runs: ``python -m benchmarks run planner_fit``.

The rows are in benchmarks/data/vtrain. The fit minimises the mean absolute relative error, half of it over the rows on
several nodes and half over those on one, which outliers hardly move. Rows alone do not tell all constants apart: the
bandwidth between nodes, for instance, matters in few of them. Each constant therefore stays near a value known
beforehand, unless the rows say otherwise. Cross-validation predicts rows of a size that the fit has not seen.

The defaults of ``ds_lgamp/planner/cluster.py`` are the result over all rows.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, log
from statistics import fmean
from typing import NamedTuple

from benchmarks.record import OURS, ROOT, Record, begin
from ds_lgamp.planner.cluster import named_cluster
from ds_lgamp.planner.runs import Run, read_runs

NAME = "planner_fit"
DATA = ROOT / "benchmarks" / "data" / "vtrain"
MULTI, ONE = "several nodes", "one node"
FILES = {MULTI: DATA / "a100_multi_node.csv", ONE: DATA / "a100_one_node.csv"}
LIMITS = {MULTI: 0.08, ONE: 0.10}
"""Limits of the mean absolute error in cross-validation."""
CHOICE_LIMIT = 0.05
"""How much slower than the fastest measured configuration the fastest predicted one may be."""


class Known(NamedTuple):
    """What is known of a constant before the fit."""

    value: float
    factor: float
    """A deviation by this factor counts as one standard deviation."""


KNOWN = {
    # Large products of cuBLAS, collectives of nccl-tests, copies in memory: what benchmarks of an A100 reach.
    "matmul": Known(0.8, 1.1),
    "memory": Known(0.85, 1.1),
    "inside": Known(0.8, 1.15),
    "between": Known(0.9, 1.15),
    # Half of a tile of 128 rows or columns is wasted on average.
    "dimension": Known(64, 2),
    "launch_seconds": Known(20e-6, 3),
    "gap_seconds": Known(10e-6, 3),
    "crowding": Known(0.5, 3),
}
STRENGTH = 0.00125
"""Weight of a squared standard deviation beside the mean absolute error."""
FIRST_STEP, LAST_STEP = 0.3, 0.01
"""Of the search, as natural logarithms."""


class Row(NamedTuple):
    """A published run and the size that cross-validation leaves out with it."""

    run: Run
    size: str


Constants = Mapping[str, float]


def run() -> Record:
    """Fits to all rows and, for each size, to all other rows."""
    record = begin(NAME)
    rows = {kind: read_rows(kind) for kind in FILES}
    constants = fit(rows)
    enter(record, "all rows", rows, constants)
    for name, constant in constants.items():
        record.add(OURS, {"fitted": "all rows"}, name, [constant], "constant")
    for kind in FILES:
        errors = []
        for size in dict.fromkeys(row.size for row in rows[kind]):
            unseen = [row for row in rows[kind] if row.size == size]
            seen = [row for row in rows[kind] if row.size != size]
            constants = fit({**rows, kind: seen})
            enter(record, f"all but {size}", {f"{kind}, {size}": unseen}, constants)
            errors += [abs(error) for error in errors_of(unseen, constants)]
        record.aim(f"mean absolute error, {kind}, sizes left out in turn", fmean(errors), LIMITS[kind])
    for target in [row for row in record.rows if row.metric == "choice"]:
        text = f"{target.config['rows']}, fitted to {target.config['fitted']}: chosen over fastest measured"
        record.aim(text, target.median, 1 + CHOICE_LIMIT)
    return record


def read_rows(kind: str) -> list[Row]:
    """Returns the rows of a file with their sizes."""
    text = FILES[kind].read_text().splitlines()
    runs, _ = read_runs(text)
    return [Row(run, _size(columns)) for run, columns in zip(runs, csv.DictReader(text))]


def _size(columns: Mapping[str, str]) -> str:
    if "parameters_billion" in columns:
        return f"{columns['parameters_billion']} billion parameters"
    return f"{columns['layers']} layers"


def enter(record: Record, fitted: str, rows: Mapping[str, Sequence[Row]], constants: Constants) -> None:
    """Enters the errors over ``rows`` and, for each size of several nodes, how good the chosen configuration is."""
    for name, members in rows.items():
        config = {"fitted": fitted, "rows": name}
        errors = errors_of(members, constants)
        record.add(OURS, config, "mean absolute error", [fmean(map(abs, errors))], "ratio")
        record.add(OURS, config, "mean error", [fmean(errors)], "ratio")
        if name.startswith(MULTI):
            for size in dict.fromkeys(row.size for row in members):
                of_size = [row for row in members if row.size == size]
                record.add(
                    OURS, {**config, "rows": f"{MULTI}, {size}"}, "choice", [choice(of_size, constants)], "ratio"
                )


def choice(rows: Sequence[Row], constants: Constants) -> float:
    """Returns the measured step of the row that is predicted to be the fastest, over the fastest measured step."""
    chosen = min(rows, key=lambda row: predicted(row.run, constants))
    return measured(chosen.run) / min(measured(row.run) for row in rows)


def errors_of(rows: Sequence[Row], constants: Constants) -> list[float]:
    """Returns the relative error of each prediction."""
    return [predicted(row.run, constants) / measured(row.run) - 1 for row in rows]


def predicted(run: Run, constants: Constants) -> float:
    cluster = named_cluster("a100", run.configuration.gpus)
    return run.predict(replace(cluster, efficiency=constants)).seconds


def measured(run: Run) -> float:
    assert run.measured is not None, "the table tells no times"
    return run.measured


def fit(rows: Mapping[str, Sequence[Row]]) -> dict[str, float]:
    """Returns the constants that predict ``rows`` best: a search along one constant after the other."""

    def loss(constants: Constants) -> float:
        errors = [fmean(map(abs, errors_of(members, constants))) for members in rows.values()]
        surprise = sum((log(constants[name] / known.value) / log(known.factor)) ** 2 for name, known in KNOWN.items())
        return fmean(errors) + STRENGTH * surprise

    best = {name: known.value for name, known in KNOWN.items()}
    least = loss(best)
    steps = dict.fromkeys(KNOWN, FIRST_STEP)
    while max(steps.values()) > LAST_STEP:
        for name in KNOWN:
            for sign in (1, -1):
                tried = {**best, name: best[name] * exp(sign * steps[name])}
                if (found := loss(tried)) < least:
                    best, least = tried, found
                    steps[name] *= 1.3
                    break
            else:
                steps[name] /= 2
    return {name: float(f"{value:.3g}") for name, value in best.items()}
