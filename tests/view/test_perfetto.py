"""Perfetto's own classes read the trace, and its trace processor imports it where it is installed."""

import re
from collections import Counter, defaultdict

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as perfetto

from ds_lgamp.schedule.actions import SENDS, Action, Kind, receive_matching
from ds_lgamp.schedule.program import build_program
from ds_lgamp.view.perfetto import perfetto_trace
from ds_lgamp.view.recording import Interval, RankRecording, Recording, Step, spec_fields
from testing import trace_processor
from tests.view.test_recording import recorded, spec_of

BEGIN, END, COUNTER = (
    perfetto.TrackEvent.TYPE_SLICE_BEGIN,
    perfetto.TrackEvent.TYPE_SLICE_END,
    perfetto.TrackEvent.TYPE_COUNTER,
)


def read(recording):
    """Returns the tracks by number, and the events of each as (seconds, event)."""
    tracks, events = {}, defaultdict(list)
    for packet in perfetto.Trace.FromString(perfetto_trace(recording)).packet:
        assert packet.trusted_packet_sequence_id == 1
        if packet.HasField("track_descriptor"):
            tracks[packet.track_descriptor.uuid] = packet.track_descriptor
        else:
            events[packet.track_event.track_uuid].append((packet.timestamp / 1e9, packet.track_event))
    return tracks, events


def slices(events):
    """Returns (name, start, end, event) of the slices of a track."""
    return [(event.name, start, end, event) for (start, event), (end, _) in zip(events[::2], events[1::2])]


def slices_of(recording):
    """Returns rank, lane, name, start and end of all that should be a slice."""
    expected = Counter(
        (rank.rank, each.lane, each.name, each.start, each.end)
        for rank in recording.ranks
        for each in rank.steps[0].intervals
    )
    return expected + Counter((rank.rank, "step", "step 1", 0.0, rank.steps[0].end) for rank in recording.ranks)


def arrows_of(spec):
    """Returns the compute that uses each message, by the message."""
    kinds = {Kind.RECV_FORWARD: Kind.FORWARD, Kind.RECV_BACKWARD: Kind.BACKWARD}
    sends = [action for actions in build_program(spec) for action in actions if action.kind in SENDS]
    receives = {str(send): receive_matching(send) for send in sends}
    return {name: str(Action(kinds[each.kind], each.chunk, each.micro_batch)) for name, each in receives.items()}


def test_every_interval_is_a_slice_in_the_track_of_its_lane_and_rank():
    recording = recorded(spec_of())
    tracks, events = read(recording)
    found = Counter()
    for number, track in tracks.items():
        if not track.HasField("process"):
            process = tracks[track.parent_uuid].process
            found.update((process.pid - 1, track.name, *each[:3]) for each in slices(events[number]))
    assert found == slices_of(recording)


def test_slices_of_a_track_do_not_overlap():
    """What overlaps has tracks of one name."""
    intervals = [Interval("gather", f"GATHER{chunk}", chunk, chunk + 1.5) for chunk in range(3)]
    rank = RankRecording(0, 0, 0, steps=[Step(1, 0.0, 5.0, intervals, [])])
    tracks, events = read(Recording("measured", spec_fields(spec_of()), "1.0", [rank]))
    rows = [[name for name, *_ in slices(events[number])] for number, track in tracks.items() if track.name == "gather"]
    assert rows == [["GATHER0", "GATHER2"], ["GATHER1"]]
    for track in events.values():
        assert [event.type for _, event in track] == [BEGIN, END] * (len(track) // 2)
        assert sorted(track, key=lambda each: each[0]) == track


def test_an_arrow_leads_from_every_message_to_the_compute_that_uses_it():
    spec = spec_of()
    tracks, events = read(recorded(spec))
    begin, end = {}, {}
    for number, track in tracks.items():
        for name, start, _, event in slices(events[number]):
            begin.update((flow, (name, track.name, start)) for flow in event.flow_ids)
            end.update((flow, (name, track.name, start)) for flow in event.terminating_flow_ids)
    expected = arrows_of(spec)
    assert begin.keys() == end.keys() and len(begin) == len(expected)
    assert sum(len(event.flow_ids) for track in events.values() for _, event in track) == len(expected)
    assert {begin[flow][0]: end[flow][0] for flow in begin} == expected
    assert all(end[flow][1] == "compute" and begin[flow][2] < end[flow][2] for flow in begin)


def test_an_arrow_begins_at_the_compute_if_its_message_has_no_interval_and_ends_behind_recomputation():
    forward = [Interval("compute", "F0.0", 0.0, 1.0, "forward")]
    backward = [Interval("compute", "B0.0", 5.0, 6.0, "backward"), Interval("compute", "B0.0", 7.0, 8.0, "backward")]
    other = [Interval("compute", "F1.0", 2.0, 3.0, "forward"), Interval("compute", "B1.0", 3.0, 4.0, "backward")]
    ranks = [
        RankRecording(0, 0, 0, steps=[Step(1, 0.0, 9.0, [*forward, *backward], [])]),
        RankRecording(1, 1, 0, steps=[Step(1, 0.0, 9.0, other, [])]),
    ]
    _, events = read(Recording("measured", spec_fields(spec_of()), "1.0", ranks))
    every = [(name, start, event) for track in events.values() for name, start, _, event in slices(track)]
    begin = {(name, start): list(event.flow_ids) for name, start, event in every if event.flow_ids}
    end = {
        (name, start): list(event.terminating_flow_ids) for name, start, event in every if event.terminating_flow_ids
    }
    assert {"F0.0", "B1.0"} <= {name for name, _ in begin}
    assert end["F1.0", 2.0] == begin["F0.0", 0.0]
    assert end["B0.0", 7.0] == begin["B1.0", 3.0]
    assert ("B0.0", 5.0) not in end


def test_memory_is_a_counter_in_bytes():
    rank = RankRecording(3, 0, 0, "node", "cpu", [Step(1, 0.0, 1.0, [], [(0.25, 5 << 30), (0.5, 0)])])
    tracks, events = read(Recording("measured", spec_fields(spec_of()), "1.0", [rank]))
    ((number, track),) = ((number, track) for number, track in tracks.items() if track.name == "memory")
    assert track.counter.unit == perfetto.CounterDescriptor.UNIT_SIZE_BYTES
    assert [(when, event.type, event.counter_value) for when, event in events[number]] == [
        (0.25, COUNTER, 5 << 30),
        (0.5, COUNTER, 0),
    ]
    assert tracks[track.parent_uuid].process.process_name == "rank 3 (pipeline rank 0, data-parallel rank 0) on node"


def test_slices_tell_kind_and_bytes():
    interval = Interval("reduce", "REDUCE1", 0.0, 1.0, "", 300)
    wait = Interval("wait", "WAIT_REDUCE1", 0.0, 1.0, "reduce")
    rank = RankRecording(0, 0, 0, steps=[Step(1, 0.0, 1.0, [interval, wait], [])])
    _, events = read(Recording("measured", spec_fields(spec_of()), "1.0", [rank]))
    every = [each for track in events.values() for each in slices(track)]
    said = {
        name: {note.name: note.string_value or note.uint_value for note in event.debug_annotations}
        for name, _, _, event in every
    }
    assert said["REDUCE1"] == {"bytes": 300}
    assert said["WAIT_REDUCE1"] == {"kind": "reduce"}


@pytest.fixture
def imported(tmp_path):
    """Returns a function that asks the trace processor about a recording."""
    if not trace_processor.is_installed():
        pytest.skip("no trace processor is installed; CONTRIBUTING.md says how to get one")

    def ask(recording, *statements):
        path = tmp_path / "recording.pftrace"
        path.write_bytes(perfetto_trace(recording))
        return trace_processor.query(path, *statements)

    return ask


TRACKS = """
    select p.name as rank, t.name as lane, s.name, s.ts, s.dur
    from slice s join process_track t on s.track_id = t.id join process p using (upid)
"""
ARROWS = """
    select send.name as send, compute.name as compute
    from flow join slice send on slice_out = send.id join slice compute on slice_in = compute.id
"""
COMPLAINTS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


def test_the_trace_processor_imports_slices_arrows_and_memory_without_complaint(imported):
    recording = recorded(spec_of())
    step = recording.ranks[0].steps[0]
    recording.ranks[0].steps[0] = step._replace(memory=[(1.0, 7), (2.0, 5)])
    memory = "select c.ts, c.value, t.name, t.unit from counter c join process_counter_track t on c.track_id = t.id"
    complaints, slices, arrows, counters = imported(recording, COMPLAINTS, TRACKS, ARROWS, memory)
    assert complaints == []
    found = Counter(
        (int(re.match(r"rank (\d+)", each["rank"])[1]), each["lane"], each["name"], int(each["ts"]), int(each["dur"]))
        for each in slices
    )
    nanoseconds = 10**9
    assert found == Counter(
        (*about, start * nanoseconds, (end - start) * nanoseconds)
        for *about, start, end in slices_of(recording).elements()
    )
    assert {each["send"]: each["compute"] for each in arrows} == arrows_of(spec_of())
    assert [(int(each["ts"]), float(each["value"])) for each in counters] == [
        (nanoseconds, 7.0),
        (2 * nanoseconds, 5.0),
    ]
    assert {(each["name"], each["unit"]) for each in counters} == {("memory", "bytes")}


def test_the_trace_processor_refuses_what_is_no_trace(imported, tmp_path):
    imported(recorded(spec_of()))
    (tmp_path / "junk").write_bytes(bytes(range(256)))
    with pytest.raises(RuntimeError, match="refuses the trace"):
        trace_processor.query(tmp_path / "junk")
    with pytest.raises(RuntimeError, match="no such table: nowhere"):
        trace_processor.query(tmp_path / "recording.pftrace", "select 1 from nowhere")
