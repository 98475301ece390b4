"""Runs the program of a configuration on the clock: exact where the closed form assumes equal ranks."""

from ds_lgamp.planner.cluster import Cluster
from ds_lgamp.planner.compute import ELEMENT, Compute
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.efficiency import Efficiency
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.network import network_of
from ds_lgamp.planner.offload import host_seconds, input_seconds
from ds_lgamp.planner.work import collectives_of, crosses_nodes, hop_of, tied_seconds, work_of
from ds_lgamp.schedule.costs import Costs, links_of
from ds_lgamp.schedule.program import build_timed_program
from ds_lgamp.schedule.simulate import simulate

MOST_COMPUTES = 300_000
"""Forwards and backwards that the clock runs in a few seconds."""


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
