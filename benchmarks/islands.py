"""Compares steps on islands with the clock: ``python -m benchmarks run islands``. ``--part`` measures one network.

Compute is virtual (every chunk sleeps). Messages and collectives are real and go through the networks of ``unlike.py``.
The clock (``ds_lgamp/planner/island_search.py``) knows the cluster file and the program. It takes every link at its
full rate, messages as free of any work on the host, and every collective for a ring. The reductions here are
all-to-alls, which send less between islands.

Pipelines have a rank in every island. The same chunks also run without a pipeline, on as many data-parallel ranks.
"""

import gc
from dataclasses import replace
from functools import partial
from statistics import median
from typing import NamedTuple

from benchmarks.record import OURS, Config, Record, begin
from benchmarks.unlike import ALTERNATING, BY_ISLAND, FAST, GAIN, LIMIT, Entering, Place
from benchmarks.virtual.chunk import Setting
from benchmarks.virtual.pipelines import Executed, spec_of
from benchmarks.virtual.steps import Start, Step, check_durations, is_precise, scheduling, time_step
from ds_lgamp.cost.assignment import Assignment, Demand
from ds_lgamp.planner.assign import as_launched
from ds_lgamp.planner.island_search import network_costs
from ds_lgamp.planner.islands import IslandCluster, parse_islands
from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from testing.namespaces import NetworkUnavailable, throttled_network
from testing.ranks import run_on_ranks

NAME = "islands"
PLACES = [
    *(Place("two islands", (0, 0, 1, 1), rate, 2) for rate in ("200mbit", "50mbit")),
    Place("three islands", (0, 0, 1, 1, 2, 2), "100mbit", 3),
    Place("one slow node", (0, 0, 0, 1), "100mbit", 4),
]
CHUNKS, MICRO_BATCHES = 12, 24
"""Of the model, and of the batch over all ranks."""
FORWARD, ELEMENTS, PARAMETERS = 0.006, 4096, 500_000
"""Seconds of a chunk's forward, and fp32 numbers of a message and of a chunk."""
ZERO_STAGE, RESIDENT = 3, 2
REPETITIONS, SECONDS = 3, 600
PIPELINES, WITHOUT = f"{OURS}, pipelines", f"{OURS}, no pipeline"
STEP, CLOCK, OVER_CLOCK, OVER_FAST = "step", "clock", "step / clock", "step / fast everywhere"


def settings_of(place: Place) -> dict[str, Setting]:
    """Returns the same work with and without pipelines."""
    ranks, pipeline_ranks = len(place.islands), place.pipeline_ranks
    return {
        name: Setting(
            rows,
            CHUNKS // rows,
            MICRO_BATCHES // (ranks // rows),
            FORWARD,
            2 * FORWARD,
            ELEMENTS,
            ranks // rows,
            PARAMETERS,
        )
        for name, rows in ((PIPELINES, pipeline_ranks), (WITHOUT, 1))
    }


class OnRank(NamedTuple):
    """Results of one rank."""

    steps: dict[str, list[Step]]
    precise: bool


Found = dict[str, list[float]]
"""Seconds of the steps, by contender."""


def run(part: str | None = None, repetitions: int = REPETITIONS) -> Record:
    """Measures every place, or the one that is named, with a fast network everywhere and in its orders of ranks."""
    record = begin(NAME)
    try:
        for place in PLACES:
            if part in (None, place.part):
                fast = _measure(record, place._replace(between=FAST), BY_ISLAND, repetitions)
                by_order = {order: _measure(record, place, order, repetitions) for order in place.orders}
                enter(record, place, by_order, fast)
    except NetworkUnavailable as reason:
        record.lack_network("nothing measured between islands", reason)
    return record


def _measure(record: Record, place: Place, order: str, repetitions: int) -> Found:
    settings = settings_of(place)
    with throttled_network(len(place.islands), FAST, place.islands, place.between) as network:
        before = Start(Entering(network, place.nodes_of_ranks(order)))
        on_ranks = run_on_ranks(
            len(place.islands), _measure_on_rank, settings, repetitions, before_init=before, seconds=SECONDS
        )
    record.machine["scheduling"] = scheduling(all(rank.precise for rank in on_ranks))
    found: Found = {}
    for name, setting in settings.items():
        found |= check_durations(setting, [{name: rank.steps[name]} for rank in on_ranks])
    return found


def _measure_on_rank(settings: dict[str, Setting], repetitions: int) -> OnRank:
    build = partial(Executed, schedule="layered", zero_stage=ZERO_STAGE, resident_chunks=RESIDENT)
    pipelines = {name: build(setting) for name, setting in settings.items()}
    gc.collect()
    gc.freeze()
    steps: dict[str, list[Step]] = {name: [] for name in pipelines}
    for _ in range(repetitions + 1):
        for name, pipeline in pipelines.items():
            steps[name].append(time_step(pipeline))
    return OnRank(steps, is_precise())


def enter(record: Record, place: Place, by_order: dict[str, Found], fast: Found) -> None:
    """Enters steps, what the clock says, and the targets. ``fast`` has the steps with a fast network everywhere."""
    on_clock: dict[tuple[str, str], float] = {}
    runs = [(BY_ISLAND, place._replace(between=FAST), fast), *((order, place, by_order[order]) for order in by_order)]
    for order, network, found in runs:
        config: Config = place.config(order) | {"between": network.between}
        for name, seconds in found.items():
            clock = on_clock[order, name] = seconds_on_clock(network, order, settings_of(place)[name])
            record.add(name, config, STEP, [step * 1000 for step in seconds], "ms")
            record.add(name, config, CLOCK, [clock * 1000], "ms")
            record.add(name, config, OVER_CLOCK, [step / clock for step in seconds], "ratio")
            if found is not fast:
                record.add(name, config, OVER_FAST, [median(seconds) / median(fast[name])], "ratio")
    near = median(by_order[BY_ISLAND][PIPELINES])
    record.aim(f"{place.part}: pipelines, {OVER_FAST}", near / median(fast[PIPELINES]), LIMIT)
    # Where compute hides the slow links in any order, none can gain.
    if on_clock.get((ALTERNATING, PIPELINES), 0.0) >= GAIN * on_clock[BY_ISLAND, PIPELINES]:
        far = median(by_order[ALTERNATING][PIPELINES])
        record.aim(f"{place.part}: pipelines, step / step of alternating ranks", near / far, 1 / GAIN)


def seconds_on_clock(place: Place, order: str, setting: Setting) -> float:
    """Returns the step if all links had their full rates, and nothing but them and the sleeps took time."""
    cluster = cluster_of(place)
    spec = spec_of("layered", setting, ZERO_STAGE, RESIDENT)
    demand = demand_of(setting)
    assignment = _assignment(cluster, place, order, demand)
    program = build_program(spec)
    costs = network_costs(cluster, assignment, demand, spec, [setting.parameters + 1] * setting.chunks, program)
    lengths = [setting.length(chunk) for chunk in range(setting.chunks)]
    timed = replace(
        costs,
        forward=[setting.forward * length for length in lengths],
        backward=[setting.backward * length for length in lengths],
    )
    return simulate(spec, program, timed).step_time


def demand_of(setting: Setting) -> Demand:
    """Returns what a step sends."""
    program = build_program(spec_of("layered", setting, ZERO_STAGE, RESIDENT))
    part = 4 * -(-(setting.parameters + 1) // setting.data_ranks) * (setting.data_ranks - 1)
    hops = [0] * setting.pipeline_ranks
    for own, following in zip(setting.placement, setting.placement[1:]):
        hops[own] += own != following
    return Demand(
        setting.pipeline_ranks,
        setting.data_ranks,
        1,
        tuple(part * sum(action.kind in (Kind.GATHER, Kind.REDUCE) for action in actions) for actions in program),
        tuple(4 * setting.elements * setting.micro_batches * count for count in hops),
    )


def cluster_of(place: Place) -> IslandCluster:
    """Returns the cluster file that describes a place."""
    text = {
        "name": place.name,
        "islands": [
            {
                "name": f"island{island}",
                "nodes": [str(node) for node, own in enumerate(place.islands) if own == island],
                "gpus_per_node": 1,
                "network": "ethernet",
                **_link(FAST),
            }
            for island in sorted(set(place.islands))
        ],
        "between": _link(place.between),
    }
    return parse_islands(text)


def _link(rate: str) -> dict[str, str]:
    return {"bandwidth": f"{rate.removesuffix('mbit')} Mbit/s", "latency": "1 ns"}


def _assignment(cluster: IslandCluster, place: Place, order: str, demand: Demand) -> Assignment:
    slots = {slot.node: slot for slot in cluster.slots}
    return as_launched(cluster, demand, [slots[str(node)] for node in place.nodes_of_ranks(order)])
