"""What the parts of a step take on one tensor-parallel rank, and the step on the clock, which is exact where the closed
form assumes equal ranks."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ds_lgamp.planner.activations import layer_bytes
from ds_lgamp.planner.cluster import Cluster, Efficiency
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.hardware import ELEMENT, Compute, Group, Network, Seconds, group_of, network_of
from ds_lgamp.planner.memory import default_software
from ds_lgamp.planner.model import Model
from ds_lgamp.schedule.costs import Costs, links_of
from ds_lgamp.schedule.program import build_timed_program
from ds_lgamp.schedule.simulate import simulate

_MASTER = 4
"""Bytes of an element that the optimizer updates."""


@dataclass(frozen=True)
class Work:
    """The pieces of a micro-batch, without waits."""

    layer: Seconds
    tensor_sum: float
    """Seconds of one sum over the tensor-parallel ranks. An end of the model needs one for each micro-batch."""
    layer_parameters: float
    ends: tuple[tuple[int, Seconds, float], ...]
    """Chunk, seconds and parameters of the embedding, and of the head with the loss. -1 is the last chunk."""


def work_of(model: Model, cluster: Cluster, configuration: Configuration, compute: Compute, network: Network) -> Work:
    """Returns the pieces of a micro-batch of ``configuration``."""
    sequences, tensor_ranks = configuration.micro_batch, configuration.tensor_ranks
    group = group_of(cluster, configuration.gpus, tensor_ranks, 1)
    shares = model.tied_embeddings and configuration.placement[0] == configuration.placement[-1]
    words = 0.0 if shares else model.vocabulary_size * model.hidden_size / tensor_ranks
    return Work(
        compute.layer(model, sequences, tensor_ranks, configuration.fused_attention),
        network.all_reduce(group, ELEMENT * sequences * model.sequence_length * model.hidden_size),
        model.layer_parameters / tensor_ranks,
        (
            (0, compute.embedding(model, sequences, tensor_ranks), model.embedding_parameters / tensor_ranks),
            (-1, compute.head(model, sequences, tensor_ranks), words),
        ),
    )


def crosses_nodes(cluster: Cluster, configuration: Configuration) -> bool:
    """Whether pipeline ranks send messages from node to node."""
    return configuration.gpus > cluster.gpus_per_node


def reduction(configuration: Configuration, network: Network, group: Group, size: float) -> float:
    """Returns the seconds of the reduction of ``size`` bytes of gradients over the data-parallel ranks."""
    reduce = network.all_reduce if configuration.zero_stage == 0 else network.reduce_scatter
    return reduce(group, size)


@dataclass(frozen=True)
class Collectives:
    """Seconds of the collectives of one chunk over its data-parallel ranks."""

    gather: float
    reduce: float
    refresh: float = 0.0
    """Between nodes, with hierarchical shards, like ``combine``."""
    combine: float = 0.0


def collectives_of(cluster: Cluster, configuration: Configuration, network: Network, size: float) -> Collectives:
    """Returns what a chunk with ``size`` bytes of weights, and as many of gradients, takes."""
    hierarchy, stride = configuration.hierarchy, configuration.tensor_ranks
    in_job = partial(group_of, cluster, configuration.gpus)
    if hierarchy is None:
        group = in_job(configuration.data_ranks, stride)
        return Collectives(network.all_gather(group, size), reduction(configuration, network, group, size))
    node = in_job(hierarchy.node_ranks, stride)
    peers = in_job(hierarchy.nodes(configuration.data_ranks), stride * hierarchy.node_ranks)
    kept = size / hierarchy.node_ranks
    combine = network.all_reduce if hierarchy.replicated else network.reduce_scatter
    return Collectives(
        network.all_gather(node, size),
        network.reduce_scatter(node, size),
        0.0 if hierarchy.replicated else network.all_gather(peers, kept),
        combine(peers, kept),
    )


def hop_of(model: Model, cluster: Cluster, configuration: Configuration, network: Network) -> tuple[float, float]:
    """Returns the seconds of a message between pipeline ranks, and those for which it occupies its link; 0 with one
    pipeline rank."""
    if configuration.pipeline_ranks == 1:
        return 0.0, 0.0
    # Under sequence parallelism each tensor rank has and sends a part (arXiv 2205.05198).
    tokens = configuration.micro_batch * model.sequence_length
    size = ELEMENT * tokens * model.hidden_size / configuration.tensor_ranks
    crosses = crosses_nodes(cluster, configuration)
    hop = network.message(crosses, size)
    return hop, hop - network.message(crosses, 0)


def tied_seconds(model: Model, cluster: Cluster, configuration: Configuration, network: Network) -> float:
    """Seconds of the sum of the first and the last pipeline rank's gradients of tied embeddings.

    The layered schedule sums what every rank updates, in the 32 bits of the optimizer. Others sum whole gradients.
    """
    if not model.tied_embeddings or configuration.placement[0] == configuration.placement[-1]:
        return 0.0
    size = model.vocabulary_size * model.hidden_size / configuration.tensor_ranks
    size *= _MASTER / configuration.shards if configuration.schedule == "layered" else ELEMENT
    ends = Group(1, 2) if crosses_nodes(cluster, configuration) else Group(2, 1)
    return network.all_reduce(ends, size)


MOST_COMPUTES = 300_000
"""Forwards and backwards that the clock runs in a few seconds."""


_GRADIENT = 4
"""Bytes of a stored gradient."""


def is_quick(configuration: Configuration) -> bool:
    """Whether the clock can run the configuration, which is one of ds_lgamp's, in seconds."""
    return is_layered(configuration) and configuration.computes <= MOST_COMPUTES


def is_layered(configuration: Configuration) -> bool:
    """Whether ds_lgamp runs the configuration under the layered schedule."""
    return configuration.schedule == "layered" and not configuration.micro_batch_outer


def exact_seconds(model: Model, cluster: Cluster, configuration: Configuration) -> float:
    """Returns the seconds of a step of this project's engine, by the clock."""
    spec = configuration.spec
    costs = costs_of(model, cluster, configuration)
    return simulate(spec, build_timed_program(spec), costs, sends_at_once=True).step_time


def costs_of(model: Model, cluster: Cluster, configuration: Configuration) -> Costs:
    """Returns what the actions of the configuration's program take, in seconds. Chunks differ in their layers;
    embedding and head belong to the first and the last one."""
    efficiency = Efficiency(**cluster.efficiency)
    network = network_of(cluster, configuration.gpus, efficiency)
    compute = Compute(cluster, efficiency)
    work = work_of(model, cluster, configuration, compute, network)
    counts, sums = configuration.layers_of_chunks(model), 2 * work.tensor_sum
    forward = [count * (work.layer.forward + sums) for count in counts]
    backward = [count * (work.layer.backward + sums) for count in counts]
    recompute = list(forward)
    elements = [count * work.layer_parameters for count in counts]
    for chunk, end, own in work.ends:
        forward[chunk] += end.forward + work.tensor_sum / 2
        backward[chunk] += end.backward + work.tensor_sum / 2
        elements[chunk] += own
    moves = [collectives_of(cluster, configuration, network, ELEMENT * own) for own in elements]
    spec = configuration.spec
    hosts = [host_seconds(compute, configuration, own) for own in elements] if spec.offload else []
    updates = [compute.update(own / configuration.shards) for own in elements]
    hop, message = hop_of(model, cluster, configuration, network)
    links, tied = links_of(spec), tied_seconds(model, cluster, configuration, network)
    ends = {configuration.placement[0], configuration.placement[-1]}
    return Costs(
        forward,
        backward,
        recompute,
        gather=[each.gather for each in moves],
        reduce=[each.reduce for each in moves],
        hop=dict.fromkeys(links, hop),
        message=dict.fromkeys(links, message),
        update=[host.update for host in hosts] or updates,
        tied=[tied if rank in ends else 0.0 for rank in range(configuration.pipeline_ranks)],
        shares_card=crosses_nodes(cluster, configuration),
        refresh=[each.refresh for each in moves] if spec.hierarchy else (),
        combine=[each.combine for each in moves] if spec.hierarchy else (),
        load=[host.load for host in hosts],
        store=[host.store for host in hosts],
        input=[input_seconds(compute, model, configuration)] * spec.chunks if spec.stores_inputs else (),
    )


class HostSeconds(NamedTuple):
    """What one chunk takes between its GPU and the host."""

    load: float
    """Copying a rank's part of its weights to the GPU."""
    store: float
    """Copying that part of its gradient to the host."""
    update: float
    """Updating that part on the host."""


def host_seconds(compute: Compute, configuration: Configuration, parameters: float) -> HostSeconds:
    """Returns the seconds of a chunk of so many ``parameters`` on one tensor-parallel rank."""
    part = parameters / configuration.shards
    return HostSeconds(compute.transfer(ELEMENT * part), compute.transfer(_GRADIENT * part), compute.host_update(part))


def input_seconds(compute: Compute, model: Model, configuration: Configuration) -> float:
    """Returns the seconds that the input of a chunk takes between GPU and host, for one micro-batch."""
    software = default_software(configuration)
    return compute.transfer(layer_bytes(model, configuration.micro_batch, configuration.tensor_ranks, software).result)
