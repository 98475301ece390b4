"""Finds the fastest configurations for a model on a cluster with islands, and the order of ranks for each.

The search takes its configurations from two imagined clusters of equal nodes: one has the fastest network of the
islands, the other the slow one between them. Each configuration gets the cheapest orders of ranks
(:mod:`ds_lgamp.planner.assign`), and the clock runs its program on the links that it then uses. So the imagined
clusters decide what is tried, not what is best.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from ds_lgamp.cost.assignment import Assignment
from ds_lgamp.planner.assign import ranked
from ds_lgamp.planner.cluster import Cluster, Link
from ds_lgamp.planner.configuration import Configuration, method_of
from ds_lgamp.planner.demand import demand_of
from ds_lgamp.planner.exact import MOST_COMPUTES, costs_of
from ds_lgamp.planner.exposed import network_costs
from ds_lgamp.planner.islands import IslandCluster
from ds_lgamp.planner.memory import ConfigurationMemory, memory
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.search import search
from ds_lgamp.planner.sizes import as_executed
from ds_lgamp.schedule.costs import Costs
from ds_lgamp.schedule.placement import shares_by_speed
from ds_lgamp.schedule.program import build_timed_program
from ds_lgamp.schedule.simulate import simulate

LONG_LIST, PROPOSALS = 200, 6
"""How many plans each imagined cluster ranks, and how many of these are tried beside the best of every method with
every number of pipeline ranks."""
_REACHED = {"matmul": 1.0, "memory": 1.0, "inside": 1.0, "between": 1.0}
"""Rates of a cluster with islands are those that are reached."""


@dataclass(frozen=True)
class IslandPlan:
    """A configuration, the ranks' places, and what a step takes."""

    configuration: Configuration
    assignment: Assignment
    seconds: float
    """Of a step on the clock."""
    exposed: float
    """Seconds of it that no compute hides: the step less one without a network between nodes."""
    memory: ConfigurationMemory

    @property
    def method(self) -> str:
        return method_of(self.configuration)


def search_islands(model: Model, cluster: IslandCluster, sequences: int, best: int = 10) -> list[IslandPlan]:
    """Returns the ``best`` plans for steps of ``sequences`` sequences, the fastest first, and the fastest of each other
    method. If pipeline ranks have different speeds, the layered schedule shares layers by them.

    Raises ValueError if the file lacks what a plan needs, and NothingFits as :func:`ds_lgamp.planner.search.search`.
    """
    fast, slow = alike(cluster, fast=True), alike(cluster, fast=False)
    plans: list[IslandPlan] = []
    for configuration in dict.fromkeys(one for each in (fast, slow) for one in _proposals(model, each, sequences)):
        plans += _placed(model, cluster, fast, configuration)
    if not plans:
        raise ValueError(
            f"batch_size is {sequences}: every configuration that fits {cluster.name} has more than {MOST_COMPUTES} "
            "forwards and backwards in a step, which the clock takes too long for, or does not fit once fast ranks "
            "have more layers; plan with a smaller batch"
        )
    plans.sort(key=lambda plan: (plan.seconds, plan.memory.total))
    first: dict[str, IslandPlan] = {}
    for plan in plans:
        first.setdefault(plan.method, plan)
    return plans[:best] + [plan for plan in first.values() if plan not in plans[:best]]


def _proposals(model: Model, cluster: Cluster, sequences: int) -> list[Configuration]:
    """Returns the configurations that may be fast on islands: those that are fast on a ``cluster`` of equal nodes."""
    # The clock of islands knows no bus.
    plans = search(model, cluster, sequences, best=LONG_LIST, offload=False)
    first: dict[tuple[str, int], Configuration] = {}
    for plan in plans:
        first.setdefault((plan.method, plan.configuration.pipeline_ranks), plan.configuration)
    return [plan.configuration for plan in plans[:PROPOSALS]] + list(first.values())


def alike(cluster: IslandCluster, fast: bool) -> Cluster:
    """Returns a cluster of as many GPUs in equal nodes, with the fastest network of the islands or with the slow one
    between them. Its GPUs have the mean speed.

    Raises ValueError that names the field that the file lacks.
    """
    lacking = [name for name in ("peak", "memory", "memory_bandwidth") if getattr(cluster, name) is None]
    if lacking or cluster.peak is None or cluster.memory is None or cluster.memory_bandwidth is None:
        raise ValueError(f"{', '.join(lacking)} missing in {cluster.name}; a plan for islands needs it, so add it")
    per_node = gcd(*(island.gpus_per_node for island in cluster.islands))
    speed = sum(island.gpus * island.speed for island in cluster.islands) / cluster.gpus
    best = max(cluster.islands, key=lambda island: island.link.bandwidth * island.cards_per_node)
    between = Link(best.link.bandwidth * best.cards_per_node, best.link.latency) if fast else cluster.between
    return Cluster(
        cluster.name,
        cluster.gpus // per_node,
        per_node,
        cluster.peak * speed,
        cluster.memory,
        cluster.memory_bandwidth * speed,
        # Without a link inside nodes, these are so fast that they do not count.
        cluster.inside or Link(1e15, 1e-9),
        between,
        efficiency=_REACHED,
    )


def _placed(model: Model, cluster: IslandCluster, fast: Cluster, configuration: Configuration) -> Iterator[IslandPlan]:
    """Yields the configuration in the better of two orders of ranks, if the clock is quick with it and it fits."""
    executed = as_executed(model, configuration)
    if executed.computes > MOST_COMPUTES:
        return
    found = [_in_order(model, cluster, fast, configuration, order) for order in _orders(model, cluster, executed)]
    fitting = [plan for plan in found if plan.memory.fits(fast)]
    if fitting:
        yield min(fitting, key=lambda plan: plan.seconds)


def _orders(model: Model, cluster: IslandCluster, executed: Configuration) -> list[Assignment]:
    """Returns the order of ranks that sends least, and of those whose pipeline ranks are fastest together the one that
    sends least. Data-parallel ranks get equal work, so their speeds do not count."""
    found = ranked(cluster, demand_of(model, executed))
    fastest = max(found, key=lambda order: sum(order.pipeline_speeds))
    return found[:1] if fastest.slots == found[0].slots else [found[0], fastest]


def _in_order(
    model: Model, cluster: IslandCluster, fast: Cluster, configuration: Configuration, assignment: Assignment
) -> IslandPlan:
    speeds = assignment.pipeline_speeds
    if len(set(speeds)) > 1 and not configuration.micro_batch_outer:
        # Layers by speed change what is sent, but keep the places. The slowest rank needs a layer for every chunk.
        rounds = min(configuration.chunks_per_rank, *shares_by_speed(model.layers, speeds))
        configuration = replace(configuration, speeds=speeds, chunks_per_rank=rounds)
    executed = as_executed(model, configuration)
    seconds, alone = _on_clock(model, cluster, fast, assignment, executed)
    return IslandPlan(configuration, assignment, seconds, seconds - alone, memory(model, configuration))


def _on_clock(
    model: Model, cluster: IslandCluster, fast: Cluster, assignment: Assignment, executed: Configuration
) -> tuple[float, float]:
    """Returns the seconds of a step, and those without a network between the ranks of a pipeline and of data-parallel
    groups. Tensor-parallel ranks share a node; their sums count as compute."""
    spec = executed.spec
    program = build_timed_program(spec)
    compute = costs_of(model, fast, executed)
    # The ends' parameters are in the bytes of the demand, which chunks share by their layers.
    parameters = [layers * model.layer_parameters for layers in executed.layers_of_chunks(model)]
    network = network_costs(cluster, assignment, demand_of(model, executed), spec, parameters, program)
    mean = fast.peak / (cluster.peak or fast.peak)
    slowness = [mean / assignment.pipeline_speeds[rank] for rank in spec.placement]
    busy = replace(
        network,
        forward=[each * slow for each, slow in zip(compute.forward, slowness)],
        backward=[each * slow for each, slow in zip(compute.backward, slowness)],
        recompute=[each * slow for each, slow in zip(compute.recompute, slowness)],
        update=[each * slow for each, slow in zip(compute.update, slowness)],
    )
    seconds, alone = (
        simulate(spec, program, costs, sends_at_once=True).step_time for costs in (busy, _without_network(busy))
    )
    return seconds, alone


def _without_network(costs: Costs) -> Costs:
    return replace(
        costs,
        gather=[0.0] * len(costs.gather),
        reduce=[0.0] * len(costs.reduce),
        refresh=[0.0] * len(costs.refresh),
        combine=[0.0] * len(costs.combine),
        hop=dict.fromkeys(costs.hop, 0.0),
        message=dict.fromkeys(costs.message, 0.0),
    )
