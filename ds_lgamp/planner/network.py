"""How long messages and collectives take, from the links of a cluster."""

from dataclasses import dataclass
from math import ceil, gcd, log2

from ds_lgamp.planner.cluster import Cluster, Link
from ds_lgamp.planner.efficiency import Efficiency


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other. Every node holds as many of them."""

    inside: int
    """Members on one node."""
    nodes: int

    @property
    def size(self) -> int:
        return self.inside * self.nodes


@dataclass(frozen=True)
class Network:
    """The links of a GPU, at the rates that are reached.

    Collectives run on rings that visit all members of a node before the next node, as NCCL builds them: each byte
    crosses the border of a node once. A ring is as fast as its slowest link. The members of a group on one node use
    their shares of the network cards together.
    """

    inside: Link
    between: Link
    """One GPU's share of its node's network cards, while all GPUs of the node send."""
    gpus: int
    """GPUs of a node that are in use."""
    crowding: float
    """See ``Efficiency.crowding``."""

    def bandwidth(self, group: Group) -> float:
        """Returns the bytes per second in one direction through a ring over ``group``."""
        between = group.inside * self.between.bandwidth if group.nodes > 1 else float("inf")
        if group.inside == 1 and group.nodes > 1:
            # It uses no link inside a node.
            return between
        return min(between, self.inside.bandwidth * (group.inside / self.gpus) ** self.crowding)

    def all_gather(self, group: Group, size: float) -> float:
        """Returns the seconds until every member has all of ``size`` bytes, of which each held an equal part. Each
        member sends (n-1)/n of the bytes in n-1 rounds."""
        if group.size == 1:
            return 0.0
        rounds = (group.inside - 1) * group.nodes * self.inside.latency + (group.nodes - 1) * self.between.latency
        return rounds + size * (group.size - 1) / group.size / self.bandwidth(group)

    def reduce_scatter(self, group: Group, size: float) -> float:
        """Returns the seconds until every member has its part of the sum of ``size`` bytes. Moves what a gather
        moves."""
        return self.all_gather(group, size)

    def all_reduce(self, group: Group, size: float) -> float:
        """Returns the seconds until every member has the sum of ``size`` bytes: a reduce-scatter and a gather. Small
        sums go up and down a tree."""
        if group.size == 1:
            return 0.0
        ring = 2 * self.all_gather(group, size)
        depth = ceil(log2(group.inside)) * self.inside.latency + ceil(log2(group.nodes)) * self.between.latency
        return min(ring, 2 * (depth + size / self.bandwidth(group)))

    def message(self, crosses_nodes: bool, size: float) -> float:
        """Returns the seconds of a message of ``size`` bytes, while every GPU of the node sends one."""
        link = self.between if crosses_nodes else self.inside
        return link.latency + size / link.bandwidth


def network_of(cluster: Cluster, gpus: int, efficiency: Efficiency) -> Network:
    """Returns the network of a cluster, of which ``gpus`` GPUs are in use, at the rates that are reached."""
    used = min(gpus, cluster.gpus_per_node)
    share = min(1.0, cluster.cards_per_node / used)
    return Network(
        Link(cluster.inside.bandwidth * efficiency.inside, cluster.inside.latency),
        Link(cluster.between.bandwidth * share * efficiency.between, cluster.between.latency),
        used,
        efficiency.crowding,
    )


def group_of(cluster: Cluster, gpus: int, size: int, stride: int) -> Group:
    """Returns the group of ``size`` ranks that are ``stride`` ranks apart, in a job of so many ``gpus``.

    Neighbouring ranks share a node while it has GPUs left. If groups and nodes do not divide each other, some group has
    few members on one of its nodes, and shares that node's cards with the next group. It counts as if all of its nodes
    had as few.
    """
    per_node = cluster.gpus_per_node
    inside = size if gpus <= per_node else 1 if per_node % stride else gcd(size, per_node // stride)
    return Group(inside, size // inside)
