"""What every link of a cluster with islands carries in a step, and how long the busiest ones take."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ds_lgamp.cost.assignment import Assignment, DataGroup, Demand, LinkKind
from ds_lgamp.planner.cluster import Link
from ds_lgamp.planner.islands import IslandCluster

Edge = tuple[int, int]
"""Two ranks: one sends to the other."""


class Load(NamedTuple):
    """Of one step."""

    bytes_sent: Mapping[LinkKind, int]
    """By all ranks."""
    seconds: Mapping[LinkKind, float]
    """For which the busiest link carries them. Both directions work at once."""


def load(cluster: IslandCluster, assignment: Assignment, demand: Demand) -> Load:
    """Returns what the links carry. ``assignment`` needs no numbers of its own yet.

    A collective runs on a ring, in the order of its ranks but with all members on a node in a row, as NCCL builds it
    and :class:`ds_lgamp.planner.network.Network` takes it. Every member sends to the next one, so each byte crosses a
    border once. The GPUs of a node share its network cards. Waits are not in the seconds: this is the time of the
    bytes.
    """
    sent: Counter[Edge] = Counter()
    for edge, size in _messages(assignment, demand):
        sent[edge] += size
    kinds: dict[LinkKind, int] = {"node": 0, "island": 0, "between": 0}
    for edge, size in sent.items():
        kinds[assignment.kind(edge)] += size
    busy = _busy(cluster, assignment, sent)
    return Load(kinds, {kind: max((busy[port] for port in busy if port[0] == kind), default=0.0) for kind in kinds})


GroupsOf = Callable[[int], Sequence[DataGroup]]
"""Returns groups of a pipeline rank."""


def group_seconds(cluster: IslandCluster, assignment: Assignment, groups_of: GroupsOf) -> list[float]:
    """Returns the seconds of the collectives in a step, by pipeline rank, while those of all of them share the
    links."""
    sent_by = [dict(_collectives(assignment, rank, groups_of)) for rank in range(assignment.pipeline_ranks)]
    busy = _busy(cluster, assignment, {edge: size for sent in sent_by for edge, size in sent.items()})
    return [
        max((busy[port] for edge in sent for port in _ports(cluster, assignment, edge)), default=0.0)
        for sent in sent_by
    ]


def _collectives(assignment: Assignment, pipeline_rank: int, groups_of: GroupsOf) -> Iterator[tuple[Edge, int]]:
    """Yields who sends how many bytes to whom in the groups of a pipeline rank."""
    for tensor_rank in range(assignment.tensor_ranks):
        for group in groups_of(pipeline_rank):
            for edge in _edges(ring(assignment, assignment.ranks_of(pipeline_rank, tensor_rank, group))):
                yield edge, round(group.size)


def hop_of(cluster: IslandCluster, assignment: Assignment, demand: Demand, source: int, target: int) -> Link:
    """Returns what joins two neighbouring pipeline ranks, for one pipeline while all of them send: the slowest of their
    links."""
    edges = {
        (assignment.rank(source, data_rank, tensor_rank), assignment.rank(target, data_rank, tensor_rank)): (
            demand.hop_share(data_rank)
        )
        for data_rank in range(assignment.data_ranks)
        for tensor_rank in range(assignment.tensor_ranks)
    }
    # A byte over every edge, or less of a smaller share, keeps a link busy for as long as a byte of one of them takes.
    busy = _busy(cluster, assignment, edges)
    return Link(1 / (max(busy.values()) or 1e-300), max(latency_of(cluster, assignment, edge) for edge in edges))


def latency_of(cluster: IslandCluster, assignment: Assignment, edge: Edge) -> float:
    """Returns the seconds until a message's first byte arrives."""
    if assignment.kind(edge) == "node":
        return 0.0 if cluster.inside is None else cluster.inside.latency
    source, target = (assignment.slots[rank].island for rank in edge)
    return cluster.link(source, target).latency


Port = tuple[LinkKind, object, str]
"""What carries the bytes of one direction: the link of a GPU inside its node, the cards of a node outside, the uplink
that the nodes of an island share."""


def _ports(cluster: IslandCluster, assignment: Assignment, edge: Edge) -> dict[Port, float]:
    """Returns the bytes per second of all that carries what goes from one rank to another."""
    kind, bandwidth = assignment.kind(edge), _bandwidth(cluster, assignment, edge)
    ports: dict[Port, float] = {}
    for rank, direction in zip(edge, ("out", "in")):
        slot = assignment.slots[rank]
        ports[kind, rank if kind == "node" else slot.node, direction] = bandwidth
        uplink = cluster.islands[slot.island].uplink
        if kind == "between" and uplink is not None:
            ports[kind, slot.island, direction] = uplink
    return ports


def _busy(cluster: IslandCluster, assignment: Assignment, sent: Mapping[Edge, float]) -> dict[Port, float]:
    """Returns the seconds for which each port carries what is ``sent``."""
    busy: dict[Port, float] = defaultdict(float)
    for edge, size in sent.items():
        for port, bandwidth in _ports(cluster, assignment, edge).items():
            busy[port] += size / bandwidth
    return busy


def _edges(ranks: list[int]) -> list[Edge]:
    """Returns the edges of a ring; none for a single rank."""
    return list(zip(ranks, [*ranks[1:], ranks[0]])) if len(ranks) > 1 else []


def _messages(assignment: Assignment, demand: Demand) -> Iterator[tuple[Edge, int]]:
    """Yields who sends how many bytes to whom."""
    for pipeline_rank in range(assignment.pipeline_ranks):
        yield from _collectives(assignment, pipeline_rank, demand.near_groups)
        yield from _collectives(assignment, pipeline_rank, demand.peer_groups)
    for tensor_rank in range(assignment.tensor_ranks):
        for data_rank in range(assignment.data_ranks):
            pipeline = assignment.pipeline(data_rank, tensor_rank)
            for edge, size in zip(_edges(pipeline), demand.hop_bytes):
                yield edge, round(size * demand.hop_share(data_rank))
                yield edge[::-1], round(size * demand.hop_share(data_rank))


def ring(assignment: Assignment, group: list[int]) -> list[int]:
    """Returns the ranks of a group in the order of its ring."""
    nodes: dict[str, int] = {}
    for rank in group:
        nodes.setdefault(assignment.slots[rank].node, len(nodes))
    return sorted(group, key=lambda rank: nodes[assignment.slots[rank].node])


def _bandwidth(cluster: IslandCluster, assignment: Assignment, edge: Edge) -> float:
    """Returns the bytes per second of the link of a GPU inside its node, and of all cards of a node outside."""
    kind, (source, target) = assignment.kind(edge), (assignment.slots[rank].island for rank in edge)
    if kind == "node":
        return float("inf") if cluster.inside is None else cluster.inside.bandwidth
    cards = cluster.islands[source].cards_per_node if kind == "island" else 1
    return cluster.link(source, target).bandwidth * cards
