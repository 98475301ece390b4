"""Draws the step of plans over the bandwidth between nodes, as SVG."""

from collections.abc import Sequence
from pathlib import Path

from ds_lgamp.planner.cluster import Cluster
from ds_lgamp.planner.configuration import describe
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.predict import seconds_over_bandwidth
from ds_lgamp.planner.search import Plan, best_by_method

POINTS, DECADES = 60, 2.0
"""How many bandwidths are drawn, and how many powers of ten they reach below and above the cluster's own."""


def plot(model: Model, cluster: Cluster, plans: Sequence[Plan], path: Path) -> None:
    """Draws one line for the best plan of each method into ``path``.

    Raises ValueError if matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib; install ds_lgamp[plot], or leave --plot out") from None
    own = cluster.between.bandwidth
    bandwidths = [own * 10 ** (DECADES * (2 * point / (POINTS - 1) - 1)) for point in range(POINTS)]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for plan in best_by_method(plans).values():
        seconds = seconds_over_bandwidth(model, cluster, plan.configuration, bandwidths)
        axes.plot([bandwidth * 8 / 1e9 for bandwidth in bandwidths], seconds, label=describe(plan.configuration))
    axes.axvline(own * 8 / 1e9, color="grey", linestyle=":", label=f"{cluster.name}")
    axes.set(
        xscale="log", yscale="log", xlabel="Gbit/s of a network card", ylabel="seconds of a step", title=model.name
    )
    axes.legend(fontsize="small")
    try:
        figure.savefig(path, format="svg")
    except OSError as error:
        raise ValueError(f"--plot is '{path}', which cannot be written ({error.strerror}); name another file") from None
