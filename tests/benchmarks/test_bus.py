"""Steps behind a throttled bus take at least the time of their loads, and the layered order loads less."""

import pytest

from benchmarks.bus import ALLOWED, DISK, IN_MEMORY, LAYERED, ON_DISK, OUTER, RATIO, longest, run


def test_the_longest_of_compute_bus_and_updates_bounds_a_step():
    # Of eight chunks, two stay on the device between forward and backward: 14 loads.
    assert longest(4, load=0.04, compute=0.5) == pytest.approx(14 * 0.04)
    assert longest(4, load=0.04, compute=0.6) == 0.6
    assert longest(4, load=0.001, compute=0.01) == pytest.approx(8 * 0.010)


@pytest.mark.slow
def test_a_run_has_every_order_and_no_step_is_faster_than_its_bus():
    load = 0.02
    record = run((3,), (load,), turns=1, steps=2)
    found = {(row.contender, row.metric): row.median for row in record.rows}
    assert {name for name, _ in found} == {IN_MEMORY, LAYERED, OUTER, ON_DISK}
    assert found[LAYERED, "step"] >= 1000 * 14 * load
    # Every micro-batch begins with the first chunks again, and ends with them: those two stay.
    assert found[OUTER, "step"] >= 1000 * (14 + 2 * 12) * load
    # Each update reads a gradient and weights beside the loads.
    assert found[ON_DISK, "step"] >= 1000 * (14 + 2 * 8) * DISK
    assert found[LAYERED, RATIO] == pytest.approx(found[OUTER, "step"] / found[LAYERED, "step"])
    (target,) = record.targets
    bound = ALLOWED * longest(3, load, found[IN_MEMORY, "step"] / 1000) + 2 * load
    assert target.value == pytest.approx(found[LAYERED, "step"] / 1000 / bound)
