"""The benchmark of live states: its report."""

from benchmarks.live import DISK, LIMIT, MEMORY, OFF, STATES, Model, run

TINY = Model(layers=2, parameters=1024, micro_batches=2, seconds=0.002)


def test_engines_with_live_states_stand_beside_one_without():
    record = run(TINY, steps=2, repetitions=2)
    rows = {(row.contender, row.metric): row.median for row in record.rows}
    # Sleeps last at least as long as requested.
    least = 1000 * TINY.layers * TINY.micro_batches * 3 * TINY.seconds
    assert all(rows[name, "step"] > least for name in (OFF, MEMORY, DISK))
    targets = {target.text: (target.value, target.limit) for target in record.targets}
    for name, place in ((MEMORY, "in memory"), (DISK, "on a disk")):
        assert 0 < rows[name, "end of a step, main thread"] < rows[name, "step"]
        assert rows[name, "written in a step"] == 1e-6 * STATES * TINY.layers * TINY.parameters / 2
        ratio = rows[name, "step"] / rows[OFF, "step"]
        assert targets[f"step with live states {place} / without"] == (ratio, LIMIT)
        assert targets[f"bytes of a live state {place} / formula"][0] == 1
