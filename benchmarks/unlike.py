"""Times whole training steps on islands of nodes with a slow network between them: ``python -m benchmarks run unlike``.
``--part`` measures one network alone, which takes minutes, and keeps what is recorded of the others.

Every rank is a node in a network namespace. Nodes of an island reach each other at ``FAST``. What leaves an island goes
through one slower link. All contenders train the same model on the same batches. The record has the seconds of a step,
the bytes that leave all islands in it, as the kernel counts them, and how much longer a step is than with a fast
network everywhere.

The order of ranks decides which of them are neighbours. ``ds_lgamp run --cluster`` keeps data-parallel ranks inside an
island; a launcher that alternates between islands puts them on both sides of the slow link.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

from benchmarks.contenders import Contender, Layout, Training
from benchmarks.contenders.fsdp import Accumulation
from benchmarks.contenders.lgamp import Layered
from benchmarks.contenders.megatron_core import MegatronCore
from benchmarks.contenders.pipelining import Pipeline
from benchmarks.contenders.zero import Zero
from benchmarks.model import ModelSize
from benchmarks.record import OURS, PART, Config, Record, begin
from benchmarks.training import Duration, compete
from testing.namespaces import Network, NetworkUnavailable, throttled_network

NAME = "unlike"
SIZE = ModelSize(blocks=8, width=128, sequence=128, vocabulary=1024)
ROUNDS = 3
MICRO_BATCHES = 4
"""Per data-parallel rank, if all ranks are data-parallel. The batch is the same in every layout."""
FAST = "1000mbit"
PLAIN = f"{OURS}, ZeRO-3"
BY_ISLAND, ALTERNATING = "by island", "alternating"
"""Orders of ranks."""
RATIO, BOUND = "step / fast everywhere", "bound / fast everywhere"
"""The bound is the step with a fast network everywhere, or the time that the slow links need for the step's bytes."""
LIMIT, GAIN = 1.10, 2.0
"""Largest step of ours relative to its bound, and least gain over alternating ranks."""


Found = dict[str, list[Duration]]
"""Counted steps by contender."""


class Place(NamedTuple):
    """A network of islands, and how many ranks a pipeline has in it."""

    name: str
    islands: tuple[int, ...]
    """The island of every node."""
    between: str
    pipeline_ranks: int

    @property
    def island_nodes(self) -> int | None:
        """How many nodes every island has; None if they differ."""
        sizes = set(Counter(self.islands).values())
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def part(self) -> str:
        """The name of what is measured with it, which a network that is fast everywhere belongs to as well."""
        return f"{self.name}, {self.between}"

    @property
    def orders(self) -> tuple[str, ...]:
        """The orders of ranks that differ in what crosses between islands."""
        return (BY_ISLAND, ALTERNATING) if min(Counter(self.islands).values()) > 1 else (BY_ISLAND,)

    def config(self, order: str) -> Config:
        """Returns the configuration of a row."""
        return {PART: self.part, "between": self.between, "order": order}

    def nodes_of_ranks(self, order: str) -> list[int]:
        """Returns the node of every rank."""
        nodes = range(len(self.islands))
        if order == BY_ISLAND:
            return list(nodes)
        turn = {node: self.islands[:node].count(self.islands[node]) for node in nodes}
        return sorted(nodes, key=lambda node: (turn[node], node))


PLACES = [
    *(Place("two islands", (0, 0, 1, 1), rate, 2) for rate in ("200mbit", "50mbit")),
    Place("three islands", (0, 0, 1, 1, 2, 2), "100mbit", 3),
    Place("one slow node", (0, 0, 0, 1), "100mbit", 4),
]


class Entering(NamedTuple):
    """Moves every rank to its node."""

    network: Network
    nodes_of_ranks: list[int]

    def __call__(self, rank: int) -> None:
        self.network.enter(self.nodes_of_ranks[rank])


class Arranged:
    """A training as pipelines, which compute the micro-batches of all of their ranks."""

    def __init__(self, layout: Layout, pipeline_ranks: int, build: Callable[[Layout], Training]) -> None:
        self._pipeline_ranks = pipeline_ranks
        self._arranged = build(Layout(pipeline_ranks, layout.data_ranks // pipeline_ranks, layout.size))

    def step(self, step: int, micro_batches: int) -> float | None:
        return self._arranged.step(step, micro_batches * self._pipeline_ranks)

    def held(self) -> int:
        return self._arranged.held()


def run(
    part: str | None = None,
    size: ModelSize = SIZE,
    micro_batches: int = MICRO_BATCHES,
    repetitions: int = ROUNDS,
) -> Record:
    """Measures every place, or the one that is named, with a fast network everywhere and in its orders of ranks."""
    record = begin(NAME)
    try:
        for place in PLACES:
            if part in (None, place.part):
                arguments = record, place, size, micro_batches, repetitions
                fast = _measure(*arguments, BY_ISLAND, FAST)
                by_order = {order: _measure(*arguments, order, place.between) for order in place.orders}
                enter(record, place, by_order, fast)
    except NetworkUnavailable as reason:
        record.lack_network("nothing measured between islands", reason)
    return record


def contenders(place: Place, size: ModelSize = SIZE, order: str = BY_ISLAND) -> list[Contender]:
    """Returns the contenders. Pipelines have one rank in every island."""
    # Stock DeepSpeed first: an engine for a pipeline changes what it takes for its groups.
    return [*_stock(place, order), *_torch(place), *_peers_in_pipelines(place, size), *_ours(place)]


def _stock(place: Place, order: str) -> list[Contender]:
    """Stock DeepSpeed. Its hpZ runs by island only, because whoever sets it knows which ranks share a node."""
    ways = {"": {}, ", hpZ": {"hpz": place.island_nodes}} if place.island_nodes and order == BY_ISLAND else {"": {}}
    return [
        Contender(f"DeepSpeed ZeRO-3{way}{reduction}", partial(Zero, stage=3, deferred_reduce=deferred, **settings))
        for way, settings in ways.items()
        for reduction, deferred in (("", False), (", coalesced reduction", True))
    ]


def _torch(place: Place) -> list[Contender]:
    """PyTorch's FSDP2, where islands are equal also with shards inside them (HSDP)."""
    name, replicas = "FSDP2", 1
    if place.island_nodes:
        name, replicas = "FSDP2 HSDP", len(place.islands) // place.island_nodes
    return [
        Contender(f"{name}, deferred sync", partial(Accumulation, deferred_sync=True, replicas=replicas)),
        Contender(f"{name}, kept unsharded", partial(Accumulation, deferred_sync=True, kept=True, replicas=replicas)),
    ]


def _peers_in_pipelines(place: Place, size: ModelSize) -> list[Contender]:
    """Other looped pipelines, which need as many blocks on every rank."""
    if size.blocks % place.pipeline_ranks:
        return []
    ways: dict[str, Callable[[Layout], Training]] = {
        "torch LoopedBFS + FSDP2": partial(Pipeline, schedule="looped_bfs", reshard=True),
        "Megatron-core interleaved, one group": partial(MegatronCore, interleaved=True, one_group=True),
    }
    return [Contender(f"{name}, pipelines", _arranged(place, build)) for name, build in ways.items()]


def _ours(place: Place) -> list[Contender]:
    # Without deferring them, single steps would not show the refreshes behind them.
    own = partial(Layered, zero_stage=3, resident_chunks=2, defer_gathers=True)
    ways: dict[str, Callable[[Layout], Training]] = {PLAIN: own}
    if place.island_nodes:
        ways[f"{PLAIN}, hpZ"] = partial(own, zero={"zero_hpz_partition_size": place.island_nodes})
        ways[f"{PLAIN}, MiCS"] = partial(own, zero={"mics_shard_size": place.island_nodes})
    ways[f"{PLAIN}, pipelines"] = _arranged(place, own)
    return [Contender(name, build) for name, build in ways.items()]


def _arranged(place: Place, build: Callable[[Layout], Training]) -> Callable[[Layout], Training]:
    return partial(Arranged, pipeline_ranks=place.pipeline_ranks, build=build)


def _measure(
    record: Record, place: Place, size: ModelSize, micro_batches: int, repetitions: int, order: str, between: str
) -> Found:
    """Enters seconds and bytes of a step of every contender, with the rate ``between`` islands."""
    layout = Layout(1, len(place.islands), size)
    with throttled_network(len(place.islands), FAST, place.islands, between) as network:
        entering = Entering(network, place.nodes_of_ranks(order))
        arguments = {NAME: contenders(place, size, order)}, layout, micro_batches, repetitions
        found = compete(*arguments, entering, meter=network.carried)[NAME]
    for name, durations in found.items():
        config = place.config(order) | {"between": between}
        record.add(name, config, "step", [duration.wall for duration in durations], "s")
        record.add(name, config, "bytes between islands", [duration.metered for duration in durations], "bytes")
    return found


def enter(record: Record, place: Place, by_order: Mapping[str, Found], fast: Found) -> None:
    """Enters how much longer steps are than with a fast network everywhere, their bounds, and the targets."""
    bounds = {}
    for order, found in by_order.items():
        config = place.config(order)
        for name, durations in found.items():
            unhindered = _step(fast[name])
            bounds[order, name] = max(unhindered, seconds_between(place, durations))
            record.add(name, config, RATIO, [_step(durations) / unhindered], "ratio")
            record.add(name, config, BOUND, [bounds[order, name] / unhindered], "ratio")
    near = by_order[BY_ISLAND]
    ours = min((name for name in fast if name.startswith(OURS)), key=lambda name: _step(near[name]))
    where = f"{place.part}: {ours.removeprefix(f'{OURS}, ')}"
    bound, steps = bounds[BY_ISLAND, ours], [duration.wall for duration in near[ours]]
    record.aim(f"{where}, step / bound", median(steps) / bound, LIMIT, samples=[step / bound for step in steps])
    if ALTERNATING in by_order:
        far = _step(by_order[ALTERNATING][ours])
        text = f"{where}, step / step of alternating ranks"
        record.aim(text, median(steps) / far, 1 / GAIN, floor=bound / far, samples=[step / far for step in steps])
    peers = min(_step(durations) for name, durations in near.items() if not name.startswith(OURS))
    record.aim(f"{where}, step / fastest peer's", median(steps) / peers, 1)


def seconds_between(place: Place, durations: Sequence[Duration]) -> float:
    """Returns the least seconds in which the nodes can send what they send between islands, if all send alike."""
    rate = float(place.between.removesuffix("mbit")) * 1e6 / 8
    return median(duration.metered for duration in durations) / len(place.islands) / rate


def _step(durations: Sequence[Duration]) -> float:
    return median(duration.wall for duration in durations)
