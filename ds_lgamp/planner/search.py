"""Finds the fastest, cheapest or smallest configurations that train a model on a cluster."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import islice, takewhile
from math import inf
from typing import TypeVar

from ds_lgamp.planner.candidates import Bound, candidates, ways_to_offload, with_room
from ds_lgamp.planner.cluster import Cluster
from ds_lgamp.planner.configuration import Configuration, describe, method_of
from ds_lgamp.planner.memory import ConfigurationMemory, fits, least, memory
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.predict import Prediction, predict, scaled
from ds_lgamp.planner.work import exact_seconds, is_quick
from ds_lgamp.schedule.spec import Hierarchy

OBJECTIVES = ("time", "cost", "memory")


@dataclass(frozen=True)
class Plan:
    """A configuration with what it takes."""

    configuration: Configuration
    prediction: Prediction
    memory: ConfigurationMemory
    dollars: float | None
    """Price of a step; None if the cluster has no price."""

    @property
    def method(self) -> str:
        return method_of(self.configuration)


class NothingFits(ValueError):
    """No configuration can run; the message names what is missing, and by how much."""


Suits = Callable[[Configuration], bool]
"""Whether a configuration may be a plan."""
AnyPlan = TypeVar("AnyPlan")
Key = TypeVar("Key")


def search(
    model: Model,
    cluster: Cluster,
    sequences: int,
    objective: str = "time",
    best: int = 10,
    offload: bool = True,
    suits: Suits = lambda _: True,
) -> list[Plan]:
    """Returns the ``best`` plans for steps of ``sequences`` sequences, best first, and the best of each other method.

    ``time`` and ``memory`` use the whole cluster; ``cost`` also halves of it, quarters, and so on. Of plans that differ
    only in ZeRO stage, chunks, resident chunks or recomputation, only the best is returned, so that the table shows
    different ways to train. Only layouts and schedules that ``suits`` accepts count. With ``offload``, layered plans
    may hold state on the host where the GPUs lack memory. Layered plans take the seconds of the clock.

    Raises NothingFits if no configuration divides the batch, or if none fits into the GPUs' memory.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective is {objective!r}; use one of {', '.join(OBJECTIVES)}")
    if objective == "cost" and cluster.price is None:
        raise ValueError("price is missing in the cluster, which the objective cost needs; add it, as in '2.5 USD/h'")
    plans: list[Plan] = []
    tried: list[Configuration] = []
    if objective == "memory":
        plans = _by_memory(model, cluster, sequences, tried, best, offload, suits)
    else:
        for part in _parts(cluster) if objective == "cost" else [cluster]:
            plans += _by_bound(model, part, sequences, tried, offload, suits)
    if not plans:
        raise NothingFits(_why_nothing_fits(model, cluster, sequences, tried))
    plans.sort(key=_RANK[objective])
    plans += _with_nodes(model, cluster, plans)
    if objective != "memory":
        plans = _on_the_clock(model, cluster, sorted(plans, key=_RANK[objective]))
    different = distinct(sorted(plans, key=_RANK[objective]))
    others = [plan for plan in best_by_method(different).values() if plan not in different[:best]]
    return sorted((_with_parts(model, cluster, plan) for plan in different[:best] + others), key=_RANK[objective])


WORTH_A_LOOK = 1.5
"""Plans that take more than so many times as long as the best one of their method are left out."""


def _by_bound(
    model: Model, cluster: Cluster, sequences: int, tried: list[Configuration], offload: bool, suits: Suits
) -> list[Plan]:
    """Returns the plans that may be among the fastest, beginning with those that have the shortest compute. Adds what
    it looks at to ``tried``."""
    bounds = Bound(model, cluster)
    fastest: dict[str, float] = {}
    plans, without_plan, slow = [], [], set()
    bounded = [(bounds.seconds(one), one) for one in candidates(model, cluster, sequences) if suits(one)]
    for bound, configuration in sorted(bounded, key=lambda item: item[0]):
        method = method_of(configuration)
        if bound > WORTH_A_LOOK * fastest.get(method, inf):
            continue
        tried.append(configuration)
        prediction = predict(model, cluster, configuration)
        # Memory takes more time to predict than a step does.
        if prediction.seconds > WORTH_A_LOOK * fastest.get(method, inf):
            slow.add(configuration)
            without_plan.append(configuration)
        elif fits(model, configuration, cluster):
            plans.append(_plan(model, cluster, configuration, prediction))
            fastest[method] = min(fastest.get(method, inf), prediction.seconds)
        else:
            without_plan.append(configuration)
    if not offload:
        return plans
    shortest = min(fastest.values(), default=inf)
    ways = [(one, way) for one in without_plan for way in ways_to_offload(one)]
    worth = [(max(bounds.seconds(way), bounds.on_host(way)), one, way) for one, way in ways]
    worth = sorted((each for each in worth if each[0] < shortest), key=lambda each: each[0])
    worth = [each for each in worth if each[1] not in slow or not fits(model, each[1], cluster)]
    return plans + _on_host(model, cluster, lambda: ((one, way) for _, one, way in worth), tried)


MOST_ON_HOST, MOST_ALIKE = 24, 3
"""How many configurations with offloading a search tries, and how many of one method and layout of ranks. Each takes
the clock some ten milliseconds."""


def _on_host(
    model: Model,
    cluster: Cluster,
    ways: Callable[[], Iterable[tuple[Configuration, Configuration]]],
    tried: list[Configuration],
) -> list[Plan]:
    """Returns plans with offloading of the first ``ways`` that fit, and of the first that also store inputs. Adds what
    it looks at to ``tried``."""
    plans = []
    for stores in (False, True):
        counts: Counter[tuple] = Counter()
        for configuration in with_room(model, ways(), cluster):
            layout = _layout(configuration)
            if configuration.stores_inputs != stores or counts[layout] == MOST_ALIKE:
                continue
            counts[layout] += 1
            tried.append(configuration)
            if fits(model, configuration, cluster):
                plans.append(_plan(model, cluster, configuration, predict(model, cluster, configuration)))
            if counts.total() == MOST_ON_HOST:
                break
    return plans


def _by_memory(
    model: Model,
    cluster: Cluster,
    sequences: int,
    tried: list[Configuration],
    best: int,
    offload: bool,
    suits: Suits,
) -> list[Plan]:
    """Returns the plans that need least memory, enough of each method for ``best`` different ones. Adds all to
    ``tried``."""
    tried += [one for one in candidates(model, cluster, sequences) if suits(one)]
    plans = []
    for method in dict.fromkeys(map(method_of, tried)):
        ascending = _ascending(model, [one for one in tried if method_of(one) == method])
        that_fit = takewhile(lambda one: memory(model, one).fits(cluster), ascending)
        plans += [_plan(model, cluster, one, predict(model, cluster, one)) for one in islice(that_fit, _SIMILAR * best)]
    if not offload:
        return plans
    in_memory = list(tried)

    def ways() -> Iterator[tuple[Configuration, Configuration]]:
        return ((one, way) for one in _ascending(model, in_memory) for way in ways_to_offload(one))

    return plans + _on_host(model, cluster, ways, tried)


def _ascending(model: Model, configurations: Sequence[Configuration]) -> Iterator[Configuration]:
    """Yields ``configurations`` in the order of their memory. Follows the program of one only where :func:`least` does
    not show that others need less."""
    heap = [(least(model, one), number, False) for number, one in enumerate(configurations)]
    heapify(heap)
    while heap:
        _, number, is_followed = heappop(heap)
        if is_followed:
            yield configurations[number]
        else:
            heappush(heap, (memory(model, configurations[number]).total, number, True))


_SIMILAR = 20
"""How many plans of a method a search keeps for each that is returned, because similar ones are left out."""


MOST_WITH_NODES = 24
"""How many layouts of ranks a search tries with shards of nodes."""


def _with_nodes(model: Model, cluster: Cluster, plans: Sequence[Plan]) -> list[Plan]:
    """Returns the first layered plans at stage 3 with shards of nodes, as far as they fit. ``plans`` are sorted.
    Data-parallel ranks must fill more than one node."""
    found = []
    for plan in distinct([plan for plan in plans if _node_ranks(cluster, plan.configuration)])[:MOST_WITH_NODES]:
        ranks = _node_ranks(cluster, plan.configuration)
        for replicated in (False, True):
            configuration = replace(plan.configuration, hierarchy=Hierarchy(ranks, replicated))
            if fits(model, configuration, cluster):
                found.append(_plan(model, cluster, configuration, predict(model, cluster, configuration)))
    return found


FAR_BEHIND = 2.5
"""Plans that take more than so many times as long as the best one by the formula are not run on the clock. On slow
links, the formula gives 0.5 to 1.2 times the clock's seconds."""
MOST_CLOCKED = 400_000
"""Forwards and backwards that a search runs on the clock, which takes it about three seconds."""


def _on_the_clock(model: Model, cluster: Cluster, plans: Sequence[Plan]) -> list[Plan]:
    """Returns all ``plans``, which are sorted: the layered ones that may be the best have the seconds of the clock."""
    clocked, left = [], MOST_CLOCKED
    for plan in plans:
        computes = plan.configuration.computes
        near = plan.prediction.seconds <= FAR_BEHIND * plans[0].prediction.seconds
        if near and computes <= left and _is_by_formula(plan.configuration):
            left -= computes
            seconds = exact_seconds(model, cluster, plan.configuration)
            plan = _with_prediction(plan, cluster, scaled(plan.prediction, seconds))
        clocked.append(plan)
    return clocked


def _with_parts(model: Model, cluster: Cluster, plan: Plan) -> Plan:
    """Returns the plan with the clock's seconds of each part of the step, if the clock knows it."""
    if not _is_by_formula(plan.configuration):
        return plan
    return _with_prediction(plan, cluster, predict(model, cluster, plan.configuration, on_clock=True))


def _is_by_formula(of: Configuration) -> bool:
    """Whether a search has predicted by the formula what the clock is quick with."""
    return is_quick(of) and not of.takes_clock


def _with_prediction(plan: Plan, cluster: Cluster, prediction: Prediction) -> Plan:
    return replace(plan, prediction=prediction, dollars=_dollars(cluster, plan.configuration, prediction))


def _node_ranks(cluster: Cluster, of: Configuration) -> int:
    """Returns how many data-parallel ranks form a node; 0 if they cannot share shards there."""
    ranks = cluster.gpus_per_node // of.tensor_ranks
    fits = 1 < ranks < of.data_ranks and of.data_ranks % ranks == 0 and not of.uses_host
    return ranks if fits and of.zero_stage == 3 and not of.micro_batch_outer else 0


def distinct(plans: Sequence[Plan]) -> list[Plan]:
    """Returns the first plan of each method and layout of ranks."""
    return list(first_by(lambda plan: _layout(plan.configuration), plans).values())


def _layout(of: Configuration) -> tuple:
    return method_of(of), of.data_ranks, of.pipeline_ranks, of.tensor_ranks, of.micro_batch


def best_by_method(plans: Sequence[Plan]) -> dict[str, Plan]:
    """Returns the first plan of each method, in the order of ``plans``."""
    return first_by(lambda plan: plan.method, plans)


def first_by(key: Callable[[AnyPlan], Key], plans: Iterable[AnyPlan]) -> dict[Key, AnyPlan]:
    """Returns the first plan with each ``key``, in the order of ``plans``."""
    first: dict[Key, AnyPlan] = {}
    for plan in plans:
        first.setdefault(key(plan), plan)
    return first


def _plan(model: Model, cluster: Cluster, configuration: Configuration, prediction: Prediction) -> Plan:
    needed = memory(model, configuration)
    return Plan(configuration, prediction, needed, _dollars(cluster, configuration, prediction))


def _dollars(cluster: Cluster, configuration: Configuration, prediction: Prediction) -> float | None:
    return None if cluster.price is None else prediction.seconds * configuration.gpus * cluster.price


_RANK: dict[str, Callable[[Plan], tuple[float, float]]] = {
    "time": lambda plan: (plan.prediction.seconds, plan.memory.total),
    "cost": lambda plan: (plan.dollars or 0.0, plan.prediction.seconds),
    "memory": lambda plan: (plan.memory.total, plan.prediction.seconds),
}


def _parts(cluster: Cluster) -> Iterator[Cluster]:
    """Yields the cluster, half of its nodes, a quarter, and so on; of one node, parts of its GPUs."""
    nodes, gpus = cluster.nodes, cluster.gpus_per_node
    while True:
        yield replace(cluster, nodes=nodes, gpus_per_node=gpus)
        if nodes > 1 and nodes % 2 == 0:
            nodes //= 2
        elif nodes == 1 and gpus > 1 and gpus % 2 == 0:
            gpus //= 2
        else:
            return


def _why_nothing_fits(model: Model, cluster: Cluster, sequences: int, tried: Sequence[Configuration]) -> str:
    if not tried:
        return (
            f"batch_size is {sequences}: no layout of {cluster.gpus} GPUs with at most {model.layers} pipeline ranks "
            "divides it evenly; use a multiple of a divisor of the GPUs"
        )
    ascending = _ascending(model, tried)
    configuration = next(ascending)
    if memory(model, configuration).missing(cluster) == 0:
        # The GPUs have enough for this one and maybe for others, but the hosts do not.
        others = {configuration, *takewhile(lambda one: memory(model, one).missing(cluster) == 0, ascending)}
        configuration = min((one for one in tried if one in others), key=lambda one: memory(model, one).host)
    needed = memory(model, configuration)
    kind, most = max(needed.kinds.items(), key=lambda item: item[1])
    smallest, lacking = f"nothing fits: the smallest configuration ({describe(configuration)}) needs", "than there are"
    if needed.missing(cluster) == 0:
        return (
            f"{smallest} {needed.host / 1e9:.3g} GB on the host for each GPU, "
            f"{(needed.host - cluster.host.memory) / 1e9:.3g} GB more {lacking}. Use more GPUs, hosts with more "
            "memory, or a smaller model"
        )
    return (
        f"{smallest} {needed.total / 1e9:.3g} GB per GPU, {needed.missing(cluster) / 1e9:.3g} GB more {lacking}; most "
        f"is {kind.replace('_', ' ')} with {most / 1e9:.3g} GB. Use more GPUs, or a smaller model, batch or sequence"
    )


PARTS = {
    "compute": "computing",
    "tensor_parallel": "tensor-parallel collectives",
    "bubble": "the bubble",
    "messages": "messages between pipeline ranks",
    "data_parallel": "reductions of gradients",
    "gathers": "gathers of parameters",
    "bus": "transfers between host and GPU",
    "optimizer": "the optimizer",
}
"""What the parts of a prediction are called in a sentence."""


def reasons(plans: Sequence[Plan]) -> list[str]:
    """Returns a sentence about what sets the fastest plan apart from the best plan of another method, if there is one,
    and a sentence about what limits it.

    Args:
        plans: at least one; the first is the one that is explained.
    """
    best, *others = best_by_method(plans).values()
    sentences = [_against(best, others[0])] if others else []
    return [*sentences, _limit(best)]


def _against(best: Plan, other: Plan) -> str:
    mine, theirs = best.prediction.parts, other.prediction.parts
    name = max(mine, key=lambda part: theirs[part] - mine[part])
    seconds, slower = best.prediction.seconds, other.prediction.seconds
    if slower < 0.995 * seconds:
        return f"{best.method} leads by this objective, although {other.method} takes {1 - slower / seconds:.0%} less."
    gained = 1 - seconds / slower
    if gained < 0.005:
        return f"{best.method} takes about as long as the best plan with {other.method}."
    verb = "takes" if name in ("bubble", "optimizer", "compute") else "take"
    return (
        f"{best.method} takes {gained:.0%} less time than the best plan with {other.method}, above all "
        f"because {PARTS[name]} {verb} {mine[name]:.3g} s of a step instead of {theirs[name]:.3g} s."
    )


def _limit(best: Plan) -> str:
    parts = dict(best.prediction.parts)
    compute = parts.pop("compute")
    name = max(parts, key=lambda part: parts[part])
    seconds = best.prediction.seconds
    return (
        f"A step computes for {compute / seconds:.0%} of its time, at an MFU of {best.prediction.mfu:.0%}; what costs "
        f"most beside it is {PARTS[name]} with {parts[name] / seconds:.1%}."
    )
