"""The benchmark of slow messages: the comparisons it makes."""

from statistics import median

import pytest

from benchmarks.latency import (
    LIMIT,
    LIMIT_TO_INTERLEAVED,
    LOOPED,
    MESSAGE,
    RATIO,
    RATIO_BUSY,
    SETTINGS,
    enter,
)
from benchmarks.record import Record
from benchmarks.virtual.bubbles import simulated
from benchmarks.virtual.chunk import Setting
from benchmarks.virtual.pipelines import INTERLEAVED, LAYERED
from benchmarks.virtual.steps import measure

TINY = Setting(2, 2, 2, forward=0.002, backward=0.004, elements=1)


def test_every_contender_does_the_work_and_is_compared_with_both_simulations():
    measured = measure([TINY], LOOPED, repetitions=2)
    record = Record("latency", {})
    enter(record, [TINY], measured)
    rows = {(row.contender, row.metric): row.median for row in record.rows}
    hop = median(measured.hops[0].one_way)
    for contender in LOOPED:
        bubble = rows[contender.name, "bubble"]
        assert bubble == pytest.approx(median(measured.seconds[0][contender.name]) / (2 * 2 * 0.006) - 1)
        assert rows[contender.name, RATIO] == pytest.approx(bubble / simulated(contender, TINY, hop).bubble)
        busy = simulated(contender, TINY, hop, MESSAGE).bubble
        assert rows[contender.name, RATIO_BUSY] == pytest.approx(bubble / busy)
    beside, order = record.targets
    assert (beside.value, beside.limit) == (pytest.approx(rows[LAYERED.name, RATIO]), LIMIT)
    bubbles = rows[LAYERED.name, "bubble"] / rows[INTERLEAVED.name, "bubble"]
    assert (order.value, order.limit) == (pytest.approx(bubbles), LIMIT_TO_INTERLEAVED)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_link_carries_one_message_after_another_as_if_there_were_no_limit_unless_forwards_are_shorter(setting):
    free, busy = (simulated(LAYERED, setting, MESSAGE, message).bubble for message in (0.0, MESSAGE))
    if setting.forward < MESSAGE:
        assert busy > 1.3 * free
    else:
        assert busy == pytest.approx(free)


def test_layered_hides_messages_on_paper_and_interleaved_does_not():
    for setting in SETTINGS:
        layered, interleaved = (simulated(entry, setting, MESSAGE, MESSAGE).bubble for entry in (LAYERED, INTERLEAVED))
        assert layered < 0.6 * interleaved
