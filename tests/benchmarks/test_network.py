"""The benchmark of slow networks: its bounds and its report."""

from functools import partial

import pytest

from benchmarks import islands, latency, network, overlap, training_slow, unlike, updates
from benchmarks.network import (
    BOUND,
    LAYOUTS,
    LIMIT,
    LINKS,
    OUTER,
    SHARE,
    STAGES,
    enter,
    layered,
    measure,
    setting_of,
)
from benchmarks.overlap import BYTES_PER_SECOND, COMPUTE, collectives
from benchmarks.record import Record
from benchmarks.virtual.chunk import Setting
from testing.namespaces import NetworkUnavailable

TINY = Setting(1, 2, 2, forward=0.002, backward=0.004, data_ranks=2, parameters=1001)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_take_their_share_of_compute_at_the_fastest_rate(layout):
    setting = setting_of(*layout)
    alone = (setting.parameters + 1) // setting.data_ranks * (setting.data_ranks - 1) * 4 / BYTES_PER_SECOND
    compute = setting.chunks_per_rank * setting.micro_batches * (setting.forward + setting.backward)
    assert sum(collectives(setting, 3)) * alone == pytest.approx(SHARE * compute, rel=1e-3)


def test_one_micro_batch_at_a_time_gathers_and_reduces_as_often_as_there_are_micro_batches():
    setting = setting_of(1, 2)
    chunks, micro_batches, resident = setting.chunks_per_rank, setting.micro_batches, 2
    assert collectives(setting, 1) == collectives(setting, 2) == [chunks, chunks]
    assert collectives(setting, 3) == [2 * chunks - resident, chunks]
    gathers = micro_batches * (2 * chunks - 2 * resident) + resident
    assert collectives(setting, 3, micro_batch_group=1) == [gathers, micro_batches * chunks]


def test_every_order_does_the_work_and_gets_its_rows():
    found = measure(TINY, repetitions=2)
    record = Record("network", {})
    enter(record, TINY, LINKS[0], found)
    rows = {(row.contender, row.metric): row.median for row in record.rows}
    assert {name for name, _ in rows} == {COMPUTE, OUTER, *map(layered, STAGES)}
    for stage in STAGES:
        name = layered(stage)
        ratio = rows[name, "step"] / rows[name, "bound"]
        assert rows[name, BOUND] == pytest.approx(ratio) and rows[name, "bound"] > rows[COMPUTE, "step"]
    (target,) = record.targets
    assert target.value == pytest.approx(max(rows[layered(stage), BOUND] for stage in STAGES))
    assert target.limit == LIMIT


@pytest.mark.parametrize(
    ("benchmark", "run", "message", "nodes"),
    [
        (islands, islands.run, "nothing measured between islands", 4),
        (latency, partial(latency.run, repetitions=1), "nothing measured at 1 Gbit/s", 4),
        (network, partial(network.run, LAYOUTS[:1], repetitions=1), "nothing measured", 2),
        (overlap, partial(overlap.run, overlap.LAYOUTS[:1], repetitions=1), "nothing measured at 1gbit", 2),
        (
            training_slow,
            partial(training_slow.run, layouts=((1, 2),), repetitions=1),
            "nothing measured at 200 Mbit/s",
            2,
        ),
        (unlike, unlike.run, "nothing measured between islands", 4),
        (updates, partial(updates.run, updates.LAYOUTS[:1], turns=1), "nothing measured", 2),
    ],
)
def test_a_machine_without_a_slow_link_says_so(monkeypatch, capsys, benchmark, run, message, nodes):
    def no_network(nodes, *_, **__):
        raise NetworkUnavailable(f"{nodes} nodes are too many")

    monkeypatch.setattr(benchmark, "throttled_network", no_network)
    record = run()
    assert not record.rows and not record.targets
    assert record.machine["network"] == f"{message}: {nodes} nodes are too many"
    assert message in capsys.readouterr().err
