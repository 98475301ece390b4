"""Chooses which GPU of a cluster with islands is which rank.

A few sensible orders are laid out and costed by :func:`ds_lgamp.planner.load.load`, and the cheapest is taken.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, permutations
from typing import NamedTuple

from ds_lgamp.cost.assignment import Assignment, Demand, Slot
from ds_lgamp.planner.islands import IslandCluster
from ds_lgamp.planner.load import load


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


MOST_ISLAND_ORDERS = 120
"""How many orders of the islands are tried: all of up to five islands."""

Place = tuple[int, int]
"""Pipeline rank and data-parallel rank."""


def assign(cluster: IslandCluster, demand: Demand, first: Slot | None = None) -> Assignment:
    """Returns the cheapest assignment, always the same one. Arguments and errors are those of :func:`ranked`."""
    return ranked(cluster, demand, first)[0]


def ranked(cluster: IslandCluster, demand: Demand, first: Slot | None = None) -> list[Assignment]:
    """Returns all assignments that are compared, the cheapest first.

    The cost is the time of compute, if it is known and divided by speed, and of all messages one after another. Of
    equally cheap ones, those whose pipeline ranks or data-parallel ranks have equal GPUs come first. Orders that keep
    the nodes of hierarchical shards in islands precede all others. Of these, the one that a plan has chosen comes
    first.

    Args:
        first: the place that must be rank 0; None leaves it open.

    Raises ValueError if the ranks do not fill the cluster, or if tensor-parallel ranks do not fit its nodes.
    """
    if demand.ranks != cluster.gpus:
        raise ValueError(
            f"{demand.pipeline_ranks} pipeline x {demand.data_ranks} data-parallel x {demand.tensor_ranks} "
            f"tensor-parallel ranks are {demand.ranks}, but {cluster.name} has {cluster.gpus} GPUs; let the islands' "
            "nodes and gpus_per_node be those of the job"
        )
    for island in cluster.islands:
        if island.gpus_per_node % demand.tensor_ranks:
            raise ValueError(
                f"{demand.tensor_ranks} tensor-parallel ranks share a node, but gpus_per_node of island "
                f"'{island.name}' is {island.gpus_per_node}; use a divisor of it"
            )
    layouts = _layouts(cluster, demand, first)
    return sorted((_costed(cluster, demand, *layout) for layout in layouts), key=partial(_cost, demand))


def _cost(demand: Demand, assignment: Assignment) -> tuple[bool, bool, float, float]:
    """Returns whether islands split a node of hierarchical shards, which no run takes; whether a plan has chosen
    another order; the seconds of compute and messages; and how much slower than the average GPU the ranks are."""
    is_another = demand.order not in ("", assignment.order)
    splits = demand.hierarchy is not None and any(
        assignment.kind(assignment.ranks_of(rank, 0, group)) == "between"
        for rank in range(demand.pipeline_ranks)
        for group in demand.near_groups(rank)
    )
    speeds = assignment.pipeline_speeds, assignment.data_speeds
    slowness = min(len(each) / sum(each) for each in speeds)
    return splits, is_another, demand.compute * slowness + sum(assignment.seconds.values()), slowness


def as_launched(cluster: IslandCluster, demand: Demand, slots: Sequence[Slot]) -> Assignment:
    """Returns the assignment that leaves every rank where the launcher put it, at ``slots``."""
    return _costed(cluster, demand, tuple(slots), "as the launcher numbers them")


def _layouts(cluster: IslandCluster, demand: Demand, first: Slot | None) -> Iterator[tuple[tuple[Slot, ...], str]]:
    """Yields places by rank, and a clause that describes them."""
    leading = [] if first is None else [first.island]
    others = [number for number in range(len(cluster.islands)) if number not in leading]
    orders = ((*leading, *rest) for rest in permutations(others))
    seen = set()
    for order in islice(orders, MOST_ISLAND_ORDERS):
        blocks = {island: _blocks(cluster, island, demand.tensor_ranks, first) for island in order}
        names = ", ".join(cluster.islands[island].name for island in order)
        for fill, clause in _FILLS:
            placed = _filled(fill, [blocks[island] for island in order], demand)
            if placed is not None:
                slots = tuple(slot for place in sorted(placed) for slot in placed[place])
                if slots not in seen:
                    seen.add(slots)
                    yield slots, f"{clause}, islands in the order {names}" if len(order) > 1 else clause


def _blocks(cluster: IslandCluster, island: int, tensor_ranks: int, first: Slot | None) -> list[tuple[Slot, ...]]:
    """Returns the GPUs of an island, as many together as there are tensor-parallel ranks. ``first`` comes first."""
    slots = [slot for slot in cluster.slots if slot.island == island]
    if first is not None and first.island == island:
        # Its node, and its GPU on the node, precede the others, which keep their order.
        slots.sort(key=lambda slot: slot.node != first.node)
        start = slots.index(first)
        own = slots[start - start % tensor_ranks : start - start % tensor_ranks + tensor_ranks]
        own.sort(key=lambda slot: slot != first)
        slots = own + [slot for slot in slots if slot not in own]
    return [tuple(slots[start : start + tensor_ranks]) for start in range(0, len(slots), tensor_ranks)]


_Fill = Callable[[list[int], int, int], list[Place] | None]
"""Takes the number of blocks of each island, P and W, and returns the place of every block; None if they do not fit."""


def _rows(counts: list[int], pipeline_ranks: int, data_ranks: int) -> list[Place] | None:
    return [divmod(block, data_ranks) for block in range(sum(counts))]


def _columns(counts: list[int], pipeline_ranks: int, data_ranks: int) -> list[Place] | None:
    return [divmod(block, pipeline_ranks)[::-1] for block in range(sum(counts))]


def _rows_by_columns(counts: list[int], pipeline_ranks: int, data_ranks: int) -> list[Place] | None:
    if any(count % data_ranks for count in counts):
        return None
    places: list[Place] = []
    for count in counts:
        rows, start = count // data_ranks, len(places) // data_ranks
        places += [(start + block % rows, block // rows) for block in range(count)]
    return places


def _columns_by_rows(counts: list[int], pipeline_ranks: int, data_ranks: int) -> list[Place] | None:
    if any(count % pipeline_ranks for count in counts):
        return None
    places: list[Place] = []
    for count in counts:
        columns, start = count // pipeline_ranks, len(places) // pipeline_ranks
        places += [(block // columns, start + block % columns) for block in range(count)]
    return places


_FILLS: tuple[tuple[_Fill, str], ...] = (
    (_rows, "data-parallel groups stay together on nodes and in islands, pipelines run from one to the next"),
    (_rows_by_columns, "data-parallel groups stay together in islands, pipelines on nodes"),
    (_columns, "pipelines stay together on nodes and in islands, data-parallel groups run from one to the next"),
    (_columns_by_rows, "pipelines stay together in islands, data-parallel groups on nodes"),
)


def _filled(fill: _Fill, blocks: list[list[tuple[Slot, ...]]], demand: Demand) -> dict[Place, tuple[Slot, ...]] | None:
    places = fill([len(each) for each in blocks], demand.pipeline_ranks, demand.data_ranks)
    return None if places is None else dict(zip(places, (block for each in blocks for block in each)))


def _costed(cluster: IslandCluster, demand: Demand, slots: tuple[Slot, ...], order: str) -> Assignment:
    laid_out = Assignment(
        demand.pipeline_ranks,
        demand.data_ranks,
        demand.tensor_ranks,
        slots,
        tuple(cluster.islands[slot.island].speed for slot in slots),
        inside=tuple(island.transport for island in cluster.islands),
        outside=tuple(map(cluster.outside, range(len(cluster.islands)))),
        order=order,
        bytes_sent={},
        seconds={},
    )
    return replace(laid_out, **load(cluster, laid_out, demand)._asdict())
