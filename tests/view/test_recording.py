"""Recordings of simulated programs, and their form on disk."""

import json
from dataclasses import replace

import pytest
from hypothesis import given

from ds_lgamp.schedule.actions import COMPUTE, Action, Kind, receive_matching
from ds_lgamp.schedule.costs import Durations, uniform_costs
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import Hierarchy, Offload, ProgramSpec
from ds_lgamp.view.recording import (
    LANES,
    Interval,
    RankRecording,
    Recording,
    RecordingError,
    Step,
    of_simulation,
    read_recording,
    spec_fields,
    step_line,
    write_recording,
)
from tests.schedule.strategies import program_specs

DURATIONS = Durations(1.0, 2.0, 0.5, 0.75, 0.25, 0.25, 1.0, 0.5, 0.5, 0.25, 0.75, 0.5, 0.25)
"""All above 0 and exact in binary, so that sums are equal to the bit."""


def spec_of(**changes):
    fields = {"placement": place_chunks("modular", 6, 2), "schedule": "layered", "micro_batches": 3}
    return ProgramSpec(**{**fields, "micro_batch_group": 3, "zero_stage": 3, **changes})


def recorded(spec):
    return of_simulation(spec, simulate(spec, build_program(spec), DURATIONS), "1.0")


def lane(rank, name):
    return [each for each in rank.steps[0].intervals if each.lane == name]


@given(program_specs())
def test_a_rank_computes_its_program_waits_in_between_and_sends_in_time(spec):
    recording = recorded(spec)
    starts = {each.name: each.start for rank in recording.ranks for each in lane(rank, "compute")}
    for rank, actions in zip(recording.ranks, build_program(spec)):
        computes = [each.name for each in lane(rank, "compute") if each.kind != "step"]
        kinds = COMPUTE | {Kind.WEIGHTS_BACKWARD}
        assert computes == [str(action) for action in actions if action.kind in kinds]
        now = 0.0
        for each in sorted([*lane(rank, "compute"), *lane(rank, "wait")], key=lambda each: each.start):
            assert each.start == now
            now = each.end
        assert now <= rank.steps[0].end
        ends = {each.name: each.end for each in lane(rank, "compute")}
        for send in lane(rank, "send"):
            prefix, place = Action.parse(send.name).kind.value[-1], str(receive_matching(Action.parse(send.name)))[6:]
            assert send.start == ends[send.name.removeprefix("SEND_")]
            assert send.end <= starts[prefix + place]


@given(program_specs())
def test_a_recording_has_the_spec_of_its_program(spec):
    fields = json.loads(json.dumps(spec_fields(spec)))
    assert Recording("simulated", fields, "1.0", []).program_spec() == spec


@pytest.mark.parametrize(
    ("spec", "lanes"),
    [
        (spec_of(), {"gather", "reduce", "send"}),
        (spec_of(hierarchy=Hierarchy(2, replicated=False)), {"gather", "reduce", "between nodes", "send"}),
        (
            spec_of(offload=Offload(parameters=True), updates="reduction", stores_inputs=True),
            {"gather", "reduce", "send", "load", "store", "host update"},
        ),
    ],
    ids=["plain", "hierarchy", "offload"],
)
def test_what_goes_on_beside_compute_has_lanes_of_its_own(spec, lanes):
    found = {each.lane for rank in recorded(spec).ranks for each in rank.steps[0].intervals}
    assert found == lanes | {"compute", "wait"}


def test_waits_say_what_for():
    found = {(each.name, each.kind) for rank in recorded(spec_of()).ranks for each in lane(rank, "wait")}
    assert {
        ("F1.0", "activation"),
        ("B4.0", "gradient"),
        ("WAIT_GATHER0", "gather"),
        ("WAIT_REDUCE0", "reduce"),
    } <= found


def test_a_rank_waits_at_the_step_for_others_with_copies_of_a_tied_module():
    spec = spec_of()
    costs = replace(uniform_costs(spec, DURATIONS), tied=(1.0, 1.0))
    ranks = of_simulation(spec, simulate(spec, build_program(spec), costs), "1.0").ranks
    assert [[(each.name, each.kind) for each in lane(rank, "wait")[-1:]] for rank in ranks] == [
        [("WAIT_REDUCE0", "reduce")],
        [("STEP", "reduce")],
    ]


def test_a_recording_is_read_as_it_was_written(tmp_path):
    interval = Interval("reduce", "REDUCE1", 0.25, 0.5, bytes=4096)
    steps = [Step(10, 0.0, 1.0, [interval], [(0.5, 1 << 40)]), Step(11, 1.0, 2.0, [], [])]
    measured = Recording("measured", spec_fields(spec_of()), "1.0", [RankRecording(0, 0, 0, "node", "cpu", steps)])
    for recording in (measured, recorded(spec_of())):
        write_recording(tmp_path / "new", recording)
        assert read_recording(tmp_path / "new") == recording


def test_lines_say_nothing_of_empty_lanes():
    line = json.loads(step_line(Step(1, 0.0, 1.0, [Interval("compute", "F0.0", 0.0, 1.0, "forward")], [])))
    assert line.keys() - set(LANES) == {"step", "start", "end"}
    assert line.keys() & set(LANES) == {"compute"}


def test_a_torn_last_line_leaves_the_steps_before_it(tmp_path):
    recording = recorded(spec_of())
    write_recording(tmp_path, recording)
    path = tmp_path / "rank_1.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines()[-1][:40])
    assert read_recording(tmp_path) == recording


def test_recordings_of_two_runs_in_one_folder_are_refused(tmp_path):
    recording = recorded(spec_of())
    for rank, begun in zip(recording.ranks, (7.0, 5.0, 7.0)):
        rank.begun = begun
    write_recording(tmp_path, recording)
    with pytest.raises(RecordingError, match="mixes two runs: what rank 1 has recorded is older"):
        read_recording(tmp_path)


def test_what_is_no_recording_is_refused(tmp_path):
    with pytest.raises(RecordingError, match=r"nowhere is no recording: it has no readable recording\.json"):
        read_recording(tmp_path / "nowhere")
    write_recording(tmp_path, recorded(spec_of()))
    about = tmp_path / "recording.json"
    about.write_text(about.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(RecordingError, match="is no recording of format 1"):
        read_recording(tmp_path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), r"lacks rank_1\.jsonl: rank 1 ended before its first recorded step"),
        (lambda path: path.write_text("{}\n[]\n"), r"rank_1\.jsonl is damaged"),
        (lambda path: path.write_text(""), r"rank_1\.jsonl is damaged"),
    ],
    ids=["missing", "other", "empty"],
)
def test_a_recording_without_all_of_its_ranks_is_refused(tmp_path, damage, words):
    write_recording(tmp_path, recorded(spec_of()))
    damage(tmp_path / "rank_1.jsonl")
    with pytest.raises(RecordingError, match=words):
        read_recording(tmp_path)
