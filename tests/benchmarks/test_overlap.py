"""The overlap benchmark: its bounds, its measurements and its report."""

import pytest

from benchmarks.overlap import (
    BOUND,
    COMPUTE,
    LAYOUTS,
    POLICIES,
    SHARE,
    enter,
    measure,
    name_of,
    setting_of,
    simulated,
)
from benchmarks.record import Record
from benchmarks.schedule import LIMIT
from benchmarks.virtual.chunk import Setting
from ds_lgamp.schedule.actions import Kind

TINY = Setting(1, 2, 2, forward=0.002, backward=0.004, data_ranks=2, parameters=1001)
TINY_POLICIES = [(2, 2), (3, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_take_the_share_of_compute_and_hide_but_for_the_first_and_the_last(layout):
    setting = setting_of(*layout)
    alone = (setting.parameters + 1) // setting.data_ranks * (setting.data_ranks - 1) * 4 / 125e6
    compute = setting.chunks_per_rank * setting.micro_batches * (setting.forward + setting.backward)
    for policy in POLICIES:
        timeline = simulated(setting, policy, setting.durations(gather=alone, reduce=alone))
        exposed = max(map(sum, zip(timeline.exposed(Kind.GATHER), timeline.exposed(Kind.REDUCE))))
        if policy == (3, 1):
            assert exposed > 10 * alone
        else:
            assert exposed == pytest.approx(2 * alone)
        if policy == (3, 2):
            assert len(timeline.collectives[0]) * alone == pytest.approx(SHARE * compute, rel=1e-3)


@pytest.fixture(scope="module")
def found():
    return measure(TINY, TINY_POLICIES, repetitions=2)


def test_every_policy_does_the_work_and_gets_its_rows(found):
    record = Record("overlap", {})
    enter(record, TINY, TINY_POLICIES, found)
    rows = {(row.contender, row.metric): row for row in record.rows}
    assert {name for name, _ in rows} == {"gloo", COMPUTE, *(name_of(*policy) for policy in TINY_POLICIES)}
    assert rows["gloo", "gather alone"].median > 0 and rows["gloo", "reduce alone"].median > 0
    for policy in TINY_POLICIES:
        # Sleeps last at least as long as requested.
        steps = [step.end - step.start for step in found[0].steps[name_of(*policy)]]
        assert min(steps) > 2 * 2 * 0.006 and rows[name_of(*policy), BOUND].median > 0
        assert rows[name_of(*policy), "exposed gather"].median > 0
    (target,) = record.targets
    assert target.value == rows[name_of(2, 2), BOUND].median and target.limit == LIMIT
