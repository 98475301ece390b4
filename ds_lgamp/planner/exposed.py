"""What the network of a cluster with islands adds to a step, by the one clock."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ds_lgamp.cost.assignment import Assignment, Demand
from ds_lgamp.planner.islands import IslandCluster
from ds_lgamp.planner.load import GroupsOf, group_seconds, hop_of, latency_of, ring
from ds_lgamp.schedule.actions import Kind, Program
from ds_lgamp.schedule.costs import Costs, Durations, links_of, uniform_costs
from ds_lgamp.schedule.program import build_program
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
