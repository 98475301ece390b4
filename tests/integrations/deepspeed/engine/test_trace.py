"""What a trace records is what every rank did: actions, waits, bytes and memory."""

import os
import signal
from collections import Counter
from itertools import groupby, pairwise

import pytest
import torch.distributed as dist

from ds_lgamp.runtime.measure import CollectiveCounter
from ds_lgamp.schedule.actions import COMPUTE, WAITS, Action, Kind
from ds_lgamp.schedule.program import build_program
from ds_lgamp.view.recording import read_recording
from ds_lgamp.watch.this_rank import this_rank
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks, started_ranks
from tests.integrations.deepspeed.engine.tensor_reading import engine_of, refusal
from tests.integrations.deepspeed.plain.sequential import pairs, sequential
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, configuration, initialize
from tests.integrations.deepspeed.running import batches

CASES = {
    "stage 1": (1, None),
    "stage 3": (3, None),
    "offload": (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
}
"""Stage and more keys of zero_optimization."""
STEPS, TRACED = 5, [2, 4]
ALLOWED = {
    "data": {"data"},
    "send": {"SEND_F", "SEND_B", "send"},
    "activation": {"F"},
    "gradient": {"B"},
    "gather": {"WAIT_GATHER"},
    "reduce": {"WAIT_REDUCE", "STEP"},
    "load": {"WAIT_LOAD"},
    "store": {"WAIT_STORE"},
}
"""The actions in which each kind of wait may stand."""


def train_all(folder):
    prepare_rank()
    told = {name: train(folder / name, *case) for name, case in CASES.items()}
    told["plain"] = train_plain(folder / "plain")
    told["ends"] = go_on_after_the_data_end(folder / "ends")
    told["none"] = train_untraced()
    (folder / "file").write_text("")
    told["refused"] = refusal(lambda: engine_of(2, 1, block={"trace": str(folder / "file")}))
    # Nobody makes files there, whoever it is.
    told["unwritable"] = refusal(lambda: engine_of(2, 1, block={"trace": "/proc"}))
    first = engine_of(2, 1, block={"trace": str(folder / "twice")})
    told["twice"] = refusal(lambda: engine_of(2, 1, block={"trace": str(folder / "twice")}))
    first.destroy()
    engine_of(2, 1, block={"trace": str(folder / "twice")})
    return told


def traced(folder):
    return {"trace": str(folder), "trace_steps": f"{TRACED[0]}:{TRACED[1]}"}


def train(folder, stage, zero):
    """Trains, and evaluates in between. Returns the bytes that the last recorded step sent, by kind."""
    engine = engine_of(2, stage, block=traced(folder), zero=zero)
    for step in range(STEPS):
        with CollectiveCounter() as counter:
            engine.train_batch(batches(step, engine))
        if step + 1 == TRACED[1]:
            sent = counter.bytes_sent
        engine.eval_batch(batches(99, engine, training=False))
    engine.destroy()
    return sent


def train_plain(folder):
    engine = initialize(sequential(), configuration(2, {"pipeline_ranks": 2, **traced(folder)}))
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            engine.backward(engine(*pairs(step, dist.get_rank(), number)))
            engine.step()
    engine.destroy()


def go_on_after_the_data_end(folder):
    """In the second step the data end. Afterwards the engine evaluates, and trains its second step."""
    engine = engine_of(2, 1, block=traced(folder))
    engine.train_batch(batches(0, engine))
    with pytest.raises(StopIteration):
        engine.train_batch(iter([]))
    engine.eval_batch(batches(99, engine, training=False))
    recorded = folder.joinpath("recording.json").exists()
    engine.train_batch(batches(1, engine))
    engine.destroy()
    return recorded


def train_untraced():
    engine = engine_of(2, 1)
    engine.train_batch(batches(0, engine))
    return engine.lgamp.executor.trace, this_rank.recorder


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    return folder, run_on_ranks(4, train_all, folder)


@pytest.fixture(scope="module", params=[*CASES, "plain"])
def recording(told, request):
    return read_recording(told[0] / request.param)


def last_steps(recording):
    """Yields each rank's last step by lane, and its program."""
    programs = build_program(recording.program_spec())
    for rank in recording.ranks:
        lanes = {lane: list(members) for lane, members in groupby(rank.steps[-1].intervals, lambda each: each.lane)}
        yield lanes, programs[rank.pipeline_rank]


def kind_in(name):
    return name if name in ("data", "send") else Action.parse(name).kind.value


def test_the_steps_that_were_asked_for_are_recorded_and_no_others(recording):
    assert recording.source == "measured"
    assert [(rank.rank, rank.pipeline_rank, rank.data_rank) for rank in recording.ranks] == [
        *((0, 0, 0), (1, 0, 1)),
        *((2, 1, 0), (3, 1, 1)),
    ]
    for rank in recording.ranks:
        assert [step.step for step in rank.steps] == list(range(TRACED[0], TRACED[1] + 1))


def test_ranks_share_a_clock(recording):
    """A step ends everywhere after it has begun everywhere, because ranks wait for each other."""
    for steps in zip(*(rank.steps for rank in recording.ranks)):
        assert max(step.start for step in steps) < min(step.end for step in steps)
    assert all(rank.steps[0].start > 0 for rank in recording.ranks)


def test_the_recorded_computes_are_those_of_the_program_in_order(recording):
    for lanes, program in last_steps(recording):
        assert all(first.end <= second.start for first, second in pairwise(lanes["compute"]))
        # The recomputation of a backward is an interval of its own: the wait for the gradient may follow it.
        computes = [name for name, _ in groupby(each.name for each in lanes["compute"])]
        assert computes == [str(action) for action in program if action.kind in (*COMPUTE, Kind.UPDATE, Kind.STEP)]


def test_waits_belong_to_their_actions(recording):
    spec = recording.program_spec()
    for lanes, program in last_steps(recording):
        assert all(kind_in(each.name) in ALLOWED[each.kind] for each in lanes["wait"])
        names = [each.name for each in lanes["wait"]]
        awaited = [name for name in names if name.startswith("WAIT_")]
        assert awaited == [str(action) for action in program if action.kind in WAITS]
        received = [name for name in names if name[0] in "FB"]
        assert received == [str(each) for each in program if each.kind in COMPUTE and spec.receives_input(each)]


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_that_torch_distributed_was_given(told, case):
    folder, by_rank = told
    counted = {"gather": "all_gather", "reduce": "all_to_all", "send": "send"}
    for rank, sent in zip(read_recording(folder / case).ranks, (each[case] for each in by_rank)):
        moved = Counter()
        for each in rank.steps[-1].intervals:
            moved[each.lane] += each.bytes
        assert {lane: moved[lane] for lane in counted} == {lane: sent[kind] for lane, kind in counted.items()}
        assert all(moved[lane] > 0 for lane in counted)


def test_what_goes_on_beside_compute_has_the_name_of_the_action_that_launched_it(told):
    for lanes, program in last_steps(read_recording(told[0] / "offload")):
        beside = {
            "gather": Kind.GATHER,
            "reduce": Kind.REDUCE,
            "load": Kind.LOAD,
            "store": Kind.STORE,
            "send": Kind.SEND_FORWARD,
            "host update": Kind.UPDATE,
        }
        for lane, kind in beside.items():
            assert {str(action) for action in program if action.kind is kind} <= {each.name for each in lanes[lane]}
        assert all(each.start <= each.end for members in lanes.values() for each in members)
        # The tied unit's gradient is stored in the step, with a copy of its own.
        assert {each.name for each in lanes["store"]} - {"STEP"} == {
            str(action) for action in program if action.kind is Kind.STORE
        }
        assert all(each.bytes > 0 for lane in ("load", "store") for each in lanes[lane])


def test_the_memory_of_the_process_is_recorded_at_the_end_of_every_compute(recording):
    for rank in recording.ranks:
        for step in rank.steps:
            assert [when for when, _ in step.memory] == [each.end for each in step.intervals if each.lane == "compute"]
            assert all(alive > 1e7 for _, alive in step.memory)


def test_a_step_whose_data_ended_leaves_no_trace(told):
    folder, by_rank = told
    assert not any(rank["ends"] for rank in by_rank)
    assert [[step.step for step in rank.steps] for rank in read_recording(folder / "ends").ranks] == [[2]] * 4


def test_without_the_key_nobody_listens(told):
    assert [rank["none"] for rank in told[1]] == [(None, None)] * 4


UNWRITABLE = "ds_lgamp.trace is '/proc', which cannot be written ("


def test_a_folder_that_cannot_be_made_or_written_is_refused_on_every_rank(told):
    folder, by_rank = told
    words = f"ds_lgamp.trace is '{folder / 'file'}', which cannot be written (File exists); use another folder"
    assert {rank["refused"] for rank in by_rank} == {words}
    assert {rank["unwritable"][: len(UNWRITABLE)] for rank in by_rank} == {UNWRITABLE}


def test_two_engines_do_not_record_in_one_folder(told):
    folder, by_rank = told
    words = f"ds_lgamp.trace is '{folder / 'twice'}', where another engine of the script records; use another folder"
    assert {rank["twice"] for rank in by_rank} == {words}


def train_until_killed(folder):
    prepare_rank()
    engine = engine_of(2, 3, block={"trace": str(folder), "trace_steps": "1:9"})
    for step in range(2):
        engine.train_batch(batches(step, engine))
    engine.lgamp.executor.execute = die
    engine.train_batch(batches(2, engine))


def die(action):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_job_leaves_whole_steps(tmp_path):
    with started_ranks(2, train_until_killed, tmp_path) as (ranks, _):
        for rank in ranks:
            rank.join(60)
        assert [rank.exitcode for rank in ranks] == [-signal.SIGKILL] * 2
    recorded = read_recording(tmp_path).ranks
    assert [[step.step for step in rank.steps] for rank in recorded] == [[1, 2]] * 2
    assert recorded[0].begun == recorded[1].begun > 0
