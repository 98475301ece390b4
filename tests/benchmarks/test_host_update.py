"""Every way to update a chunk on the host is timed and compared with the memory's bound."""

from benchmarks import host_update


def test_every_way_has_its_time_and_its_ratio():
    record = host_update.run(1 << 12, repetitions=2)
    found = {(row.contender, row.config["threads"], row.metric): row for row in record.rows}
    for way in host_update.WAYS:
        for threads in host_update.THREADS:
            assert found[way.name, threads, "update"].median > 0
            assert found[way.name, threads, "update / bound"].median > 0
    floors = [found[host_update.FLOOR, threads, "update / bound"].median for threads in host_update.THREADS]
    assert [target.floor for target in record.targets] == floors
