"""What Linux shows of a node; and how many threads update on the host: a rank's share of its cores, but for one."""

import os

import pytest

from ds_lgamp.runtime import node
from ds_lgamp.runtime.node import interface_of, network_kind, own_interface, update_threads, usable_cores

ALL, LOWER, UPPER = set(range(16)), set(range(8)), set(range(8, 16))


def threads(monkeypatch, own, *others, omp=None):
    """The answer of a rank that may run on ``own``, beside other ranks: each the name of its machine, and cores."""
    monkeypatch.setattr(node, "machine", lambda: "here")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: own)
    monkeypatch.setattr(node, "everyone", lambda mine: [mine, *others])
    monkeypatch.setattr(node, "usable_cores", len)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    return update_threads()


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        (ALL, [], 15),
        (ALL, [("here", ALL)] * 3, 3),
        (LOWER, [("here", UPPER)], 7),
        (LOWER, [("here", LOWER), ("here", UPPER)], 3),
        (ALL, [("there", ALL)], 15),
        ({0, 1}, [("here", {0, 1})], 1),
        ({0, 1}, [("here", {0, 1})] * 7, 1),
    ],
    ids=["alone", "of four", "bound", "two bound alike", "another machine", "a core each", "less than a core each"],
)
def test_ranks_share_the_cores_of_a_machine(monkeypatch, own, others, expected):
    assert threads(monkeypatch, own, *others) == expected


def test_a_number_that_somebody_set_stays_but_not_that_of_torchrun(monkeypatch):
    assert threads(monkeypatch, ALL, omp="4") is None
    assert threads(monkeypatch, ALL, omp="1") == 15


def written(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


SIBLINGS = {
    f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)
}
LIMITS = {
    "no limit known": ({}, 4),
    "no limit": ({"fs/cgroup/cpu.max": "max 100000\n"}, 4),
    "two and a half cores": ({"fs/cgroup/cpu.max": "250000 100000\n"}, 2),
    "half a core": ({"fs/cgroup/cpu.max": "50000 100000\n"}, 1),
    "more than there are": ({"fs/cgroup/cpu.max": "6400000 100000\n"}, 4),
    "version 1": ({"fs/cgroup/cpu/cpu.cfs_quota_us": "300000", "fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 3),
    "version 1, no number": ({"fs/cgroup/cpu/cpu.cfs_quota_us": "", "fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 4),
    "no number": ({"fs/cgroup/cpu.max": ""}, 4),
    "version 1, no limit": ({"fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 4),
}


@pytest.mark.parametrize(("limit", "expected"), LIMITS.values(), ids=LIMITS)
def test_a_container_may_use_less_than_it_sees(tmp_path, limit, expected):
    assert usable_cores(range(8), written(tmp_path, SIBLINGS | limit)) == expected


def test_hyper_threads_of_one_core_count_once(tmp_path):
    written(tmp_path, SIBLINGS)
    assert usable_cores([0, 4, 1], tmp_path) == 2
    # Linux told nothing of these.
    assert usable_cores([20, 21], tmp_path) == 2


@pytest.mark.parametrize(
    ("ports", "kind"),
    [
        ([], "ethernet"),
        ([("InfiniBand", "4: ACTIVE")], "infiniband"),
        ([("Ethernet", "4: ACTIVE")], "roce"),
        ([("Ethernet", "4: ACTIVE"), ("InfiniBand", "4: ACTIVE")], "infiniband"),
        ([("Ethernet", "4: ACTIVE"), ("InfiniBand", "1: DOWN")], "roce"),
        ([("InfiniBand", "1: DOWN")], "ethernet"),
    ],
)
def test_the_fastest_active_port_is_the_kind_of_network(tmp_path, ports, kind):
    for number, (layer, state) in enumerate(ports):
        port = tmp_path / "infiniband" / f"mlx5_{number}" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "link_layer").write_text(f"{layer}\n")
        (port / "state").write_text(f"{state}\n")
    assert network_kind(tmp_path) == kind


def test_loopback_is_no_interface_to_others():
    assert interface_of("127.0.0.1") is None and own_interface("127.0.0.1", 29500) is None


def test_an_address_of_nobody_has_no_interface():
    assert interface_of("203.0.113.7") is None


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_container_may_grant_a_part_of_the_memory(tmp_path, name):
    whole = node.host_memory(tmp_path)
    for limit, expected in ((str(whole // 2), whole // 2), ("max", whole), (str(1 << 62), whole)):
        assert node.host_memory(written(tmp_path, {f"fs/cgroup/{name}": limit})) == expected


@pytest.mark.parametrize(
    ("line", "name"), [("0::", "memory.max"), ("4:memory:", "memory/{}memory.limit_in_bytes")], ids=["v2", "v1"]
)
def test_a_job_may_get_less_memory_than_its_machine_has_from_a_group_around_it(tmp_path, line, name):
    whole, slice_of = node.host_memory(tmp_path), name if "{}" in name else "{}" + name
    limits = {"jobs/": str(whole // 4), "jobs/step/": "max", "others/": str(whole // 8)}
    for folder, limit in limits.items():
        written(tmp_path, {"fs/cgroup/" + slice_of.format(folder): limit})
    written(tmp_path, {"process/cgroup": f"7:cpu,cpuacct:/others\n{line}/jobs/step\n"})
    assert node.host_memory(tmp_path, tmp_path / "process") == whole // 4
