"""The benchmark of updates one by one: its report."""

from benchmarks.record import Record
from benchmarks.updates import RATIO, STAGES, WAYS, enter, measure
from benchmarks.virtual.chunk import Setting

TINY = Setting(1, 2, 2, forward=0.002, backward=0.004, data_ranks=2, parameters=1001, update=0.002)


def test_every_way_gets_its_rows():
    found = measure(TINY, turns=2, steps=2)
    record = Record("updates", {})
    enter(record, TINY, "1gbit", found)
    rows = {(row.contender, row.config["zero_stage"], row.metric): row.median for row in record.rows}
    assert {key[:2] for key in rows} == {(name, stage) for name in WAYS.values() for stage in STAGES}
    compute = 2 * 2 * (0.002 + 0.004)
    for stage in STAGES:
        assert rows[WAYS["step"], stage, RATIO] == 1
        for name in WAYS.values():
            assert rows[name, stage, "step"] > 1000 * (compute + 2 * 0.002)
            assert rows[name, stage, "simulated"] >= 1000 * (compute + 2 * 0.002)
