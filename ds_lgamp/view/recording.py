"""Recordings of steps: what a simulated program would do and what a run did, in one form on disk.

A recording is a folder. ``recording.json`` holds the version of the format, the source, the spec and the number of
ranks. ``rank_N.jsonl`` begins with a line about the rank. A line for each step follows, whole or not at all, so that a
job that is killed leaves what it has finished.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from ds_lgamp.schedule.actions import BETWEEN_NODES, COLLECTIVES, TRANSFERS, Kind, awaited_by, send_of
from ds_lgamp.schedule.card import Span, Wait
from ds_lgamp.schedule.simulate import Timeline
from ds_lgamp.schedule.spec import Hierarchy, Offload, ProgramSpec

VERSION = 1
"""Of the format."""
LANES = ("compute", "wait", "gather", "reduce", "between nodes", "send", "load", "store", "host update")
"""What a rank does at the same time. Its intervals do not overlap in the lane compute; in others they may."""
_ORDER = {lane: number for number, lane in enumerate(LANES)}
LANE_OF = {
    Kind.GATHER: "gather",
    Kind.REDUCE: "reduce",
    **dict.fromkeys(BETWEEN_NODES, "between nodes"),
    Kind.SEND_FORWARD: "send",
    Kind.SEND_BACKWARD: "send",
    Kind.LOAD: "load",
    Kind.LOAD_INPUT: "load",
    Kind.LOAD_WEIGHTS: "load",
    Kind.STORE: "store",
    Kind.STORE_INPUT: "store",
    Kind.STORE_WEIGHTS: "store",
    Kind.UPDATE: "host update",
}
"""The lane of each kind of action that goes on beside compute. An UPDATE on the device is compute."""
WAITS_FOR = {kind: LANE_OF[kind] for kind in COLLECTIVES | TRANSFERS} | {Kind.REFRESH: "gather", Kind.COMBINE: "reduce"}
"""The kind of wait for each kind of awaited action."""
_COMPUTES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.WEIGHTS_BACKWARD: "backward"}
_ABOUT = "recording.json"


class RecordingError(ValueError):
    """A folder is no recording that this version reads; the message says why."""


class Interval(NamedTuple):
    """What a rank did, or waited for, without a break."""

    lane: str
    """One of LANES."""
    name: str
    """The text form of the action that it belongs to, or plain words."""
    start: float
    """Seconds since the recording began, on rank 0's clock."""
    end: float
    kind: str = ""
    """In the lane compute: forward, backward or step. In the lane wait: what for, such as gather or activation."""
    bytes: int = 0
    """What a collective, message or transfer moves; 0 if nothing or unknown."""


class Step(NamedTuple):
    """One step of one rank."""

    step: int
    """The number of the training step, from 1."""
    start: float
    """In seconds, as those of intervals."""
    end: float
    intervals: list[Interval]
    """Those of each lane by their start."""
    memory: list[tuple[float, int]]
    """Bytes alive on the device at the ends of actions, as (seconds, bytes); empty if they are unknown."""


@dataclass
class RankRecording:
    """What one rank did."""

    rank: int
    """The global rank."""
    pipeline_rank: int
    data_rank: int
    host: str = ""
    """The name of its machine."""
    device: str = ""
    """What computes, in words."""
    steps: list[Step] = field(default_factory=list)
    begun: float = 0.0
    """When the run asked for the recording, in seconds since 1970 on rank 0's clock; 0 if that is unknown or
    simulated."""


@dataclass
class Recording:
    """What all ranks did."""

    source: str
    """measured or simulated."""
    spec: dict[str, Any]
    """The fields of the program's spec, as JSON has them. Data-parallel ranks may have other numbers of micro-batches
    than rank 0, whose spec it is."""
    version: str
    """The version of ds_lgamp that recorded."""
    ranks: list[RankRecording]
    """In the order of global ranks."""

    def program_spec(self) -> ProgramSpec:
        """Returns the spec from which the program was built."""
        spec, hierarchy, offload = dict(self.spec), self.spec["hierarchy"], self.spec["offload"]
        spec["placement"] = tuple(spec["placement"])
        spec["hierarchy"] = hierarchy and Hierarchy(**hierarchy)
        spec["offload"] = offload and Offload(**{**offload, "on_device": tuple(offload["on_device"])})
        spec |= {name: frozenset(map(tuple, spec.get(name, ()))) for name in ("kept", "selective")}
        spec["whole_chunks"] = frozenset(spec.get("whole_chunks", ()))
        return ProgramSpec(**spec)


def spec_fields(spec: ProgramSpec) -> dict[str, Any]:
    """Returns the fields of a spec, as JSON has them."""
    values = {each.name: getattr(spec, each.name) for each in fields(spec)}
    values["placement"] = list(spec.placement)
    values["hierarchy"] = None if spec.hierarchy is None else spec.hierarchy._asdict()
    values["offload"] = None if spec.offload is None else spec.offload._asdict()
    values |= {name: sorted(values[name]) for name in ("kept", "selective", "whole_chunks")}
    return values


def of_simulation(spec: ProgramSpec, timeline: Timeline, version: str) -> Recording:
    """Returns the recording of one simulated step. The unit of its times counts as a second.

    Besides the waits of the program, it has waits for results of other ranks, which belong to the compute that waits.
    A send lasts until the receiver has the message. The recording leaves out what takes no time.
    """
    ranks = []
    for rank in range(spec.pipeline_ranks):
        computes = list(_computes(timeline, rank))
        collectives = [_interval(LANE_OF[span.action.kind], span) for span in timeline.collectives[rank]]
        intervals = [*computes, *collectives, *_messages(spec, timeline, rank), *_waits(timeline, rank, computes)]
        timed = in_order(each for each in intervals if each.end > each.start)
        ranks.append(RankRecording(rank, rank, 0, steps=[Step(1, 0.0, timeline.step_time, timed, [])]))
    return Recording("simulated", spec_fields(spec), version, ranks)


def _interval(lane: str, span: Span | Wait, kind: str = "") -> Interval:
    return Interval(lane, str(span.action), span.start, span.end, kind)


def _computes(timeline: Timeline, rank: int) -> Iterator[Interval]:
    yield from (_interval("compute", span, _COMPUTES[span.action.kind]) for span in timeline.spans[rank])
    yield from (_interval("compute", span, "step") for span in timeline.updates[rank])


def _messages(spec: ProgramSpec, timeline: Timeline, rank: int) -> Iterator[Interval]:
    for span in timeline.spans[rank]:
        kind, chunk, micro_batch, *_ = span.action
        if spec.sends_output(span.action):
            target = chunk + 1 if kind is Kind.FORWARD else chunk - 1
            arrival = timeline.arrivals[kind][target][micro_batch]
            if arrival is not None:
                yield Interval("send", str(send_of(span.action)), span.end, arrival)


def _waits(timeline: Timeline, rank: int, computes: Iterable[Interval]) -> Iterator[Interval]:
    """Yields the waits of the program, and what is left between computes: the waits for other ranks; before a wait of
    the program, a wait of RETURN."""
    waits = [_interval("wait", wait, WAITS_FOR[awaited_by(wait.action).kind]) for wait in timeline.waits[rank]]
    yield from waits
    now = 0.0
    for each in sorted([*waits, *computes], key=lambda each: (each.start, each.end)):
        if each.start > now:
            kind = {"backward": "gradient", "step": "reduce"}.get(each.kind, "activation")
            yield Interval("wait", each.name, now, each.start, kind)
        now = max(now, each.end)


def in_order(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorts intervals by lane, and in each lane by their start."""
    return sorted(intervals, key=lambda each: (_ORDER[each.lane], each.start, each.end))


def write_recording(folder: Path, recording: Recording) -> None:
    """Writes a recording into ``folder``, which may exist. Replaces one that is there."""
    write_about(folder, recording.source, recording.spec, recording.version, len(recording.ranks))
    for rank in recording.ranks:
        with open(rank_file(folder, rank.rank), "w") as file:
            file.write(rank_line(rank))
            file.writelines(map(step_line, rank.steps))


def refuse_measured(folder: Path) -> None:
    """Raises RecordingError if ``folder`` holds what a run has recorded, which nothing brings back."""
    source = None
    with suppress(OSError, ValueError, AttributeError):
        source = json.loads((folder / _ABOUT).read_text()).get("source")
    if source == "measured":
        raise RecordingError("which a run has recorded; name another folder")


def write_about(folder: Path, source: str, spec: dict[str, Any], version: str, ranks: int) -> None:
    """Writes what a recording says about all of its ranks. Makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"format": VERSION, "source": source, "version": version, "ranks": ranks, "spec": spec}
    (folder / _ABOUT).write_text(json.dumps(about, indent=1) + "\n")


def rank_file(folder: Path, rank: int) -> Path:
    """Returns the path of the lines of a global rank."""
    return folder / f"rank_{rank}.jsonl"


def rank_line(rank: RankRecording) -> str:
    """Returns the first line of a rank."""
    return json.dumps({name: value for name, value in asdict(rank).items() if name != "steps"}) + "\n"


def step_line(step: Step) -> str:
    """Returns the line of a step. Times are rounded to nanoseconds."""
    line: dict[str, Any] = {"step": step.step, "start": round(step.start, 9), "end": round(step.end, 9)}
    for lane, name, start, end, kind, moved in step.intervals:
        line.setdefault(lane, []).append([name, round(start, 9), round(end, 9), kind, moved])
    if step.memory:
        line["memory"] = [[round(when, 9), alive] for when, alive in step.memory]
    return json.dumps(line, separators=(",", ":")) + "\n"


def read_recording(folder: Path) -> Recording:
    """Reads a recording. Leaves out a last line that is torn.

    Raises RecordingError if ``folder`` holds none, or only a part of one.
    """
    try:
        about = json.loads((folder / _ABOUT).read_text())
    except (OSError, ValueError):
        raise RecordingError(f"{folder} is no recording: it has no readable {_ABOUT}; name a folder that has") from None
    if not isinstance(about, dict) or about.get("format") != VERSION:
        raise RecordingError(
            f"{folder} is no recording of format {VERSION}, the one that this version reads; record the run again"
        )
    ranks = [_read_rank(folder, rank) for rank in range(about["ranks"])]
    older = min(ranks, key=lambda rank: rank.begun)
    if older.begun != max(rank.begun for rank in ranks):
        raise RecordingError(
            f"{folder} mixes two runs: what rank {older.rank} has recorded is older than what other ranks have; record "
            "again"
        )
    return Recording(about["source"], about["spec"], about["version"], ranks)


def _read_rank(folder: Path, rank: int) -> RankRecording:
    path = rank_file(folder, rank)
    try:
        whole = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        return RankRecording(**whole[0], steps=list(map(_step, whole[1:])))
    except FileNotFoundError:
        raise RecordingError(
            f"{folder} lacks {path.name}: rank {rank} ended before its first recorded step, or the folder is a part "
            "of a copy; copy all of it, or record again"
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise RecordingError(f"{path} is damaged; record again") from None


def _step(line: dict[str, Any]) -> Step:
    intervals = [Interval(lane, *each) for lane in LANES for each in line.get(lane, ())]
    memory = [(when, alive) for when, alive in line.get("memory", ())]
    return Step(line["step"], line["start"], line["end"], intervals, memory)
