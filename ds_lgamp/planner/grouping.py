"""Writes the cluster file of nodes whose networks and rates were measured."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from ds_lgamp.planner.cluster import Link
from ds_lgamp.planner.quantity import with_unit

FAST_SHARE = 0.5
"""Two nodes are joined by a fast network if they reach this share of the best rate that either has to any node."""
ALIKE = 1.25
"""Up to this ratio, speeds of GPUs and rates of links count as equal: measurements scatter."""
NCCL_OF_RDMA = "IB"
"""NCCL's name for both InfiniBand and RoCE."""

Rates = Mapping[frozenset[int], Link]
"""The link between every two nodes, by their numbers."""


class Node(NamedTuple):
    """What was found on a node."""

    name: str
    gpus: int
    network: str
    """infiniband, roce or ethernet."""
    flops: float | None
    """FLOP/s that a GPU reaches; None if it was not measured."""
    interface: str | None
    """Through which it reaches the others by sockets; None if unknown."""


def islands_of(nodes: Sequence[Node], links: Rates) -> list[list[int]]:
    """Returns the numbers of the nodes of every island, in ascending order.

    Nodes are in one island if they have the same kind of network, as many GPUs of about the same speed, and a fast
    network joins them, directly or by way of others.
    """
    best = [
        max((link.bandwidth for pair, link in links.items() if node in pair), default=0.0) for node in range(len(nodes))
    ]

    def together(first: int, second: int) -> bool:
        one, other = nodes[first], nodes[second]
        alike = (one.network, one.gpus) == (other.network, other.gpus)
        rate = links[frozenset((first, second))].bandwidth
        return alike and _close(one.flops, other.flops) and rate >= FAST_SHARE * max(best[first], best[second])

    islands: list[list[int]] = []
    for node in range(len(nodes)):
        joined = [island for island in islands if any(together(node, member) for member in island)]
        islands = [island for island in islands if island not in joined]
        islands.append(sorted([node, *(member for island in joined for member in island)]))
    return sorted(islands)


def cluster_text(nodes: Sequence[Node], links: Rates, inside: Link | None) -> dict[str, Any]:
    """Returns the cluster file, as :func:`ds_lgamp.planner.islands.parse_islands` reads it.

    Args:
        inside: between GPUs of a node; None if nodes have one.
    """
    islands = islands_of(nodes, links)
    number = {node: island for island, members in enumerate(islands) for node in members}
    crossing: dict[frozenset[int], list[Link]] = {}
    for pair, link in links.items():
        crossing.setdefault(frozenset(number[node] for node in pair), []).append(link)
    outside = {pair: _middle(several) for pair, several in crossing.items() if len(pair) == 2}
    # A single island has no network to others, so its own takes that place.
    between = _middle(list(outside.values()) or list(links.values()) or [inside or Link(1e9, 1e-4)])
    slowest = min((node.flops for node in nodes if node.flops is not None), default=None)
    interfaces = [nodes[members[0]].interface for members in islands]
    common = interfaces[0] if len(set(interfaces)) == 1 else None
    text: dict[str, Any] = {
        "name": "detected",
        "islands": [
            _island(f"island{island}", [nodes[node] for node in members], slowest)
            | _link(_middle(crossing.get(frozenset((island,)), [between])))
            | ({} if common or interfaces[island] is None else {"outside_interface": interfaces[island]})
            for island, members in enumerate(islands)
        ],
        "between": {"network": "ethernet", **_link(between), **({"interface": common} if common else {})},
    }
    if slowest is not None:
        text["peak"] = with_unit(slowest, "FLOP/s")
    uneven = {pair: link for pair, link in outside.items() if not _close(link.bandwidth, between.bandwidth)}
    if uneven:
        text["pairs"] = [
            {"islands": [f"island{island}" for island in sorted(pair)], **_link(link)} for pair, link in uneven.items()
        ]
    if inside is not None:
        text["inside"] = _link(inside)
    if len({node.network for node in nodes}) > 1 or nodes[0].network != "ethernet":
        text["between"]["nccl_network"] = "Socket"
    return text


def _island(name: str, nodes: Sequence[Node], slowest: float | None) -> dict[str, Any]:
    known = [node.flops for node in nodes if node.flops is not None]
    speed = min(known) / slowest if known and slowest is not None else 1.0
    return {
        "name": name,
        "nodes": [node.name for node in nodes],
        "gpus_per_node": nodes[0].gpus,
        "speed": 1.0 if speed <= ALIKE else round(speed, 2),
        "network": nodes[0].network,
        **({} if nodes[0].network == "ethernet" else {"nccl_network": NCCL_OF_RDMA}),
    }


def _link(link: Link) -> dict[str, str]:
    return {"bandwidth": with_unit(link.bandwidth * 8, "bit/s"), "latency": with_unit(link.latency, "s")}


def _middle(links: Sequence[Link]) -> Link:
    return Link(median(link.bandwidth for link in links), median(link.latency for link in links))


def _close(first: float | None, second: float | None) -> bool:
    """Whether two rates differ by no more than measurements of equal rates do. Rates that were not measured count as
    equal."""
    return first is None or second is None or max(first, second) <= ALIKE * min(first, second)
