"""Plots of the pages, as SVG: of recorded runs, and the picture of the schedule that the README shows."""

import hashlib
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from benchmarks.record import OURS, RESULTS, ROOT, TYPICAL, read
from ds_lgamp.cli.main import main

FOLDER = ROOT / "docs" / "plots"
PICTURE = "beside_1f1b"
"""The layered modular schedule below 1F1B."""
COMMAND = "schedule --pipeline-ranks 4 --chunks-per-rank 4 --micro-batches 8 --svg"
"""The words behind ``ds_lgamp`` that draw the picture, but for its file."""


def write() -> None:
    """Draws every plot into docs/plots."""
    import matplotlib
    from matplotlib.figure import Figure

    FOLDER.mkdir(exist_ok=True)
    # The same data give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "ds_lgamp", "svg.fonttype": "none"}):
        for name, draw in PLOTS.items():
            figure = Figure(figsize=(8, 4.5), layout="constrained")
            draw(figure)
            figure.savefig(path_of(name), metadata={"Date": None, "Description": digest(name)})
    draw_picture(path_of(PICTURE))


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.svg"


def digest(name: str) -> str:
    """Identifies the recorded run that a plot shows. The plot's file contains it."""
    return f"sha256 of {name}.json: {hashlib.sha256((RESULTS / f'{name}.json').read_bytes()).hexdigest()}"


def draw_picture(path: Path) -> None:
    """Draws the schedule beside 1F1B into ``path``."""
    with redirect_stdout(StringIO()):
        main([*COMMAND.split(), str(path)])


def communication(figure: Any) -> None:
    """Bytes sent per step over micro-batches, one panel per layout."""
    _over_micro_batches(figure, "communication", "collective_bytes", "MB sent per step and rank")


def _over_micro_batches(figure: Any, name: str, metric: str, label: str) -> None:
    """Draws every peer, and ours at stage 3 with two resident chunks."""
    rows = [row for row in read(name).rows if row.metric == metric]
    rows = [row for row in rows if not row.contender.startswith(OURS) or row.contender == TYPICAL]
    layouts = list(dict.fromkeys((row.config["pipeline_ranks"], row.config["data_ranks"]) for row in rows))
    for axes, layout in zip(figure.subplots(1, len(layouts), squeeze=False)[0], layouts):
        here = [row for row in rows if (row.config["pipeline_ranks"], row.config["data_ranks"]) == layout]
        for contender in dict.fromkeys(row.contender for row in here):
            points = [(row.config["micro_batches"], row.median / 1e6) for row in here if row.contender == contender]
            axes.plot(*zip(*points), marker="o", linewidth=3 if contender == TYPICAL else 1, label=contender)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlabel="micro-batches per step", ylabel=label)
        axes.set_title("{} pipeline x {} data-parallel ranks".format(*layout), fontsize="medium")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")


def memory(figure: Any) -> None:
    """Peak bytes over micro-batches, one panel per layout."""
    _over_micro_batches(figure, "memory", "peak", "peak MB of a rank")


def schedule(figure: Any) -> None:
    """Step / simulated over chunks per rank on loopback, one panel per number of pipeline ranks; 8 micro-batches."""
    rows = [row for row in read("schedule").rows if row.metric == "step / simulated"]
    rows = [row for row in rows if row.config["link"] == "loopback" and row.config["micro_batches"] == 8]
    panels = list(dict.fromkeys(row.config["pipeline_ranks"] for row in rows))
    for axes, ranks in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels):
        here = [row for row in rows if row.config["pipeline_ranks"] == ranks]
        for contender in dict.fromkeys(row.contender for row in here):
            points = [(row.config["chunks_per_rank"], row.median) for row in here if row.contender == contender]
            axes.plot(*zip(*points), marker="o", linewidth=3 if contender.startswith(OURS) else 1, label=contender)
        axes.set(xlabel="chunks per rank", ylabel="step / simulated")
        axes.set_title(f"{ranks} pipeline ranks", fontsize="medium")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")


GROWTH = {
    "CPU time per action": ("CPU us per action", 1),
    "beyond simulated, per forward and backward": ("us beyond simulated", 1),
    "peak memory": ("peak MB of a rank", 1e-6),
    "validate all, per action": ("us to validate an action", 1),
}
"""The label and the factor of each metric's row of panels."""
AXES = {"N": "chunks_per_rank", "M": "micro_batches", "P": "pipeline_ranks", "W": "data_ranks"}


def growth(figure: Any) -> None:
    """A row of panels for every metric, a column of panels for every axis."""
    figure.set_size_inches(9, 8)
    rows = read("growth").rows
    panels = figure.subplots(len(GROWTH), len(AXES), sharey="row")
    for panel_row, (metric, (label, factor)) in zip(panels, GROWTH.items()):
        panel_row[0].set_ylabel(label, fontsize="small")
        shown = [row for row in rows if row.metric == metric and row.config["axis"] in AXES]
        panel_row[0].set_ylim(0, 1.1 * factor * max(row.median for row in shown))
        for axes, (axis, field) in zip(panel_row, AXES.items()):
            here = [row for row in shown if row.config["axis"] == axis]
            if not here:
                axes.set_axis_off()
                continue
            axes.plot([row.config[field] for row in here], [row.median * factor for row in here], marker="o")
            axes.set_xlabel(field.replace("_", " "), fontsize="small")
            axes.tick_params(labelsize="x-small")
            axes.grid(alpha=0.3)


PLOTS: dict[str, Callable[[Any], None]] = {
    "communication": communication,
    "memory": memory,
    "schedule": schedule,
    "growth": growth,
}
"""The function that draws the plot of each recorded run."""
