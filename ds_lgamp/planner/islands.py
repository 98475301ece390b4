"""A cluster with different networks: islands of nodes that a fast network joins, and the links between islands.

Reads the file of such a cluster, and writes that of nodes whose networks and rates were measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple

from ds_lgamp.cost.assignment import Slot, Transport
from ds_lgamp.fields import (
    count,
    optional_quantity,
    positive,
    read_json,
    refuse_unknown,
    section,
    with_unit,
    word,
)
from ds_lgamp.planner.cluster import Link, link

NETWORKS = ("infiniband", "roce", "ethernet")
_OF_CLUSTER = ("name", "islands", "between", "inside", "pairs", "peak", "memory", "memory_bandwidth")
_OF_ISLAND = (
    *("name", "nodes", "gpus_per_node", "speed", "network", "bandwidth", "latency", "cards_per_node"),
    *("uplink", "interface", "outside_interface", "nccl_network", "environment"),
)
_OF_BETWEEN = ("network", "bandwidth", "latency", "interface", "nccl_network")
_VARIABLES = ("NCCL_", "GLOO_", "UCX_")
"""Prefixes of the variables that an island may set."""


@dataclass(frozen=True)
class Island:
    """Equal nodes that one fast network joins."""

    name: str
    nodes: tuple[str, ...]
    """Host names; names such as ``east-0`` if the file gives a number of nodes."""
    gpus_per_node: int
    network: str
    """infiniband, roce or ethernet."""
    link: Link
    """Between its nodes; the bandwidth is that of one network card."""
    cards_per_node: int = 1
    """Network cards of a node, which its GPUs share."""
    interface: str | None = None
    """The nodes' network interface to each other."""
    outside_interface: str | None = None
    """The nodes' network interface to other islands, if it is another one than ``between.interface``."""
    nccl_network: str | None = None
    """NCCL's name of the network inside the island."""
    uplink: float | None = None
    """Bytes per second in each direction that all its nodes together have to other islands; None if each of them has
    what ``between`` or ``pairs`` says for itself."""
    speed: float = 1.0
    """Of a GPU, relative to those of other islands."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that ``ds_lgamp run`` sets on the island's nodes."""

    @property
    def gpus(self) -> int:
        return len(self.nodes) * self.gpus_per_node

    @property
    def transport(self) -> Transport:
        """How its nodes reach each other."""
        return Transport(self.network, self.interface, self.nccl_network)


@dataclass(frozen=True)
class IslandCluster:
    """What joins the islands. Rates are those that are reached."""

    name: str
    islands: tuple[Island, ...]
    between: Link
    """Between nodes of two islands; the bandwidth is all that a node has there, for all its GPUs."""
    transport: Transport
    """How islands reach each other. Its interface is that of nodes that name no other."""
    numbered: bool = False
    """Whether the file gives numbers of nodes. Nodes then take places in the launcher's order."""
    pairs: Mapping[frozenset[int], Link] = field(default_factory=dict)
    """Links between two islands that differ from ``between``, by the islands' numbers."""
    inside: Link | None = None
    """Between GPUs of a node; None takes them to be so fast that they do not count."""
    peak: float | None = None
    """FLOP/s that a GPU of speed 1 reaches."""
    memory: float | None = None
    """Bytes of a GPU. Only plans need it, like the next one."""
    memory_bandwidth: float | None = None
    """Bytes per second that a GPU of speed 1 reaches between itself and its memory."""

    @property
    def gpus(self) -> int:
        return sum(island.gpus for island in self.islands)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Every place for a rank, in the order of the file."""
        return tuple(
            Slot(number, node, gpu)
            for number, island in enumerate(self.islands)
            for node in island.nodes
            for gpu in range(island.gpus_per_node)
        )

    @property
    def nodes(self) -> dict[str, int]:
        """The number of every node's island, in the order of the file."""
        return {node: number for number, island in enumerate(self.islands) for node in island.nodes}

    def link(self, first: int, second: int) -> Link:
        """Returns what joins two islands, or the nodes of one."""
        if first == second:
            return self.islands[first].link
        return self.pairs.get(frozenset((first, second)), self.between)

    def outside(self, island: int) -> Transport:
        """Returns how nodes of ``island`` reach other islands."""
        own = self.islands[island].outside_interface
        return self.transport if own is None else self.transport._replace(interface=own)


def parse_islands(text: Mapping[str, Any]) -> IslandCluster:
    """Reads a cluster file with islands. Raises ValueError that names the field."""
    refuse_unknown("", text, _OF_CLUSTER)
    listed = text.get("islands")
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise ValueError(f"islands is {listed!r}; write a list of objects with {', '.join(sorted(_OF_ISLAND))}")
    islands = tuple(_island(f"islands[{number}]", island) for number, island in enumerate(listed))
    numbered = {isinstance(island["nodes"], int) for island in listed}
    if len(numbered) > 1:
        raise ValueError("islands[].nodes are numbers and lists of names; use one of them in the whole file")
    _refuse_twice("islands[].name", [island.name for island in islands])
    _refuse_twice("islands[].nodes", [node for island in islands for node in island.nodes])
    between = section(text, "between", _OF_BETWEEN)
    return IslandCluster(
        name=word("name", text.get("name", "cluster")),
        islands=islands,
        between=link("between", between),
        transport=Transport(
            _network("between.network", between.get("network", "ethernet")),
            _optional_word("between.interface", between.get("interface")),
            _optional_word("between.nccl_network", between.get("nccl_network")),
        ),
        numbered=numbered.pop(),
        pairs=_pairs(text.get("pairs", []), [island.name for island in islands]),
        inside=link("inside", section(text, "inside", ("bandwidth", "latency"))) if "inside" in text else None,
        peak=optional_quantity("peak", text.get("peak"), "flops per second"),
        memory=optional_quantity("memory", text.get("memory"), "bytes"),
        memory_bandwidth=optional_quantity("memory_bandwidth", text.get("memory_bandwidth"), "bytes per second"),
    )


def _island(name: str, text: object) -> Island:
    if not isinstance(text, Mapping):
        raise ValueError(f"{name} is {text!r}; write an object with {', '.join(sorted(_OF_ISLAND))}")
    refuse_unknown(f"{name}.", text, _OF_ISLAND)
    own = word(f"{name}.name", text.get("name"))
    return Island(
        name=own,
        nodes=_nodes(f"{name}.nodes", text.get("nodes"), own),
        gpus_per_node=count(f"{name}.gpus_per_node", text.get("gpus_per_node")),
        network=_network(f"{name}.network", text.get("network")),
        link=link(name, text),
        cards_per_node=count(f"{name}.cards_per_node", text.get("cards_per_node", 1)),
        uplink=optional_quantity(f"{name}.uplink", text.get("uplink"), "bytes per second"),
        interface=_optional_word(f"{name}.interface", text.get("interface")),
        outside_interface=_optional_word(f"{name}.outside_interface", text.get("outside_interface")),
        nccl_network=_optional_word(f"{name}.nccl_network", text.get("nccl_network")),
        speed=positive(f"{name}.speed", text.get("speed", 1.0)),
        environment=_environment(f"{name}.environment", text.get("environment", {})),
    )


def _nodes(field_name: str, value: object, island: str) -> tuple[str, ...]:
    if isinstance(value, list) and value:
        return tuple(word(f"{field_name}[{number}]", node) for number, node in enumerate(value))
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return tuple(f"{island}-{number}" for number in range(value))
    raise ValueError(f"{field_name} is {value!r}; write a list of host names, or their number")


def _network(field_name: str, value: object) -> str:
    if value not in NETWORKS:
        raise ValueError(f"{field_name} is {value!r}; use one of {', '.join(NETWORKS)}")
    return str(value)


def _optional_word(field_name: str, value: object) -> str | None:
    return None if value is None else word(field_name, value)


def _environment(field_name: str, value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{field_name} is {value!r}; write an object with variables of NCCL, gloo or UCX")
    for name, text in value.items():
        if not name.startswith(_VARIABLES):
            raise ValueError(f"{field_name}.{name} is unknown; use names that begin with {', '.join(_VARIABLES)}")
        if not isinstance(text, str):
            raise ValueError(f"{field_name}.{name} is {text!r}; write a text in quotes")
    return dict(value)


def _pairs(listed: object, names: Sequence[str]) -> dict[frozenset[int], Link]:
    known = ("islands", "bandwidth", "latency")
    if not isinstance(listed, list):
        raise ValueError(f"pairs is {listed!r}; write a list of objects with {', '.join(sorted(known))}")
    allowed = {frozenset((first, second)) for first, second in combinations(names, 2)}
    found: dict[frozenset[int], Link] = {}
    for number, text in enumerate(listed):
        name = f"pairs[{number}]"
        if not isinstance(text, Mapping):
            raise ValueError(f"{name} is {text!r}; write an object with {', '.join(sorted(known))}")
        refuse_unknown(f"{name}.", text, known)
        two = text.get("islands")
        if not isinstance(two, list) or not all(isinstance(one, str) for one in two) or frozenset(two) not in allowed:
            raise ValueError(f"{name}.islands is {two!r}; name two of {', '.join(names)}")
        pair = frozenset(map(names.index, two))
        if pair in found:
            raise ValueError(f"{name}.islands is {two!r}, which an earlier pair names; remove one")
        found[pair] = link(name, text)
    return found


def _refuse_twice(field_name: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{field_name} has {name!r} twice; every name stands once")


def read_islands(source: str) -> IslandCluster:
    """Reads the JSON file ``source`` as :func:`parse_islands` does. Raises ValueError if there is none, or if a field
    is wrong, which it names."""
    return parse_islands(read_json(source))


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
    for pair, joining in links.items():
        crossing.setdefault(frozenset(number[node] for node in pair), []).append(joining)
    outside = {pair: _middle(several) for pair, several in crossing.items() if len(pair) == 2}
    # A single island has no network to others, so its own takes that place.
    between = _middle(list(outside.values()) or list(links.values()) or [inside or Link(1e9, 1e-4)])
    slowest = min((node.flops for node in nodes if node.flops is not None), default=None)
    interfaces = [nodes[members[0]].interface for members in islands]
    common = interfaces[0] if len(set(interfaces)) == 1 else None
    text: dict[str, Any] = {
        "name": "detected",
        "islands": [
            _island_text(f"island{island}", [nodes[node] for node in members], slowest)
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


def _island_text(name: str, nodes: Sequence[Node], slowest: float | None) -> dict[str, Any]:
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
