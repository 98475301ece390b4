"""Finds the fastest configurations for a model on a cluster with islands, and the order of ranks for each.

The search takes its configurations from two imagined clusters of equal nodes: one has the fastest network of the
islands, the other the slow one between them. Each configuration gets the cheapest orders of ranks
(:mod:`ds_lgamp.planner.assign`), and the clock runs its program on the links that it then uses. So the imagined
clusters decide what is tried, not what is best.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

from ds_lgamp.cost.assignment import Assignment, Demand
from ds_lgamp.planner.assign import ranked
from ds_lgamp.planner.cluster import Cluster, Link
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.islands import IslandCluster
from ds_lgamp.planner.load import GroupsOf, demand_of, group_seconds, hop_of, latency_of, ring
from ds_lgamp.planner.memory import ConfigurationMemory, as_executed, memory
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.search import Allowed, first_by, search
from ds_lgamp.planner.work import MOST_COMPUTES, Work, total
from ds_lgamp.planner.write import method_of
from ds_lgamp.schedule.actions import Kind, Program
from ds_lgamp.schedule.costs import Costs, Durations, links_of, uniform_costs
from ds_lgamp.schedule.placement import shares_by_speed
from ds_lgamp.schedule.program import build_program, build_timed_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import ProgramSpec

_NOTHING = Durations(*(0.0 for _ in Durations._fields))


@dataclass(frozen=True)
class Exposed:
    """Seconds of a step. Updates take none."""

    network: float
    """Of the whole step, if compute took no time."""
    step: float | None
    """Of the whole step; None if the time of compute is unknown."""
    exposed: float | None
    """Seconds of the network that no compute hides: the step less one without a network."""


def exposed(
    cluster: IslandCluster,
    assignment: Assignment,
    demand: Demand,
    spec: ProgramSpec,
    parameters: Sequence[int],
    flops: Sequence[float | None],
) -> Exposed:
    """Runs the program of ``spec`` on the clock.

    Args:
        parameters: of every chunk. Gathers and reductions share the bytes of ``demand`` in proportion.
        flops: of every chunk's forward for one micro-batch; None if unknown. A backward has twice as many.
    """
    program = build_program(spec)
    network = network_costs(cluster, assignment, demand, spec, parameters, program)
    alone = simulate(spec, program, network).step_time
    known = [each for each in flops if each is not None]
    if cluster.peak is None or len(known) < len(parameters):
        return Exposed(alone, None, None)
    rates = [cluster.peak * assignment.pipeline_speeds[rank] for rank in spec.placement]
    forward = [each / rate for each, rate in zip(known, rates)]
    backward = [2 * each for each in forward]
    step, ideal = (
        simulate(spec, program, replace(costs, forward=forward, backward=backward, recompute=forward)).step_time
        for costs in (network, uniform_costs(spec, _NOTHING))
    )
    return Exposed(alone, step, step - ideal)


def network_costs(
    cluster: IslandCluster,
    assignment: Assignment,
    demand: Demand,
    spec: ProgramSpec,
    parameters: Sequence[int],
    program: Program,
) -> Costs:
    """Returns the costs of a step whose compute takes no time.

    Args:
        parameters: of every chunk. Gathers and reductions share the bytes of ``demand`` in proportion.
        program: that of ``spec``.
    """

    def of_chunks(groups_of: GroupsOf, kinds: Collection[Kind]) -> list[float]:
        times, seconds = [0.0] * spec.chunks, group_seconds(cluster, assignment, groups_of)
        for rank, actions in enumerate(program):
            moved = [action.chunk for action in actions if action.kind in kinds]
            whole = sum(parameters[chunk] for chunk in moved)
            rounds = _rounds(cluster, assignment, rank, groups_of)
            for chunk in set(moved):
                times[chunk] = rounds + seconds[rank] * parameters[chunk] / max(1, whole)
        return times

    collective = of_chunks(demand.near_groups, (Kind.GATHER, Kind.REDUCE))
    between = of_chunks(demand.peer_groups, (Kind.REFRESH, Kind.COMBINE)) if spec.hierarchy else []
    messages = Counter(zip(spec.placement, spec.placement[1:]))
    hop, message = {}, {}
    for source, target in links_of(spec):
        link = hop_of(cluster, assignment, demand, source, target)
        # Results go to the next rank, gradients the other way. On two ranks a link carries both.
        there, back = ((source + 1) % spec.pipeline_ranks == target, (target + 1) % spec.pipeline_ranks == source)
        size = demand.hop_bytes[source] * there + demand.hop_bytes[target] * back
        count = spec.micro_batches * (messages[source, target] + messages[target, source])
        message[source, target] = size / count / link.bandwidth
        hop[source, target] = link.latency + message[source, target]
    shared = set(assignment.data_group_kinds) & set(assignment.hop_kinds) - {"node"}
    return replace(
        uniform_costs(spec, _NOTHING),
        gather=collective,
        reduce=collective,
        refresh=between,
        combine=between,
        hop=hop,
        message=message,
        shares_card=bool(shared) and assignment.data_ranks > 1,
    )


def _rounds(cluster: IslandCluster, assignment: Assignment, rank: int, groups_of: GroupsOf) -> float:
    """Returns the latency of a collective in the slowest group of a pipeline rank: a ring of n members passes n - 1
    messages on."""
    rings = [ring(assignment, assignment.ranks_of(rank, 0, group)) for group in groups_of(rank)]
    return max(sum(latency_of(cluster, assignment, edge) for edge in zip(each, each[1:])) for each in rings)


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
    first = first_by(lambda plan: plan.method, plans)
    return plans[:best] + [plan for plan in first.values() if plan not in plans[:best]]


def _proposals(model: Model, cluster: Cluster, sequences: int) -> list[Configuration]:
    """Returns the configurations that may be fast on islands: those that are fast on a ``cluster`` of equal nodes."""
    # The clock of islands knows no bus, and orders of ranks know neither all-to-alls nor that data-parallel ranks of
    # unequal speeds may exclude backwards in two parts. What ranks keep would change with their layers.
    plans = search(
        model,
        cluster,
        sequences,
        best=LONG_LIST,
        suits=lambda of: of.expert_ranks == 1 and not of.split_backward and of.recompute != "auto",
        allowed=Allowed(offload=False),
    )
    first = first_by(lambda plan: (plan.method, plan.configuration.pipeline_ranks), plans)
    return [plan.configuration for plan in (*plans[:PROPOSALS], *first.values())]


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
    compute = Work(model, fast, executed).costs()
    # The ends' parameters are in the bytes of the demand, which chunks share by their layers.
    of_layers = [kind.layer_parameters for _, kind in model.kinds]
    parameters = [int(total(counts, of_layers)) for counts in executed.kinds_of_chunks(model)]
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
    idle = busy.without("gather", "reduce", "refresh", "combine", "hop", "message")
    seconds, alone = (simulate(spec, program, costs, sends_at_once=True).step_time for costs in (busy, idle))
    return seconds, alone
