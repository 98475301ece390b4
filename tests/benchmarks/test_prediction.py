"""The benchmark of predictions covers what it says, and predicts from other sizes than it measures."""

import pytest

from benchmarks.prediction import CASES, CHUNKS, MESSAGES, RATIO, Line, Machine, predict, run
from benchmarks.virtual.pipelines import spec_of
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate

FREE = Machine(Line(0.0, 0.0), Line(0.0, 0.0), Line(0.0, 0.0), 0.0)


def test_there_are_24_configurations_of_every_kind():
    assert len(set(CASES)) == 24
    assert {case.schedule for case in CASES} == {"layered", "interleaved_1f1b", "1f1b", "gpipe"}
    assert {case.zero_stage for case in CASES} == {0, 1, 2, 3}
    assert {case.rate for case in CASES} == {"1gbit", "200mbit"}
    assert sum(len(case.setting.lengths) > 1 for case in CASES) >= 6
    assert all(spec_of(case.schedule, case.setting, case.zero_stage, case.resident_chunks) for case in CASES)


def test_no_size_is_calibrated_and_predicted():
    sizes = {case.setting.elements for case in CASES if case.setting.pipeline_ranks > 1}
    parameters = {case.setting.parameters + 1 for case in CASES if case.setting.data_ranks > 1}
    assert not sizes & {*MESSAGES} and not parameters & {*CHUNKS}


def test_a_line_goes_through_both_points():
    line = Line.through((100, 0.5), (300, 0.9))
    assert line.seconds(100) == pytest.approx(0.5) and line.seconds(300) == pytest.approx(0.9)
    assert line.seconds(200) == pytest.approx(0.7)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.schedule)
def test_on_a_free_network_a_step_takes_what_its_chunks_take(case):
    alone = predict(case, FREE)
    spec = spec_of(case.schedule, case.setting)
    if len(case.setting.lengths) == 1:
        durations = case.setting.durations()
        assert alone == pytest.approx(simulate(spec, build_program(spec), durations).step_time)
    slow = Machine(Line(0.001, 1e-8), Line(0.001, 1e-8), Line(0.001, 1e-8), 0.0)
    assert predict(case, slow) > alone
    assert predict(case, FREE._replace(compute=0.001)) > alone


@pytest.mark.slow
def test_the_record_has_a_prediction_beside_each_measured_step():
    record = run([CASES[15]._replace(setting=CASES[15].setting._replace(micro_batches=2, forward=0.002))], 1)
    if "network" in record.machine:
        pytest.skip(record.machine["network"])
    assert [row.metric for row in record.rows] == ["measured", "predicted", RATIO]
