"""What a step sends, what every link of a cluster with islands carries of it, and how long the busiest ones take."""

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ds_lgamp.config import LgampConfig, read_block
from ds_lgamp.cost.activations import ActivationBytes
from ds_lgamp.cost.assignment import Assignment, DataGroup, Demand, LinkKind
from ds_lgamp.cost.traffic import bus_bytes, bytes_between_nodes, collective_bytes, hop_bytes
from ds_lgamp.planner.cluster import Link
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.islands import IslandCluster
from ds_lgamp.planner.memory import (
    as_executed,
    chunk_bytes_of,
    default_software,
    element_bytes,
    sharding_of,
    units_of,
)
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.models import Flags, model_of_flags
from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.orders import SINGLE_CHUNK_SCHEDULES
from ds_lgamp.schedule.program import build_rank_program
from ds_lgamp.schedule.spec import Hierarchy

USUAL_VOCABULARY = 50257
"""Words of a Megatron-LM job whose tokenizer, not a flag, says how many there are: those of GPT-2."""


_OTHER_ORDER = "--use-tp-pp-dp-mapping"
"""Makes pipeline neighbours of ranks that are data-parallel neighbours without it."""


def demand_of(model: Model, configuration: Configuration, splits_sequence: bool = True) -> Demand:
    """Returns what the step sends. Raises ValueError if there are fewer layers than chunks.

    Args:
        splits_sequence: whether tensor-parallel ranks use sequence parallelism, so that each sends a part of a result.
    """
    executed = as_executed(model, configuration)
    executed.layers_of_chunks(model)
    software = replace(default_software(executed), splits_sequence=splits_sequence)
    ranks, hierarchy = range(executed.pipeline_ranks), executed.hierarchy
    activations = ActivationBytes(0, 0, chunk_bytes_of(model, executed, software))
    programs = [build_rank_program(executed.spec, rank) for rank in ranks]
    units, size = [units_of(model, executed, rank) for rank in ranks], element_bytes(executed, software)
    sharding = sharding_of(executed)
    return Demand(
        executed.pipeline_ranks,
        executed.data_ranks,
        executed.tensor_ranks,
        data_bytes=tuple(
            sum(collective_bytes(program, unit, sharding, size) for unit in own)
            for program, own in zip(programs, units)
        ),
        hop_bytes=tuple(hop_bytes(rank, executed.placement, executed.micro_batches, activations) for rank in ranks),
        hierarchy=hierarchy,
        peer_bytes=()
        if hierarchy is None
        else tuple(
            sum(bytes_between_nodes(program, unit, sharding, size) for unit in own)
            for program, own in zip(programs, units)
        ),
    )


class Sent(NamedTuple):
    """Bytes that a rank sends in a step by network, and between its device and its host."""

    gathers: int
    """Of weights that train, and of updates."""
    frozen_gathers: int
    reductions: int
    messages: int
    """Results to other pipeline ranks. Gradients of as many bytes come back."""
    loaded: int
    stored: int


def sent(model: Model, configuration: Configuration) -> Sent:
    """Returns what the pipeline rank sends that sends most by network. The engine counts the same."""
    executed = as_executed(model, configuration)
    software, sharding = default_software(executed), sharding_of(executed)
    size, chunks = element_bytes(executed, software), chunk_bytes_of(model, executed, software)
    messages = partial(hop_bytes, placement=executed.placement, micro_batches=executed.micro_batches)
    found = []
    for rank in range(executed.pipeline_ranks):
        program, units = build_rank_program(executed.spec, rank), units_of(model, executed, rank)
        unreduced = [action for action in program if action.kind is not Kind.REDUCE]
        frozen, both, gathers = (
            sum(collective_bytes(actions, unit, sharding, size) for unit in units if unit.frozen == is_frozen)
            for actions, is_frozen in ((program, True), (program, False), (unreduced, False))
        )
        bus = bus_bytes(program, units, executed.spec.offload, sharding, size)
        hop = messages(rank, activations=ActivationBytes(0, 0, chunks))
        found.append(Sent(gathers, frozen, both - gathers, hop, bus.loaded, bus.stored))
    return max(found, key=lambda each: (sum(each[:4]), each))


def demand_of_facts(facts: Mapping[str, Any]) -> Demand:
    """Returns what the step sends of which ``ds_lgamp run --explain --json`` prints ``facts``. Messages of unknown size
    count as none."""
    ranks = facts["ranks"]
    hierarchy = None if facts["hierarchy"] is None else Hierarchy(**facts["hierarchy"])
    return Demand(
        facts["pipeline_ranks"],
        facts["data_ranks"],
        facts["tensor_ranks"],
        tuple(rank["collective_bytes_sent"] for rank in ranks),
        tuple(rank["hop_bytes"] or 0 for rank in ranks),
        hierarchy=hierarchy,
        peer_bytes=() if hierarchy is None else tuple(rank["bytes_between_nodes"] for rank in ranks),
        micro_batch_shares=tuple(facts["micro_batch_shares"]),
        order=facts.get("order", ""),
    )


def facts_of(demand: Demand) -> dict[str, Any]:
    """Returns as much of what ``--explain --json`` prints as :func:`demand_of_facts` reads, and the order of ranks."""
    peer_bytes = demand.peer_bytes or (0,) * demand.pipeline_ranks
    return {
        "pipeline_ranks": demand.pipeline_ranks,
        "data_ranks": demand.data_ranks,
        "tensor_ranks": demand.tensor_ranks,
        "hierarchy": None if demand.hierarchy is None else demand.hierarchy._asdict(),
        "micro_batch_shares": list(demand.micro_batch_shares),
        "order": demand.order,
        "ranks": [
            {"collective_bytes_sent": data, "hop_bytes": hop, "bytes_between_nodes": peers}
            for data, hop, peers in zip(demand.data_bytes, demand.hop_bytes, peer_bytes, strict=True)
        ],
    }


def megatron_demand(arguments: Sequence[str], config: Mapping[str, Any], ranks: int) -> Demand:
    """Returns what a step of a Megatron-LM script sends.

    Args:
        arguments: its flags. Context-parallel ranks count as data-parallel ones, as for Megatron-core's gradients.
        config: what the configuration file holds.
        ranks: of the job.

    Raises ValueError if a flag is missing, unknown to the planner, or does not fit ``ranks``, or if the block is wrong.
    """
    text = shlex.join(arguments)
    flags = Flags(text)
    if flags.has(_OTHER_ORDER):
        raise ValueError(
            f"{_OTHER_ORDER} is given, but a cluster file lays ranks out with pipeline ranks furthest apart; remove it"
        )
    if not flags.has("--vocab-size"):
        text += f" --vocab-size {USUAL_VOCABULARY}"
    model = model_of_flags("flags", text)
    pipeline_ranks = flags.count("--pipeline-model-parallel-size", 1)
    tensor_ranks = flags.count("--tensor-model-parallel-size", 1)
    context_ranks = flags.count("--context-parallel-size", 1)
    data_ranks, rest = divmod(ranks, pipeline_ranks * tensor_ranks)
    if rest or data_ranks % context_ranks:
        raise ValueError(
            f"--pipeline-model-parallel-size {pipeline_ranks}, --tensor-model-parallel-size {tensor_ranks} and "
            f"--context-parallel-size {context_ranks} do not divide {ranks} ranks; change one of them"
        )
    if (expert_ranks := flags.count("--expert-model-parallel-size", 1)) > 1:
        raise ValueError(
            f"--expert-model-parallel-size is {expert_ranks}, whose all-to-alls a cluster file does not lay out; "
            "remove the flag or the file"
        )
    micro_batch = flags.count("--micro-batch-size", 1)
    samples = micro_batch * (data_ranks // context_ranks)
    block = read_block(dict(config)) or LgampConfig()
    return demand_of(
        model,
        Configuration(
            data_ranks,
            pipeline_ranks,
            tensor_ranks,
            micro_batch,
            max(1, flags.count("--global-batch-size", samples) // samples),
            zero_stage=(config.get("zero_optimization") or {}).get("stage") or 0,
            schedule=block.schedule,
            chunks_per_rank=_chunks_per_rank(flags, block, model.layers, pipeline_ranks),
            resident_chunks=block.resident_chunks,
            micro_batch_group=None if block.micro_batch_group == "all" else block.micro_batch_group,
        ),
        flags.has("--sequence-parallel"),
    )


def _chunks_per_rank(flags: Flags, block: LgampConfig, layers: int, pipeline_ranks: int) -> int:
    """Returns how many chunks each rank has by the flags, else by the block."""
    if block.schedule in SINGLE_CHUNK_SCHEDULES:
        return 1
    each = flags.count("--num-layers-per-virtual-pipeline-stage", block.layers_per_chunk or 1)
    by_layers = max(1, layers // (each * pipeline_ranks))
    if flags.has("--num-layers-per-virtual-pipeline-stage"):
        return by_layers
    return flags.count("--num-virtual-stages-per-pipeline-rank", block.chunks_per_rank or by_layers)


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
    and :class:`ds_lgamp.planner.hardware.Network` takes it. Every member sends to the next one, so each byte crosses a
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
