"""When what was launched is over, and what becomes of a trace that cannot be written."""

from types import SimpleNamespace

import pytest
import torch

from ds_lgamp.partition import collectives
from ds_lgamp.runtime.clocks import Stopwatch
from ds_lgamp.runtime.trace import Trace
from ds_lgamp.schedule.actions import Action
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.view.recording import RankRecording, read_recording
from ds_lgamp.watch.this_rank import this_rank

CPU = torch.device("cpu")
SPEC = ProgramSpec((0,), "layered", 1, 1, zero_stage=1)


class Work:
    """A collective of a backend without futures."""

    def get_future(self):
        raise RuntimeError("not implemented")


@pytest.fixture
def trace(tmp_path, monkeypatch):
    trace = Trace(tmp_path / "trace", 1, 9, RankRecording(0, 0, 0), 1, CPU)
    # One rank has nobody to agree with.
    trace._clock._zero, trace._clock.runs = 0.0, True
    yield trace
    trace.stop()


@pytest.fixture
def executor():
    return SimpleNamespace(current=None, timing=Stopwatch(CPU))


def recorded(trace, number=0):
    return read_recording(trace._output._folder).ranks[0].steps[number]


def block(executor, text, kind):
    executor.current = Action.parse(text)
    with executor.timing.time(kind):
        pass


def launch(executor, text):
    executor.current = Action.parse(text)
    flight = collectives.launched("gather", 8)
    collectives.ends_with(Work(), flight)


def test_a_collective_without_a_future_ends_with_its_wait(trace, executor):
    trace.begin(1, executor, lambda: SPEC)
    launch(executor, "GATHER0")
    launch(executor, "GATHER0")
    block(executor, "WAIT_GATHER0", "gather")
    trace.end()
    wait, *gathers = recorded(trace).intervals
    assert [(each.name, each.bytes) for each in gathers] == [("GATHER0", 8)] * 2
    assert all(each.end == pytest.approx(wait.end, abs=1e-3) for each in gathers)


def test_a_step_is_written_once_everything_in_it_is_over(trace, executor, tmp_path):
    trace.begin(1, executor, lambda: SPEC)
    launch(executor, "GATHER0")
    trace.end()
    assert not (tmp_path / "trace" / "recording.json").exists()
    trace.begin(2, executor, lambda: SPEC)
    block(executor, "WAIT_GATHER0", "gather")
    trace.end()
    (gather,) = recorded(trace).intervals
    assert recorded(trace, 1).start < gather.end < recorded(trace, 1).end


def test_the_end_of_a_job_ends_what_nobody_awaited(trace, executor):
    trace.begin(1, executor, lambda: SPEC)
    launch(executor, "GATHER0")
    trace.end()
    trace.close()
    (gather,) = recorded(trace).intervals
    assert gather.end == recorded(trace).end


def test_the_executors_own_timing_goes_on_while_a_step_is_recorded(trace, executor):
    stopwatch = executor.timing
    stopwatch.running = True
    trace.begin(1, executor, lambda: SPEC)
    block(executor, "F0.0", "forward")
    trace.end()
    assert executor.timing is stopwatch
    assert this_rank.recorder is None
    assert stopwatch.read()["forward"] > 0


def test_a_trace_that_cannot_be_written_ends_and_training_goes_on(trace, executor, tmp_path):
    (tmp_path / "trace" / "rank_0.jsonl").mkdir()
    trace.begin(1, executor, lambda: SPEC)
    with pytest.warns(UserWarning, match="the trace of rank 0 ends, and training goes on: .*Is a directory"):
        trace.end()
    trace.begin(2, executor, lambda: SPEC)
    assert this_rank.recorder is None
