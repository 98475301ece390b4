"""Finds the processes of a job in a cluster file."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ds_lgamp.cost.assignment import Slot
from ds_lgamp.planner.islands import IslandCluster


class Presence(NamedTuple):
    """What a process says of itself."""

    node: str
    """The name of its host, or another one that it was given."""
    number: int | None
    """The launcher's number of its node."""
    gpu: int
    """Its number on the node."""
    interfaces: tuple[str, ...]
    """The network interfaces that it sees."""


def places_of(cluster: IslandCluster, present: Sequence[Presence]) -> list[Slot]:
    """Returns the place of every process.

    A node is found by its name, with or without its domain. If the file gives numbers of nodes, one whose name is not
    in it takes the place that the launcher's number has in the file.

    Raises ValueError that names every node that the file or the job lacks, and every interface that a node lacks.
    """
    nodes = cluster.nodes
    names = list(nodes)
    short = {name.partition(".")[0]: name for name in names}

    def name_of(process: Presence) -> str | None:
        for known in (process.node, short.get(process.node.partition(".")[0])):
            if known in nodes:
                return known
        if cluster.numbered and process.number is not None and process.number < len(names):
            return names[process.number]
        return None

    found = [name_of(process) for process in present]
    strangers = sorted({process.node for process, name in zip(present, found) if name is None})
    if strangers:
        raise ValueError(
            f"{cluster.name} has no {_nodes(strangers)}; it has {', '.join(names)}: add what is missing to "
            "islands[].nodes, or name this node with DS_LGAMP_NODE"
        )
    places = [Slot(nodes[name], name, process.gpu) for process, name in zip(present, found) if name is not None]
    _refuse_other_numbers(cluster, places)
    _refuse_missing_interfaces(cluster, places, present)
    return places


def _refuse_other_numbers(cluster: IslandCluster, places: Sequence[Slot]) -> None:
    missing = [node for node in cluster.nodes if node not in {place.node for place in places}]
    if missing:
        raise ValueError(
            f"the job has no process on {_nodes(missing)} of {cluster.name}; start {'them' if missing[1:] else 'it'}, "
            "or take the name out of islands[].nodes"
        )
    counts = Counter(place.node for place in places)
    for node, island in cluster.nodes.items():
        wanted = cluster.islands[island].gpus_per_node
        if counts[node] != wanted:
            raise ValueError(
                f"node {node} has {counts[node]} processes, but gpus_per_node of its island "
                f"'{cluster.islands[island].name}' is {wanted}; make them equal"
            )
    if len(set(places)) < len(places) or not set(places) <= set(cluster.slots):
        raise ValueError(
            "processes of one node have the same LOCAL_RANK, or too high ones; DS_LGAMP_NODE tells nodes apart"
        )


def _refuse_missing_interfaces(cluster: IslandCluster, places: Sequence[Slot], present: Sequence[Presence]) -> None:
    for place, process in zip(places, present):
        for transport in (cluster.islands[place.island].transport, cluster.outside(place.island)):
            if transport.interface is not None and transport.interface not in process.interfaces:
                raise ValueError(
                    f"node {place.node} has no network interface {transport.interface}, which {cluster.name} gives "
                    f"island '{cluster.islands[place.island].name}'; it has {', '.join(process.interfaces)}"
                )


def _nodes(names: Sequence[str]) -> str:
    return f"{'nodes' if len(names) > 1 else 'node'} {', '.join(names)}"
