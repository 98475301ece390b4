"""The benchmark of ranks of unlike speeds."""

import pytest

from benchmarks.record import Record
from benchmarks.speeds import (
    BY_SPEED,
    CASES,
    EQUAL,
    OVER_EVEN,
    Case,
    durations,
    enter,
    measure_on_rank,
    seconds_on_clock,
)
from testing.ranks import run_on_ranks

PIPELINE, DATA = Case("pipeline_rank_speeds", (2, 1), 6, 4), Case("data_rank_speeds", (2, 1), 2, 6)


def test_equal_work_waits_for_the_slow_rank_and_work_by_speed_does_not():
    for case in CASES:
        equal, by_speed = (seconds_on_clock(case, each) / case.busy for each in (False, True))
        assert equal > 1.4 and 1 <= by_speed < 1.12, case


def test_micro_batches_by_speed_take_as_long_on_every_rank():
    assert DATA.shares(by_speed=False) == [3, 3] and DATA.shares(by_speed=True) == [4, 2]
    assert seconds_on_clock(DATA, by_speed=True) == pytest.approx(DATA.busy)


def test_the_report_compares_with_equal_work_and_with_ranks_that_are_always_busy():
    record = Record("speeds", {})
    busy = DATA.busy
    enter(record, DATA, {EQUAL: [1.5 * busy], BY_SPEED: [1.05 * busy]})
    rows = {(row.contender, row.metric): row.median for row in record.rows}
    assert rows[EQUAL, OVER_EVEN] == pytest.approx(1.5)
    assert [target.value for target in record.targets] == pytest.approx([1.05, 0.7])


@pytest.mark.slow
@pytest.mark.parametrize("case", [PIPELINE, DATA])
def test_both_train_what_the_layers_define_and_work_by_speed_is_sooner_done(case):
    found = run_on_ranks(2, measure_on_rank, case, 1)
    seconds = {name: durations(case, [rank.steps[name] for rank in found]) for name in (EQUAL, BY_SPEED)}
    assert min(seconds[BY_SPEED]) >= 0.99 * case.busy
