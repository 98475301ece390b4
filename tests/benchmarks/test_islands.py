"""The benchmark that compares islands with the clock."""

import pytest

from benchmarks.islands import (
    CLOCK,
    OVER_FAST,
    PIPELINES,
    PLACES,
    WITHOUT,
    cluster_of,
    demand_of,
    enter,
    seconds_on_clock,
    settings_of,
)
from benchmarks.record import Record
from benchmarks.unlike import ALTERNATING, BY_ISLAND, FAST, Place

TWO = Place("two islands", (0, 0, 1, 1), "50mbit", 2)


def test_all_contenders_have_equal_work():
    for place in PLACES:
        works = {
            setting.chunks * setting.micro_batches * setting.data_ranks * setting.forward
            for setting in settings_of(place).values()
        }
        assert len(works) == 1


def test_a_step_sends_what_its_program_gathers_reduces_and_passes_on():
    demand = demand_of(settings_of(TWO)[PIPELINES])
    # 6 chunks on each of 2 ranks, 12 micro-batches: 2 gathers and a reduction each, but 2 chunks stay for the backward.
    shard = 4 * 250_001
    assert demand.data_bytes == ((6 + 4 + 6) * shard,) * 2
    assert demand.hop_bytes == (4 * 4096 * 12 * 6, 4 * 4096 * 12 * 5)


def test_the_clock_is_bound_by_compute_or_by_the_slow_links():
    setting = settings_of(TWO)[PIPELINES]
    compute = 6 * 12 * 3 * setting.forward
    near, far = (seconds_on_clock(TWO, order, setting) for order in (BY_ISLAND, ALTERNATING))
    fast = seconds_on_clock(TWO._replace(between=FAST), BY_ISLAND, setting)
    assert compute < fast < 1.2 * compute and near < 1.2 * fast
    # Between islands a rank sends its data-parallel bytes at 50 Mbit/s.
    assert far > demand_of(setting).data_bytes[0] / (50e6 / 8)
    assert cluster_of(TWO).gpus == 4


def test_the_report_compares_with_the_clock_and_with_a_fast_network():
    def found(pipelines, without):
        return {PIPELINES: [pipelines], WITHOUT: [without]}

    record = Record("islands", {})
    enter(record, TWO, {BY_ISLAND: found(1.05, 3.0), ALTERNATING: found(2.1, 3.0)}, found(1.0, 1.0))
    rows = {(row.config["order"], row.contender, row.metric): row.median for row in record.rows}
    assert rows[BY_ISLAND, WITHOUT, OVER_FAST] == 3.0 and rows[BY_ISLAND, PIPELINES, CLOCK] > 0
    assert [target.value for target in record.targets] == pytest.approx([1.05, 0.5])
    record = Record("islands", {})
    place = TWO._replace(between="500mbit")
    enter(record, place, {BY_ISLAND: found(1.05, 3.0), ALTERNATING: found(1.1, 3.0)}, found(1.0, 1.0))
    assert len(record.targets) == 1, "no order gains where compute hides the links in all of them"
