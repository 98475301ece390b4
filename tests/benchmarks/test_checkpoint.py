"""The checkpoint benchmark: how much it writes, and what it records."""

import pytest

from benchmarks.checkpoint import KINDS, PLAIN, RATE_LIMIT, STEP_LIMIT, State, run, shards
from benchmarks.record import OURS
from benchmarks.virtual.chunk import Setting
from testing.ranks import run_on_ranks

TINY = Setting(1, 2, 2, forward=0.002, backward=0.004, data_ranks=2, parameters=1001)


STATE = State(units=2, shapes=((64, 32), (64,)))


def elements(state):
    return {name: (shard.start, shard.values.numel()) for name, shard in shards(state).items()}


@pytest.mark.slow
def test_the_ranks_write_every_element_once_and_as_much_as_is_said():
    first, second = run_on_ranks(2, elements, STATE)
    assert 4e-6 * sum(numel for rank in (first, second) for _, numel in rank.values()) == pytest.approx(STATE.megabytes)
    assert len(first.keys() | second.keys()) == 2 * len(KINDS) * 2
    for name in first.keys() & second.keys():
        assert second[name][0] == first[name][1]


def test_the_record_has_rates_of_both_and_steps():
    record = run(ranks=(1, 2), state=STATE, training=TINY, repetitions=2)
    rates = [(row.contender, row.config["ranks"], row.metric) for row in record.rows if row.unit == "MB/s"]
    assert rates == [(name, ranks, what) for ranks in (1, 2) for what in ("save", "load") for name in (OURS, PLAIN)]
    rows = {row.metric: row.median for row in record.rows}
    assert rows["steps during a save"] >= 1 and rows["step during a save"] > 2 * 2 * 6
    assert [target.limit for target in record.targets] == [RATE_LIMIT] * 4 + [STEP_LIMIT]
    assert min(target.value for target in record.targets) > 0
    assert record.machine["scheduling"] in ("real-time (SCHED_RR)", "time-sharing")
