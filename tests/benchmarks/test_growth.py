"""The growth benchmark: its records, and its test for linear growth."""

import pytest

from benchmarks.contenders import Layout
from benchmarks.growth import memory, programs, run, steps
from benchmarks.growth.job import Axis, Job
from benchmarks.memory import predicted
from benchmarks.model import ModelSize
from benchmarks.record import Record
from benchmarks.virtual.chunk import weight_of
from benchmarks.virtual.steps import Step
from ds_lgamp.schedule.program import build_program

STEPS = (Axis("micro_batches", Job(1, 2, 2, 2), (2, 4)), Axis("pipeline_ranks", Job(2, 1, 1, 2), (2,)))
MEMORY = (Axis("chunks_per_rank", Job(2, 2, 2, 4), (2, 4, 8)), Axis("data_ranks", Job(2, 2, 2, 4), (2, 4)))
PROGRAMS = (Axis("chunks_per_rank", Job(2, 1, 2, 4), (1, 2)),)


@pytest.mark.slow
def test_the_record_has_rows_and_targets_of_every_axis():
    record = run(STEPS, MEMORY, PROGRAMS, Job(4, 1, 2, 8), repetitions=2)
    assert [(row.config["axis"], row.metric) for row in record.rows] == [
        *[(axis, metric) for axis in "MMP" for metric in (steps.CPU, steps.CLOCK)],
        *[(axis, memory.PEAK) for axis in "NNNWW"],
        *[(axis, metric) for axis in ("N", "N", "all") for metric in programs.METRICS],
        ("all", programs.BUILD_ONE),
        ("all", programs.VALIDATE_ALL),
    ]
    assert min(row.median for row in record.rows) > 0
    assert [target.text for target in record.targets] == [
        f"{steps.CPU}, M = 4 / M = 2",
        f"{steps.CLOCK}, M = 4 / M = 2",
        f"{steps.CPU}, P = 2 / P = 2",
        f"{memory.PEAK} per further N, 4 to 8 / 2 to 4",
        f"{memory.PEAK}, W = 4 / W = 2",
        *[f"{metric}, N = 2 / N = 2" for metric in (programs.BYTES, programs.BUILD, programs.VALIDATE)],
        f"{programs.BUILD_ONE}, P4 W1 N2 M8, s",
        f"{programs.VALIDATE_ALL}, P4 W1 N2 M8, s",
        "ranks with another number of actions than the formula's",
    ]
    cpu = {row.config["micro_batches"]: row.median for row in record.rows if row.metric == steps.CPU}
    assert record.targets[0].value == pytest.approx(cpu[4] / record.rows[0].median)
    assert record.targets[-1].value == 0


def test_a_step_is_told_per_action_and_per_forward_and_backward(monkeypatch):
    """Each of two ranks executes 2 x 2 forwards and backwards. Both spend 50 us per action and 1 ms elsewhere."""
    job = Job(1, 2, 2, 2)
    setting = steps.setting_of(job)
    (actions,) = map(len, build_program(programs.spec_of(job)))
    gradients = {chunk: setting.loss / weight_of(chunk) for chunk in range(2)}
    simulated = 4 * 3 * steps.FORWARD
    step = Step(1.0, 1.0 + simulated + 4e-3, setting.loss, gradients)
    timed = steps.Timed({steps.SLEEPING: [step, step], steps.IDLE: [step]}, [steps.IDLE_STEPS * actions * 50e-6])
    monkeypatch.setattr(steps, "run_on_ranks", lambda ranks, *_, **__: [([timed], True)] * ranks)
    record = Record("growth", {})
    steps.enter(record, [Axis("micro_batches", job, (2,))], repetitions=1)
    found = {row.metric: row.median for row in record.rows}
    assert found == {steps.CPU: pytest.approx(50), steps.CLOCK: pytest.approx(1000)}


@pytest.mark.parametrize("per_action, met", [([7, 5, 5, 5.5], True), ([7, 5, 10, 20], False)])
def test_the_largest_may_cost_little_more_than_the_base(per_action, met):
    record = Record("growth", {})
    steps.AXES[-1].aim(record, "time per action", per_action, steps.LIMIT)
    (target,) = record.targets
    assert (target.text, target.value, target.met) == ("time per action, W = 8 / W = 2", per_action[-1] / 5, met)


@pytest.mark.parametrize("peaks, met", [({2: 20, 4: 30, 8: 50}, True), ({2: 4, 4: 16, 8: 64}, False)])
def test_memory_that_grows_faster_and_faster_misses_its_target(monkeypatch, peaks, met):
    monkeypatch.setattr(memory, "peak", lambda job: peaks[job.chunks_per_rank])
    record = Record("growth", {})
    memory.enter(record, MEMORY[:1])
    assert [target.met for target in record.targets] == [met]


def test_no_rank_holds_more_than_those_that_are_looked_at():
    job = Job(pipeline_ranks=6, data_ranks=2, chunks_per_rank=2, micro_batches=16)
    layout = Layout(6, 2, ModelSize(blocks=12))
    assert memory.peak(job) == max(predicted(layout, rank, 16, 3, 2).peak for rank in range(12))


@pytest.mark.parametrize("job", [Job(1, 1, 1, 3), Job(1, 1, 4, 2), Job(2, 1, 1, 4), Job(5, 1, 3, 2)])
def test_the_formula_counts_the_actions_of_every_rank(monkeypatch, job):
    assert programs.count_deviations(job) == 0
    right = programs.predicted_actions
    monkeypatch.setattr(programs, "predicted_actions", lambda job, rank: right(job, rank) + (rank == 0))
    assert programs.count_deviations(job) == 1
