"""Finds the fastest, cheapest or smallest configurations that train a model on a cluster."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from math import inf
from operator import itemgetter
from typing import NamedTuple, TypeVar

from ds_lgamp.cost.budget import space_left
from ds_lgamp.planner.candidates import (
    Bound,
    ascending,
    candidates,
    gathers_again,
    keeping,
    lacking,
    layout_of,
    may_keep,
    node_ranks,
    ranks_of,
    ways_to_offload,
    ways_to_round,
    ways_to_split,
    with_room,
    without_recomputing,
)
from ds_lgamp.planner.cluster import Cluster, parts_of
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.memory import ConfigurationMemory, fits, memory
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.predict import Prediction, predict, scaled
from ds_lgamp.planner.work import exact_seconds, is_by_formula, is_layered, is_own
from ds_lgamp.planner.write import method_of
from ds_lgamp.schedule.spec import Hierarchy

OBJECTIVES = ("time", "cost", "memory")


@dataclass(frozen=True)
class Plan:
    """A configuration with what it takes."""

    configuration: Configuration
    prediction: Prediction
    memory: ConfigurationMemory
    price: float | None
    """Dollars per GPU and second; None if the cluster has no price."""

    @property
    def method(self) -> str:
        return method_of(self.configuration)

    @property
    def dollars(self) -> float | None:
        """Price of a step; None if the cluster has no price."""
        return None if self.price is None else self.prediction.seconds * self.configuration.gpus * self.price

    @property
    def without_waits(self) -> float:
        """The seconds of a step that remain if no pipeline rank waits for another one in ds_lgamp's engine. What
        collectives take in others says nothing about it, so of their steps only compute remains."""
        of, configuration = self.prediction, self.configuration
        # The model's last chunk may not be recomputed, which is a quarter of what a chunk computes at most.
        spared = of.compute / 4 / configuration.chunks_per_rank if configuration.recompute == "full" else 0.0
        return (of.seconds - of.bubble - of.messages if is_own(configuration) else of.compute) - spared


class Allowed(NamedTuple):
    """What plans may do beside choosing ranks and schedules."""

    offload: bool = True
    """Whether layered plans may hold state on the host where the GPUs lack memory."""
    rounded: int | None = None
    """In how many bits gradients travel where something is rounded; None if nothing may be."""
    state: str = "fp32"
    """How all plans keep the optimizer's state."""


USUAL = Allowed()


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
    suits: Suits = lambda _: True,
    allowed: Allowed = USUAL,
) -> list[Plan]:
    """Returns the ``best`` plans for steps of ``sequences`` sequences, best first, and the best of each other method.

    ``time`` and ``memory`` use the whole cluster; ``cost`` also halves of it, quarters, and so on. Of plans that differ
    only in ZeRO stage, chunks, resident chunks, recomputation or ranks that divide experts, only the best is returned,
    so that the table shows different ways to train. Only layouts and schedules that ``suits`` accepts count. Layered
    plans take the seconds of the clock.

    Raises NothingFits if no configuration divides the batch, or if none fits into the GPUs' memory. Where one would fit
    with state in bf16, the sentence says so.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective is {objective!r}; use one of {', '.join(OBJECTIVES)}")
    if objective == "cost" and cluster.price is None:
        raise ValueError("price is missing in the cluster, which the objective cost needs; add it, as in '2.5 USD/h'")
    looks = _Search(model, cluster, sequences, suits, allowed, [])
    plans: list[Plan] = []
    if objective == "memory":
        plans = looks.by_memory(best)
    else:
        for part in parts_of(cluster) if objective == "cost" else [cluster]:
            plans += replace(looks, cluster=part).by_bound()
    if not plans:
        raise NothingFits(lacking(model, cluster, sequences, looks.tried, looks.hope()))
    plans.sort(key=_RANK[objective])
    plans += looks.with_nodes(plans) + looks.with_copies(plans)
    plans += looks.with_rounding(sorted(plans, key=_RANK[objective]))
    if objective != "memory":
        plans = looks.on_the_clock(sorted(plans, key=_RANK[objective]))
        plans += looks.recomputing_less(plans) + looks.with_second_parts(plans)
    different = distinct(sorted(plans, key=_RANK[objective]))
    others = [plan for plan in best_by_method(different).values() if plan not in different[:best]]
    return sorted(map(looks.with_parts, different[:best] + others), key=_RANK[objective])


IN_BF16 = ", or ask for state in bf16 (--state bf16), with which a plan fits and which changes results"
WORTH_A_LOOK = 1.5
"""Plans that take more than so many times as long as the best one of their method are left out."""
MOST_ON_HOST, MOST_ALIKE = 24, 3
"""How many configurations with offloading that fit a search predicts, and how many of one method and layout of ranks.
Each takes the clock some ten milliseconds."""
_SIMILAR = 20
"""How many plans of a method a search keeps for each that is returned, because similar ones are left out."""
TRIES = 4
"""How many of these it tries for each that may fit, because it knows only the least memory that they need before."""
MOST_WITH_NODES = 24
"""How many layouts of ranks a search tries with shards of nodes."""
MOST_WITH_COPIES = 24
"""How many layouts of ranks a search tries with gathered weights on the host."""
MOST_ROUNDED, WORTH_ROUNDING = 24, 0.99
"""How many layouts of ranks a search tries with rounded travel, and the share of a step's seconds that may remain where
something is rounded. Rounding changes results a little, so it must pay."""
FAR_BEHIND = 2.5
"""Plans that take more than so many times as long as the best one by the formula are not run on the clock. On slow
links, the formula gives 0.5 to 1.2 times the clock's seconds."""
MOST_CLOCKED = 400_000
"""Forwards and backwards that a search runs on the clock, which takes it about three seconds."""
MOST_IN_PARTS, MOST_DECIDED = 200_000, 20_000
"""The same of plans whose backwards have two parts, whose programs take longer to build, and of plans for which it
decides what they keep, which takes some 300 microseconds for each."""


@dataclass(frozen=True)
class _Search:
    """A search for plans. The arguments are those of :func:`search`."""

    model: Model
    cluster: Cluster
    sequences: int
    suits: Suits
    allowed: Allowed
    tried: list[Configuration]
    """What it has looked at."""

    def by_bound(self) -> list[Plan]:
        """Returns the plans that may be among the fastest, beginning with those that have the shortest compute."""
        bounds = Bound(self.model, self.cluster)
        fastest: dict[str, float] = {}
        plans, without_plan, slow = [], [], set()
        bounded = [(bounds.seconds(one), one) for one in self._candidates()]
        for bound, configuration in sorted(bounded, key=lambda item: item[0]):
            method = method_of(configuration)
            if bound > WORTH_A_LOOK * fastest.get(method, inf):
                continue
            self.tried.append(configuration)
            prediction = predict(self.model, self.cluster, configuration)
            # Memory takes more time to predict than a step does.
            if prediction.seconds > WORTH_A_LOOK * fastest.get(method, inf):
                slow.add(configuration)
                without_plan.append(configuration)
            elif self._fits(configuration):
                plans.append(self._plan(configuration, prediction))
                fastest[method] = min(fastest.get(method, inf), prediction.seconds)
            else:
                without_plan.append(configuration)
        if not self.allowed.offload:
            return plans
        shortest = min(fastest.values(), default=inf)
        ways = [(one, way) for one in without_plan for way in ways_to_offload(one, self.cluster.host.disk > 0)]
        worth = [(max(bounds.seconds(way), bounds.on_host(way)), one, way) for one, way in ways]
        worth = sorted((each for each in worth if each[0] < shortest), key=lambda each: each[0])
        worth = [each for each in worth if each[1] not in slow or not self._fits(each[1])]
        return plans + self._on_host(lambda: ((one, way) for _, one, way in worth))

    def by_memory(self, best: int) -> list[Plan]:
        """Returns the plans that need least memory, enough of each method for ``best`` different ones."""
        in_memory = self._candidates()
        self.tried.extend(in_memory)
        plans = []
        for method in dict.fromkeys(map(method_of, in_memory)):
            by_memory = ascending(self.model, [one for one in in_memory if method_of(one) == method])
            that_fit = takewhile(lambda one: memory(self.model, one).fits(self.cluster), by_memory)
            plans += [self._predicted(one) for one in islice(that_fit, _SIMILAR * best)]
        if not self.allowed.offload:
            return plans

        def ways() -> Iterator[tuple[Configuration, Configuration]]:
            return (
                (one, way)
                for one in ascending(self.model, in_memory)
                for way in ways_to_offload(one, self.cluster.host.disk > 0)
            )

        return plans + self._on_host(ways)

    def _on_host(self, ways: Callable[[], Iterable[tuple[Configuration, Configuration]]]) -> list[Plan]:
        """Returns plans with offloading of the first ``ways`` that fit, and of the first that also store inputs."""
        plans = []
        for stores in (False, True):
            tried: Counter[tuple] = Counter()
            fitting: Counter[tuple] = Counter()
            for configuration in with_room(self.model, ways(), self.cluster):
                layout = layout_of(configuration)
                is_known = fitting[layout] == MOST_ALIKE or tried[layout] == TRIES * MOST_ALIKE
                if configuration.stores_inputs != stores or is_known:
                    continue
                tried[layout] += 1
                self.tried.append(configuration)
                if self._fits(configuration):
                    fitting[layout] += 1
                    plans.append(self._predicted(configuration))
                if fitting.total() == MOST_ON_HOST or tried.total() == TRIES * MOST_ON_HOST:
                    break
        return plans

    def with_nodes(self, plans: Sequence[Plan]) -> list[Plan]:
        """Returns the first layered plans at stage 3 with shards of nodes, as far as they fit. ``plans`` are sorted.
        Data-parallel ranks must fill more than one node."""
        found = []
        for plan in distinct([one for one in plans if node_ranks(one.configuration, self.cluster)])[:MOST_WITH_NODES]:
            ranks = node_ranks(plan.configuration, self.cluster)
            for replicated in (False, True):
                configuration = replace(plan.configuration, hierarchy=Hierarchy(ranks, replicated))
                if self._fits(configuration):
                    found.append(self._predicted(configuration))
        return found

    def with_copies(self, plans: Sequence[Plan]) -> list[Plan]:
        """Returns the first layered plans at stage 3 with gathered weights that wait on the host, as far as they fit
        and take less time so. ``plans`` are sorted."""
        found = []
        for plan in distinct([plan for plan in plans if gathers_again(plan.configuration)])[:MOST_WITH_COPIES]:
            copying = self._predicted(replace(plan.configuration, stores_weights=True))
            seconds = exact_seconds(self.model, self.cluster, plan.configuration)
            if copying.prediction.seconds < seconds and self._fits(copying.configuration):
                found.append(copying)
        return found

    def with_rounding(self, plans: Sequence[Plan]) -> list[Plan]:
        """Returns the first plans of this project's engine with as much of what travels rounded as shortens their
        steps, as far as they fit. ``plans`` are sorted."""
        found: list[Plan] = []
        if self.allowed.rounded is None:
            return found
        for plan in distinct(plans)[:MOST_ROUNDED]:
            best = plan
            for change in ways_to_round(plan.configuration, self.allowed.rounded):
                changed = self._predicted(replace(best.configuration, **change))
                pays = changed.prediction.seconds < WORTH_ROUNDING * best.prediction.seconds
                if pays and self._fits(changed.configuration):
                    best = changed
            found += [best] if best is not plan else []
        return found

    def on_the_clock(self, plans: Sequence[Plan]) -> list[Plan]:
        """Returns all ``plans``, which are sorted: the layered ones that may be the best have the seconds of the
        clock."""
        clocked, left = [], MOST_CLOCKED
        for plan in plans:
            computes = plan.configuration.computes
            near = plan.prediction.seconds <= FAR_BEHIND * plans[0].prediction.seconds
            if near and computes <= left and is_by_formula(plan.configuration):
                left -= computes
                seconds = exact_seconds(self.model, self.cluster, plan.configuration)
                plan = replace(plan, prediction=scaled(plan.prediction, seconds))
            clocked.append(plan)
        return clocked

    def recomputing_less(self, plans: Sequence[Plan]) -> list[Plan]:
        """Returns plans that recompute only what does not fit, as far as they are by the clock the fastest ones with so
        many ranks of each kind and such micro-batches: layered ones of their method, others of all. ``plans`` are all
        others. Plans come first that take least time if they recompute nothing."""
        found, left, tried, bounds = [], MOST_DECIDED, Counter[tuple](), Bound(self.model, self.cluster)
        fastest = fastest_by(lambda of: (layout_of(of), ranks_of(of)), plans)
        ways = [plan for plan in plans if may_keep(self.model, plan.configuration)]
        at_best = [plan.prediction.seconds * bounds.kept_share(plan.configuration) for plan in ways]
        for least, plan in sorted(zip(at_best, ways), key=itemgetter(0)):
            of = plan.configuration
            alike = layout_of(of) if is_layered(of) else ranks_of(of)
            if least >= fastest[alike] or tried[alike] == MOST_ALIKE or of.computes > left:
                continue
            if not self.suits(replace(of, recompute="auto")) or self._fits(without_recomputing(of)):
                continue
            left, tried[alike] = left - of.computes, tried[alike] + 1
            way = keeping(self.model, of, space_left(int(self.cluster.memory)))
            seconds = exact_seconds(self.model, self.cluster, way)
            if way.kept and seconds < fastest[alike] and self._fits(way):
                fastest[alike] = seconds
                found.append(self._plan(way, scaled(plan.prediction, seconds)))
        return found

    def with_second_parts(self, plans: Sequence[Plan]) -> list[Plan]:
        """Returns plans with backwards in two parts, as far as they fit, and are by the clock the fastest ones with so
        many ranks of each kind, such micro-batches and such rounding. ``plans`` are all others.

        What does not wait for other pipeline ranks remains, so plans with the least of that come first.
        """
        found, left, fastest = [], MOST_IN_PARTS, fastest_by(lambda of: [ranks_of(of)], plans)
        for plan in sorted(plans, key=lambda plan: plan.without_waits):
            alike = ranks_of(plan.configuration)
            for way in filter(self.suits, ways_to_split(self.model, plan.configuration)):
                if plan.without_waits >= fastest[alike] or way.computes > left:
                    continue
                left -= way.computes
                seconds = exact_seconds(self.model, self.cluster, way)
                if seconds < fastest[alike] and self._fits(way):
                    fastest[alike] = seconds
                    found.append(self._plan(way, scaled(plan.prediction, seconds)))
        return found

    def with_parts(self, plan: Plan) -> Plan:
        """Returns the plan with the clock's seconds of each part of the step, if the clock knows it."""
        of = plan.configuration
        if not (is_by_formula(of) or of.split_backward or of.recompute == "auto"):
            return plan
        return replace(plan, prediction=predict(self.model, self.cluster, of, on_clock=True))

    def _candidates(self) -> list[Configuration]:
        found = candidates(self.model, self.cluster, self.sequences, self.allowed.state)
        return [one for one in found if self.suits(one)]

    def hope(self) -> str:
        """Returns how the sentence on what is missing ends: with state in bf16, if a plan would fit then."""
        # Islands, where nothing is offloaded, have plans in fp32 alone.
        if self.allowed.state == "bf16" or not self.allowed.offload:
            return ""
        others = replace(self, allowed=self.allowed._replace(state="bf16"), tried=[])
        return IN_BF16 if others.by_bound() else ""

    def _fits(self, configuration: Configuration) -> bool:
        """Whether a configuration may be a plan, and the cluster has the memory."""
        return self.suits(configuration) and fits(self.model, configuration, self.cluster)

    def _predicted(self, configuration: Configuration) -> Plan:
        return self._plan(configuration, predict(self.model, self.cluster, configuration))

    def _plan(self, configuration: Configuration, prediction: Prediction) -> Plan:
        return Plan(configuration, prediction, memory(self.model, configuration), self.cluster.price)


def distinct(plans: Sequence[Plan]) -> list[Plan]:
    """Returns the first plan of each method and layout of ranks."""
    return list(first_by(lambda plan: layout_of(plan.configuration), plans).values())


def fastest_by(keys: Callable[[Configuration], Iterable[Key]], plans: Iterable[Plan]) -> dict[Key, float]:
    """Returns the seconds of the fastest plan with each of its ``keys``."""
    slowest_first = sorted(plans, key=lambda plan: -plan.prediction.seconds)
    return {key: plan.prediction.seconds for plan in slowest_first for key in keys(plan.configuration)}


def best_by_method(plans: Sequence[Plan]) -> dict[str, Plan]:
    """Returns the first plan of each method, in the order of ``plans``."""
    return first_by(lambda plan: plan.method, plans)


def first_by(key: Callable[[AnyPlan], Key], plans: Iterable[AnyPlan]) -> dict[Key, AnyPlan]:
    """Returns the first plan with each ``key``, in the order of ``plans``."""
    first: dict[Key, AnyPlan] = {}
    for plan in plans:
        first.setdefault(key(plan), plan)
    return first


_RANK: dict[str, Callable[[Plan], tuple[float, float]]] = {
    "time": lambda plan: (plan.prediction.seconds, plan.memory.total),
    "cost": lambda plan: (plan.dollars or 0.0, plan.prediction.seconds),
    "memory": lambda plan: (plan.memory.total, plan.prediction.seconds),
}
