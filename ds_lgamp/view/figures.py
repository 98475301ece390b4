"""A recorded step in numbers: where its time went, and how long its actions took, for the clock to run the
program again."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from ds_lgamp.schedule.actions import COLLECTIVES, COMPUTE, Action, Kind
from ds_lgamp.schedule.costs import Costs, Durations, Link, links_of, uniform_costs
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import Offload, ProgramSpec
from ds_lgamp.view.critical_path import (
    Causes,
    Peers,
    Place,
    action_of,
    causes,
    critical_path,
    micro_batches_of,
    with_arrivals,
)
from ds_lgamp.view.recording import Interval, Recording, RecordingError, Step, of_simulation

COMPUTE_KINDS = ("forward", "backward", "step")
WAITS = ("gather", "reduce", "activation", "gradient", "send", "load", "store", "data")
IDLE = "idle"
"""What is neither compute nor a recorded wait: the end of the step on other ranks, and the host between actions."""
KINDS = (*COMPUTE_KINDS, *WAITS, IDLE)
LABELS = {"step": "update"}
"""What readers see in place of a kind's own name."""
BETWEEN = "between"
"""On the critical path: time between an interval and the one that follows it, in which the rank waited for nothing."""


@dataclass
class Figures:
    """The numbers of one step."""

    source: str
    """measured or simulated."""
    step: int
    seconds: float
    """From the first start to the last end on any rank."""
    bubble: float
    """(seconds - ideal) / ideal, where ideal is the mean over the ranks of their forwards and backwards."""
    by_rank: list[dict[str, float]]
    """Seconds of each of KINDS on every rank. They add up to ``seconds``."""
    peak_bytes: list[int]
    """The most bytes alive on each rank's device; 0 if unknown."""
    critical_path: dict[str, float]
    """Seconds of the critical path by what they went into: compute kinds, lanes, waits and ``between``."""

    def mean(self, kind: str) -> float:
        """Returns the seconds of a kind, as the mean over the ranks."""
        return fmean(rank[kind] for rank in self.by_rank)

    def most(self, kind: str) -> tuple[float, int]:
        """Returns the most seconds of a kind on one rank, and the first rank that has as many."""
        times = [rank[kind] for rank in self.by_rank]
        return max(times), next(rank for rank, spent in enumerate(times) if spent >= max(times) * (1 - 1e-6))

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "mean": {kind: self.mean(kind) for kind in KINDS}}


@dataclass
class Shown:
    """One step of a recording on all ranks, with what can be derived from it."""

    recording: Recording
    steps: list[Step]
    """Of each rank, with sends that end when their message is used."""
    causes: Causes
    path: list[Place]
    figures: Figures

    @property
    def title(self) -> str:
        """Such as "measured, step 3", or "simulated"."""
        step = f", step {self.figures.step}" if self.recording.source == "measured" else ""
        return f"{self.recording.source}{step}"

    @property
    def start(self) -> float:
        return min(step.start for step in self.steps)


def show(recording: Recording, number: int | None = None) -> Shown:
    """Returns a step that all ranks recorded: the one of this number, else that of median length.

    Raises RecordingError if there is none.
    """
    spec = recording.program_spec()
    steps = with_arrivals(spec, recording.ranks, _pick(recording, number))
    found = causes(spec, recording.ranks, steps)
    path = critical_path(steps, found)
    seconds = _length(steps)
    by_rank = [_by_kind(step, seconds) for step in steps]
    ideal = fmean(rank["forward"] + rank["backward"] for rank in by_rank)
    figures = Figures(
        source=recording.source,
        step=steps[0].step,
        seconds=seconds,
        bubble=(seconds - ideal) / ideal if ideal else 0.0,
        by_rank=by_rank,
        peak_bytes=[max((alive for _, alive in step.memory), default=0) for step in steps],
        critical_path=_along(steps, path),
    )
    return Shown(recording, steps, found, path, figures)


def _pick(recording: Recording, number: int | None) -> list[Step]:
    by_number = [{step.step: step for step in rank.steps} for rank in recording.ranks]
    common = sorted(set.intersection(*map(set, by_number)))
    if not common:
        raise RecordingError("no step is recorded on all ranks; record more steps")
    if number is None:
        by_length = sorted(common, key=lambda each: _length([steps[each] for steps in by_number]))
        number = by_length[(len(by_length) - 1) // 2]
    elif number not in common:
        raise RecordingError(f"--step is {number}, which is not recorded; use one of {_listed(common)}")
    return [steps[number] for steps in by_number]


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _length(steps: Sequence[Step]) -> float:
    return max(step.end for step in steps) - min(step.start for step in steps)


def _by_kind(step: Step, seconds: float) -> dict[str, float]:
    spent = dict.fromkeys(KINDS, 0.0)
    for each in step.intervals:
        if each.lane in ("compute", "wait"):
            spent[each.kind] += each.end - each.start
    spent[IDLE] = max(0.0, seconds - sum(spent.values()))
    return spent


def _along(steps: Sequence[Step], path: Sequence[Place]) -> dict[str, float]:
    """Returns the seconds of the critical path by what they went into. Each moment counts once."""
    spent: defaultdict[str, float] = defaultdict(float)
    now = min(step.start for step in steps)
    for place in path:
        each = steps[place.rank].intervals[place.interval]
        start, end = max(each.start, now), max(each.end, now)
        for kind, time in _waits(steps[place.rank], now, start):
            spent[kind] += time
        spent[each.kind if each.lane == "compute" else each.lane] += end - start
        now = end
    spent[BETWEEN] += max(step.end for step in steps) - now
    # Sums of rounded times that should be zero may not be.
    return {kind: time for kind, time in spent.items() if time > 1e-9 * now}


def _waits(step: Step, start: float, end: float) -> Iterator[tuple[str, float]]:
    """Yields what a rank waited for between two times, and for how long; what is left is BETWEEN."""
    left = end - start
    for each in step.intervals if left > 0 else ():
        within = min(each.end, end) - max(each.start, start)
        if each.lane == "wait" and within > 0:
            yield each.kind, within
            left -= within
    yield BETWEEN, max(left, 0.0)


def simulated(shown: Shown) -> Recording:
    """Returns the recording of the same program on the clock, where each action takes what it took on average."""
    spec = shown.recording.program_spec()
    timeline = simulate(spec, build_program(spec), costs_of(shown))
    return of_simulation(spec, timeline, shown.recording.version)


def simulated_1f1b(shown: Shown) -> Recording:
    """Returns the recording of 1F1B at stage 1 on the clock: the layers in their order, one chunk on each rank, which
    takes as long as the chunks with these layers took on average in a step. The host updates if it did so."""
    costs, recorded = costs_of(shown), shown.recording.program_spec()
    ranks, micro_batches = recorded.pipeline_ranks, recorded.micro_batches
    spec = ProgramSpec(tuple(range(ranks)), "1f1b", micro_batches, micro_batches, zero_stage=1)
    if recorded.offload is not None:
        spec = replace(spec, offload=Offload(parameters=False), updates=recorded.updates, defers_gathers=True)
    home = place_chunks("contiguous", recorded.chunks, ranks)

    def together(times: Sequence[float]) -> list[float]:
        return [sum(time for time, rank in zip(times, home) if rank == each) for each in range(ranks)]

    def with_nodes(inside: Sequence[float], between: Sequence[float]) -> list[float]:
        """Adds up both kinds of collectives: stage 1 has no shards of nodes, so its gathers and sums take both ways."""
        return [sum(pair) for pair in zip(inside, between, strict=True)] if between else list(inside)

    hop = fmean(costs.hop.values()) if costs.hop else 0.0
    whole = replace(
        uniform_costs(spec, Durations(hop=hop)),
        forward=together(costs.forward),
        backward=together(costs.backward),
        gather=together(with_nodes(costs.gather, costs.refresh)),
        reduce=together(with_nodes(costs.reduce, costs.combine)),
        update=together(costs.update),
        load=together(costs.load) if spec.offload else (),
        store=together(costs.store) if spec.offload else (),
    )
    return of_simulation(spec, simulate(spec, build_program(spec), whole), shown.recording.version)


def costs_of(shown: Shown) -> Costs:
    """Returns mean durations of a recorded step, in seconds.

    Computes, transfers and updates are means by chunk, over micro-batches and the ranks that have as many micro-batches
    as the program. Collectives last from the last launch of a rank that takes part, or the last end before, to the
    first end. On each link, the fastest message counts for which an idle rank waited; where none did, the mean of the
    other links. Messages and collectives share no network card, because a recording does not show waits for one.
    """
    spec = shown.recording.program_spec()
    means = _means(shown, spec)

    def by_chunk(kind: Kind) -> list[float]:
        return [means.get(Action(kind, chunk), 0.0) for chunk in range(spec.chunks)]

    second_parts = by_chunk(Kind.WEIGHTS_BACKWARD)
    return Costs(
        forward=by_chunk(Kind.FORWARD),
        backward=[sum(parts) for parts in zip(by_chunk(Kind.BACKWARD), second_parts)],
        # A measured backward includes the recomputation.
        recompute=[0.0] * spec.chunks,
        gather=by_chunk(Kind.GATHER),
        reduce=by_chunk(Kind.REDUCE),
        hop=(hops := _hops(shown, spec)),
        message=dict.fromkeys(hops, 0.0),
        update=_updates(shown, spec, by_chunk(Kind.UPDATE)),
        tied=[0.0] * spec.pipeline_ranks,
        refresh=by_chunk(Kind.REFRESH) if spec.hierarchy else (),
        combine=by_chunk(Kind.COMBINE) if spec.hierarchy else (),
        load=by_chunk(Kind.LOAD) if spec.offload else (),
        store=by_chunk(Kind.STORE) if spec.offload else (),
        input=by_chunk(Kind.STORE_INPUT) if spec.stores_inputs else (),
        weights=by_chunk(Kind.LOAD_WEIGHTS) if spec.stores_weights else (),
        weights_backward=second_parts if spec.split_chunks else (),
    )


def _means(shown: Shown, spec: ProgramSpec) -> dict[Action, float]:
    """Returns the mean duration of each kind of action on each chunk."""
    durations: defaultdict[Action, list[float]] = defaultdict(list)
    collectives: defaultdict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    peers = Peers(spec, shown.recording.ranks)
    for rank, step in enumerate(shown.steps):
        # Faster data-parallel ranks may have more micro-batches.
        has_as_many = micro_batches_of(step) == spec.micro_batches
        # A backward may have two intervals: it recomputes, waits for the gradient, and goes on.
        spent: defaultdict[Action, float] = defaultdict(float)
        number: defaultdict[str, int] = defaultdict(int)
        for action, start, each in _queued(step.intervals):
            if action.kind in COLLECTIVES:
                together = *peers.group(rank, action.kind), number[each.name], action
                collectives[together].append((start, each.end))
                number[each.name] += 1
            elif has_as_many:
                spent[action] += each.end - start
        for action, time in spent.items():
            durations[action._replace(micro_batch=-1)].append(time)
    for (*_, action), times in collectives.items():
        starts, ends = zip(*times)
        durations[action].append(max(min(ends) - max(starts), 0.0))
    return {action: fmean(times) for action, times in durations.items()}


def _queued(intervals: Sequence[Interval]) -> Iterator[tuple[Action, float, Interval]]:
    """Yields the actions with the times when they really began: after the one before them in their lane."""
    free: defaultdict[str, float] = defaultdict(float)
    for each in sorted(intervals, key=lambda each: each.start):
        action = action_of(each.name)
        if action is not None and each.lane not in ("wait", "send"):
            yield action, min(max(each.start, free[each.lane]), each.end), each
            free[each.lane] = max(each.end, free[each.lane])


def _hops(shown: Shown, spec: ProgramSpec) -> Mapping[Link, float]:
    made: dict[tuple[int, Action], float] = {}
    uses: list[tuple[int, Action, float, float]] = []
    for rank, step in enumerate(shown.steps):
        idle = step.start
        for each in step.intervals:
            action = action_of(each.name)
            if each.lane == "compute" and action is not None and action.kind in COMPUTE:
                made[rank, action] = each.end
                uses.append((rank, action, idle, each.start))
                idle = each.end
    peers, fastest = Peers(spec, shown.recording.ranks), dict.fromkeys(links_of(spec), float("inf"))
    for rank, action, idle, start in uses:
        chunk = spec.source_chunk(action)
        if chunk is None or not spec.receives_input(action):
            continue
        sender = peers.at(spec.placement[chunk], rank)
        sent = None if sender is None else made.get((sender, Action(action.kind, chunk, action.micro_batch)))
        # A rank that is busy starts late on a message that has long arrived.
        if sent is not None and idle <= sent:
            link = spec.placement[chunk], spec.placement[action.chunk]
            fastest[link] = min(fastest[link], start - sent)
    times = [time for time in fastest.values() if time < float("inf")]
    known = fmean(times) if times else 0.0
    return {link: max(time if time < float("inf") else known, 0.0) for link, time in fastest.items()}


def _updates(shown: Shown, spec: ProgramSpec, by_chunk: list[float]) -> list[float]:
    """Returns the update of every chunk. The chunks of a rank that STEP updates share its time in equal parts."""
    at_step = [chunk for chunk, update in spec.chunk_updates.items() if update.when == "step"]
    if not at_step:
        return by_chunk
    steps: defaultdict[int, list[float]] = defaultdict(list)
    for rank, step in zip(shown.recording.ranks, shown.steps):
        steps[rank.pipeline_rank].append(
            sum(each.end - each.start for each in step.intervals if each.lane == "compute" and each.kind == "step")
        )
    sharing = Counter(spec.placement[chunk] for chunk in at_step)
    shares = {chunk: fmean(steps[rank]) / sharing[rank] for chunk in at_step for rank in [spec.placement[chunk]]}
    return [shares.get(chunk, time) for chunk, time in enumerate(by_chunk)]
