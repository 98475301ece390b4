"""Clusters of unlike networks for tests."""

from typing import Any

from hypothesis import strategies as st

from ds_lgamp.cost.assignment import Demand
from ds_lgamp.planner.islands import IslandCluster, parse_islands


def island(
    name: str, nodes: int | list[str] = 2, gpus: int = 2, rate: str = "1 Gbit/s", **fields: Any
) -> dict[str, Any]:
    """Returns an island of a cluster file."""
    fast = {"network": "ethernet", "bandwidth": "1 Gbit/s", "latency": "100 us"}
    return {"name": name, "nodes": nodes, "gpus_per_node": gpus, **fast, **fields}


def cluster(*islands: dict[str, Any], **fields: Any) -> IslandCluster:
    between = {"bandwidth": "100 Mbit/s", "latency": "5 ms"}
    return parse_islands({"islands": list(islands), "between": between, **fields})


TWO = cluster(island("east"), island("west"))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[IslandCluster, Demand]:
    """Draws a cluster, and a job that fills it."""
    tensor_ranks = draw(st.sampled_from([1, 2]))
    speeds = st.sampled_from([0.5, 1.0, 2.0])
    islands = [
        island(f"i{number}", draw(st.integers(1, 3)), 2 * draw(st.integers(1, 2)), speed=draw(speeds))
        for number in range(draw(st.integers(1, 3)))
    ]
    made = cluster(*islands)
    blocks = made.gpus // tensor_ranks
    pipeline_ranks = draw(st.sampled_from([ranks for ranks in range(1, blocks + 1) if blocks % ranks == 0]))
    sizes = st.lists(st.integers(0, 10**9), min_size=pipeline_ranks, max_size=pipeline_ranks).map(tuple)
    return made, Demand(pipeline_ranks, blocks // pipeline_ranks, tensor_ranks, draw(sizes), draw(sizes))
