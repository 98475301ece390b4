"""Recordings for https://ui.perfetto.dev, in Perfetto's protocol-buffer format.

A rank is a process, and each of its lanes a track. Arrows lead from a message to the compute that uses it. The numbers
of fields are those of protos/perfetto/trace in Perfetto's sources.
"""

from collections.abc import Iterator

from ds_lgamp.schedule.actions import Action, send_of
from ds_lgamp.view.critical_path import Peers, use_of
from ds_lgamp.view.recording import LANES, Interval, RankRecording, Recording

_BEGIN, _END, _COUNTER = 1, 2, 4
"""Types of events."""
_BYTES = 3
"""The unit of a counter."""
_EXPLICIT = 3
"""The order of tracks in a process: as they are numbered."""
_ROOM = 1000
"""Tracks of a rank, at most."""
_SEND = "SEND_"
"""How the name of a message begins; that of its compute follows."""
_Place = tuple[int, int, str]
"""Rank, step and name of a compute."""


def perfetto_trace(recording: Recording) -> bytes:
    """Returns a trace that Perfetto opens, as the content of a ``.pftrace`` file."""
    arrows = _Arrows(recording)
    packets = (packet for number, rank in enumerate(recording.ranks) for packet in _rank(number, rank, arrows))
    # A message Trace has only packets.
    return b"".join(_member(1, packet) for packet in packets)


class _Arrows:
    """Numbers the messages, each from a compute to the one on another rank that uses its result.

    An arrow begins at the message, or at its compute if the message took no time. It ends at the last interval of the
    compute, because a backward may recompute first.
    """

    def __init__(self, recording: Recording) -> None:
        spec = recording.program_spec()
        self._begin: dict[_Place, int] = {}
        self._end: dict[_Place, int] = {}
        self._sent: set[_Place] = set()
        """The computes whose messages have intervals."""
        self._last: dict[_Place, Interval] = {}
        """The last interval of each compute."""
        for number, rank in enumerate(recording.ranks):
            for step in rank.steps:
                for each in step.intervals:
                    place = number, step.step, each.name.removeprefix(_SEND)
                    if each.lane == "compute":
                        self._last[place] = each
                    elif each.lane == "send":
                        self._sent.add(place)
        peers = Peers(spec, recording.ranks)
        for place, compute in self._last.items():
            action = Action.parse(compute.name) if compute.kind in ("forward", "backward") else None
            if action is None or not spec.sends_output(action):
                continue
            use = use_of(send_of(action))
            to = peers.at(spec.placement[use.chunk], place[0])
            if to is not None:
                self._begin[place] = self._end[to, place[1], str(use)] = len(self._begin) + 1

    def at(self, rank: int, step: int, interval: Interval) -> bytes:
        """Returns the fields of the arrows that begin or end at an interval."""
        place = rank, step, interval.name.removeprefix(_SEND)
        is_last, fields = self._last.get(place) is interval, b""
        if place in self._begin and (interval.lane == "send" or (is_last and place not in self._sent)):
            fields += _fixed(47, self._begin[place])
        if place in self._end and is_last:
            fields += _fixed(48, self._end[place])
        return fields


def _rank(number: int, rank: RankRecording, arrows: _Arrows) -> Iterator[bytes]:
    """Yields the packets of one rank."""
    process = (rank.rank + 1) * _ROOM
    words = f"rank {rank.rank} (pipeline rank {rank.pipeline_rank}, data-parallel rank {rank.data_rank})"
    if rank.host:
        words += f" on {rank.host}"
    described = _number(1, rank.rank + 1) + _text(6, words)
    yield _descriptor(_number(1, process) + _member(3, described) + _number(11, _EXPLICIT))
    track = process
    for order, (name, rows) in enumerate(_lanes(rank).items()):
        for row in rows:
            track += 1
            yield _descriptor(_number(1, track) + _number(5, process) + _text(2, name) + _number(12, order))
            for step, interval in row:
                yield from _slice(track, interval, arrows.at(number, step, interval))
    memory = [sample for step in rank.steps for sample in step.memory]
    if memory:
        track += 1
        counter = _member(8, _number(3, _BYTES))
        yield _descriptor(_number(1, track) + _number(5, process) + _text(2, "memory") + counter)
        for when, alive in memory:
            yield _event(when, _COUNTER, track, _number(30, alive))


def _lanes(rank: RankRecording) -> dict[str, list[list[tuple[int, Interval]]]]:
    """Returns the rows of each lane. Slices of one track have to lie in each other or apart, so what overlaps goes to
    rows of its own."""
    lanes: dict[str, list[list[tuple[int, Interval]]]] = {"step": [[]]}
    for step in rank.steps:
        lanes["step"][0].append((step.step, Interval("step", f"step {step.step}", step.start, step.end)))
    for lane in LANES:
        rows: list[list[tuple[int, Interval]]] = []
        for step in rank.steps:
            for interval in step.intervals:
                if interval.lane == lane:
                    free = next((row for row in rows if row[-1][1].end <= interval.start), None)
                    if free is None:
                        free = []
                        rows.append(free)
                    free.append((step.step, interval))
        if rows:
            lanes[lane] = rows
    return lanes


def _slice(track: int, interval: Interval, flows: bytes) -> Iterator[bytes]:
    annotations = b""
    if interval.kind:
        annotations += _member(4, _text(10, "kind") + _text(6, interval.kind))
    if interval.bytes:
        annotations += _member(4, _text(10, "bytes") + _number(3, interval.bytes))
    yield _event(interval.start, _BEGIN, track, _text(23, interval.name) + annotations + flows)
    yield _event(interval.end, _END, track)


def _descriptor(fields: bytes) -> bytes:
    return _member(60, fields) + _number(10, 1)


def _event(seconds: float, kind: int, track: int, fields: bytes = b"") -> bytes:
    """Returns a packet with an event. All packets are one sequence, as of one writer."""
    event = _number(9, kind) + _number(11, track) + fields
    return _number(8, max(0, round(seconds * 1e9))) + _member(11, event) + _number(10, 1)


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _number(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _fixed(field: int, number: int) -> bytes:
    return _varint(field << 3 | 1) + number.to_bytes(8, "little")


def _member(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _member(field, text.encode())
