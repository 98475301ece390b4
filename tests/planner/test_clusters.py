"""Ready clusters and cluster files."""

import copy
import json

import pytest

from ds_lgamp.fields import UNITS, parse_quantity, with_unit
from ds_lgamp.planner.cluster import CLUSTERS, GBIT, Efficiency, Host, named_cluster, parse_cluster, read_cluster

FILE = {
    "name": "mine",
    "nodes": 4,
    "gpus_per_node": 8,
    "peak": "312 TFLOP/s",
    "memory": "80 GB",
    "memory_bandwidth": "2039 GB/s",
    "inside": {"bandwidth": "300 GB/s", "latency": "4 us"},
    "between": {"bandwidth": "200 Gbit/s", "latency": "1e-5 s", "cards_per_node": 4},
    "price": "2 USD/h",
    "efficiency": {"matmul": 0.7},
}


def changed(path: str, value: object) -> dict:
    """Returns the file with the field at ``path`` replaced, or removed if ``value`` is None."""
    file = copy.deepcopy(FILE)
    section, _, key = path.rpartition(".")
    target = file[section] if section else file
    if value is None:
        del target[key]
    else:
        target[key] = value
    return file


def test_a_file_says_what_a_name_says():
    read, ready = parse_cluster(FILE), named_cluster("a100", 32)
    assert Efficiency(**read.efficiency) == Efficiency(matmul=0.7)
    assert {**vars(read), "efficiency": {}, "name": "a100"} == vars(ready)


def test_a_ready_cluster_has_as_many_nodes_as_it_needs():
    assert [named_cluster("h100", gpus).nodes for gpus in (1, 8, 9, 1024)] == [1, 1, 2, 128]


def test_a_host_has_defaults_and_is_shared_by_the_gpus_of_its_node():
    assert parse_cluster(FILE).host == Host() == named_cluster("a100").host
    told = parse_cluster({**FILE, "host": {"memory": "1 TB", "memory_bandwidth": "300 GB/s"}}).host
    assert told == Host(memory=125e9, memory_bandwidth=37.5e9)
    assert parse_cluster({**FILE, "host": {"bus": "25 GB/s"}}).host == Host(bus=25e9)
    lanes, data = 16, 128 / 130 / 8
    for name, transfers in (("a100", 16e9), ("h100", 32e9), ("h200", 32e9), ("b200", 32e9)):
        assert named_cluster(name).host.bus == pytest.approx(lanes * transfers * data, rel=1e-3)


def test_nodes_of_a100_have_four_cards_and_younger_ones_a_card_per_gpu():
    assert [named_cluster(name).cards_per_node for name in ("a100", "h100", "h200", "b200")] == [4, 8, 8, 8]


def test_every_gpu_comes_with_infiniband_and_three_kinds_of_ethernet():
    gpus = {"a100", "h100", "h200", "b200", "rtx4090"}
    assert len(CLUSTERS) == 4 * len(gpus) and {name.partition("-")[0] for name in CLUSTERS} == gpus
    for name in CLUSTERS:
        cluster = read_cluster(name)
        if "-" in name:
            assert cluster.between.bandwidth * cluster.cards_per_node == int(name.split("-")[1][:-4]) * GBIT


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("peak", "-312 TFLOP/s", "peak is '-312 TFLOP/s'; it must be"),
        ("peak", 312e12, "peak is 312000000000000.0; write a number and a unit"),
        ("memory", "80 GiBs", "memory is '80 GiBs'; write a number and a unit of bytes"),
        ("memory", "inf B", "memory is 'inf B'"),
        ("between.bandwidth", "-25 Gbit/s", "between.bandwidth is '-25 Gbit/s'"),
        ("between.bandwidth", None, "between.bandwidth is None"),
        ("between.cards_per_node", 0, "between.cards_per_node is 0; use a whole number"),
        ("between.lanes", 4, "between.lanes is unknown; use bandwidth"),
        ("inside", "fast", "inside is 'fast'; write an object"),
        ("nodes", 0, "nodes is 0; use a whole number"),
        ("nodes", 2.5, "nodes is 2.5"),
        ("colour", "blue", "colour is unknown"),
        ("efficiency", {"matmull": 0.7}, "efficiency.matmull is unknown; use .*matmul"),
        ("efficiency", {"matmul": -0.7}, "efficiency.matmul is -0.7; use a number above 0"),
        ("efficiency", {"matmul": "half"}, "efficiency.matmul is 'half'"),
        ("efficiency", {"dimension": float("inf")}, "efficiency.dimension is inf"),
        ("efficiency", "good", "efficiency is 'good'; write an object"),
        ("host", "large", "host is 'large'; write an object with bus, disk, memory, memory_bandwidth"),
        ("host", {"cores": 64}, "host.cores is unknown; use bus"),
        ("host", {"bus": 32}, "host.bus is 32; write a number and a unit"),
    ],
)
def test_a_wrong_field_of_a_file_is_named(path, value, message):
    with pytest.raises(ValueError, match=message):
        parse_cluster(changed(path, value))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "no JSON"), ("3", "no JSON object"), (None, "one of a100, a100-10")]
)
def test_what_is_no_cluster_is_refused(tmp_path, text, message):
    path = tmp_path / "cluster.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"cluster is '.*cluster.json'.*{message}"):
        read_cluster(str(path))


def test_a_cluster_file_is_read(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(FILE))
    assert read_cluster(str(path)) == parse_cluster(FILE)
    path.write_text(json.dumps(FILE), encoding="utf-8-sig")
    assert read_cluster(str(path)) == parse_cluster(FILE), "a byte order mark stands in front"


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("25 Gbit/s", "bytes per second", 3.125e9),
        ("80GB", "bytes", 80e9),
        ("1 GiB", "bytes", 2**30),
        ("5 us", "seconds", 5e-6),
        ("1 d", "seconds", 86400),
        ("3.6 USD/h", "dollars per second", 0.001),
    ],
)
def test_a_quantity_is_a_number_with_a_unit(text, kind, value):
    assert parse_quantity("field", text, kind) == pytest.approx(value)


@pytest.mark.parametrize("kind", UNITS)
@pytest.mark.parametrize("text", ["", "5", "five s", "5 parsec", "nan s", None, 5, "-1 B"])
def test_other_texts_are_refused_with_the_field(kind, text):
    with pytest.raises(ValueError, match="^field is "):
        parse_quantity("field", text, kind)


def test_a_number_is_written_with_three_digits_and_a_prefix():
    assert [with_unit(number, "B/s") for number in (2.5e10, 999, 0.0031)] == ["25 GB/s", "999 B/s", "3.1 mB/s"]
    assert [with_unit(number, "bit/s") for number in (999.4e9, 999.6e9)] == ["999 Gbit/s", "1 Tbit/s"]
