"""The benchmark of recording: its report."""

from benchmarks.contenders import Layout
from benchmarks.model import ModelSize
from benchmarks.tracing import LIMIT, WAYS, run


def test_steps_that_are_recorded_stand_beside_those_that_are_not():
    record = run([Layout(1, 2, ModelSize(blocks=2, width=32, sequence=8))], pairs=1, turns=1)
    rows = {(row.contender, row.metric): row.median for row in record.rows}
    steps = [rows[name, "step"] for name in WAYS.values()]
    assert rows[WAYS[True], "step, recorded / not"] == steps[1] / steps[0]
    (interval,) = (value for (_, metric), value in rows.items() if metric.startswith("CPU time of an interval"))
    assert 0 < interval < 1000
    (target,) = record.targets
    assert target.limit == LIMIT
    assert target.value == rows[WAYS[True], "share of the CPU time of a step"] > 0
