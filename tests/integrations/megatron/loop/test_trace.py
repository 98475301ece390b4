"""A trace records what ranks do in Megatron-core's loop, step by step, and leaves out evaluations."""

import atexit
from unittest.mock import patch

import pytest

from ds_lgamp.partition import collectives
from ds_lgamp.schedule.actions import COMPUTE
from ds_lgamp.schedule.program import build_program
from ds_lgamp.view.figures import show
from ds_lgamp.view.recording import RecordingError, read_recording
from testing.ranks import run_on_ranks
from tests.integrations.megatron.training_loop import STEPS, Place, Training, prepare_process

PLACES = {
    "P2": Place(2, 2, "layered"),
    "W2 at stage 1": Place(1, 2, "layered", data_ranks=2, distributed_optimizer=True),
    "W2 at stage 3": Place(1, 2, "layered", data_ranks=2, zero_stage=3),
}
TRACED = [2, 3]


def train_all(folder):
    for name, place in PLACES.items():
        training = tracing(place, folder / name)
        for step in range(STEPS):
            for model in training.models:
                model.zero_grad_buffer()
            training.run_batch(step)
            training.run_batch(step, forward_only=True)
    never_ends(folder / "unfinished")


def tracing(place, folder):
    training = Training(place)
    keys = {"trace": str(folder), "trace_steps": f"{TRACED[0]}:{TRACED[1]}"}
    training.forward_backward._settings = training.forward_backward._settings.model_copy(update=keys)
    return training


def never_ends(folder):
    """Every step collectives something that does not end before the job does."""
    with patch.object(atexit, "register") as register:
        training = tracing(PLACES["P2"], folder)
    forward_step = training.forward_step

    def launching(*positional, **options):
        collectives.launched("gather", 8)
        return forward_step(*positional, **options)

    training.forward_step = launching
    for step in range(STEPS):
        training.run_batch(step)
    with pytest.raises(RecordingError):
        read_recording(folder)
    for call in register.call_args_list:
        call.args[0]()
    # An engine that is freed would write, too.
    del training


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    run_on_ranks(2, train_all, folder, before_init=prepare_process)
    return folder


@pytest.fixture(scope="module", params=PLACES)
def recording(folder, request):
    return read_recording(folder / request.param)


def lane(step, name):
    return [each for each in step.intervals if each.lane == name]


def test_the_steps_that_were_asked_for_are_recorded_and_no_evaluations(recording):
    for rank in recording.ranks:
        assert [step.step for step in rank.steps] == TRACED
    places = [(rank.pipeline_rank, rank.data_rank) for rank in recording.ranks]
    assert places == ([(0, 0), (1, 0)] if recording.program_spec().pipeline_ranks == 2 else [(0, 0), (0, 1)])


def test_the_recorded_computes_are_those_of_the_program_in_order(recording):
    programs = build_program(recording.program_spec())
    for rank in recording.ranks:
        computes = [str(action) for action in programs[rank.pipeline_rank] if action.kind in COMPUTE]
        assert [each.name for each in lane(rank.steps[-1], "compute")] == computes


def test_waits_for_neighbours_and_for_the_gradients_are_recorded(recording):
    for rank in recording.ranks:
        kinds = {each.kind for each in lane(rank.steps[-1], "wait")}
        assert "reduce" in kinds
        assert ({"activation", "gradient"} & kinds != set()) == (recording.program_spec().pipeline_ranks == 2)


def test_the_engines_own_gathers_and_reductions_are_recorded(recording):
    sharded = recording.program_spec().zero_stage == 3
    for rank in recording.ranks:
        for name in ("gather", "reduce"):
            assert (lane(rank.steps[-1], name) != []) == sharded


def test_ds_lgamp_view_shows_it(recording):
    figures = show(recording).figures
    assert figures.mean("forward") > 0 and figures.mean("backward") > 0 and figures.peak_bytes[0] > 0


def test_the_end_of_the_job_writes_what_was_still_under_way(folder):
    recording = read_recording(folder / "unfinished")
    assert [[step.step for step in rank.steps] for rank in recording.ranks] == [TRACED, TRACED]
