"""Where the time of a recorded step went, in numbers."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from ds_lgamp.view.critical_path import Causes, Place, causes, critical_path, with_arrivals
from ds_lgamp.view.recording import Recording, RecordingError, Step

COMPUTE = ("forward", "backward", "step")
WAITS = ("gather", "reduce", "activation", "gradient", "send", "load", "store", "data")
IDLE = "idle"
"""What is neither compute nor a recorded wait: the end of the step on other ranks, and the host between actions."""
KINDS = (*COMPUTE, *WAITS, IDLE)
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
