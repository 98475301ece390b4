"""What a micro-batch takes in a layer, at the ends of the model and on the network, on one tensor-parallel rank."""

from dataclasses import dataclass
from functools import partial

from ds_lgamp.planner.cluster import Cluster
from ds_lgamp.planner.compute import ELEMENT, Compute, Seconds
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.network import Group, Network, group_of

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
