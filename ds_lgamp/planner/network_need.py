"""What network a configuration needs: its step over the bandwidth between nodes."""

from collections.abc import Sequence
from dataclasses import replace

from ds_lgamp.planner.cluster import Cluster
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.exact import exact_seconds, is_layered
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.predict import predict

SLOWEST, FASTEST = 1e5, 1e13
"""Bytes per second of a network card between which the needed bandwidth is looked for."""
MOST_COMPUTES = 50_000
"""The most forwards and backwards to run on the clock, half a second for each bandwidth."""


def with_bandwidth(cluster: Cluster, bandwidth: float) -> Cluster:
    """Returns the cluster with ``bandwidth``, in bytes per second, for each network card between nodes."""
    return replace(cluster, between=replace(cluster.between, bandwidth=bandwidth))


def seconds_over_bandwidth(
    model: Model, cluster: Cluster, configuration: Configuration, bandwidths: Sequence[float]
) -> list[float]:
    """Returns the seconds of a step for each bandwidth of the network cards between nodes, in bytes per second: of a
    layered step by the clock, as plans have them, or by the formula if it is long."""
    on_clock = is_layered(configuration) and configuration.computes <= MOST_COMPUTES

    def seconds(bandwidth: float) -> float:
        changed = with_bandwidth(cluster, bandwidth)
        if on_clock:
            return exact_seconds(model, changed, configuration)
        return predict(model, changed, configuration).seconds

    return [seconds(bandwidth) for bandwidth in bandwidths]


def bandwidth_needed(model: Model, cluster: Cluster, configuration: Configuration, loss: float = 0.05) -> float | None:
    """Returns the bandwidth of a network card between nodes, in bytes per second, at which a step takes ``loss`` longer
    than with an unlimited one. None if it takes less than that even at 100 kB/s, as within one node."""
    (ideal,) = seconds_over_bandwidth(model, cluster, configuration, [FASTEST])
    slow, fast = SLOWEST, FASTEST

    def loses(bandwidth: float) -> bool:
        return seconds_over_bandwidth(model, cluster, configuration, [bandwidth])[0] > ideal * (1 + loss)

    if not loses(slow):
        return None
    while fast / slow > 1.01:
        middle = (slow * fast) ** 0.5
        slow, fast = (middle, fast) if loses(middle) else (slow, middle)
    return fast
