"""Cluster files with islands."""

import copy
import json

import pytest

from ds_lgamp.planner.cluster import Link, parse_cluster
from ds_lgamp.planner.islands import parse_islands, read_islands

FILE = {
    "name": "two-sites",
    "islands": [
        {
            "name": "east",
            "nodes": ["e0", "e1"],
            "gpus_per_node": 8,
            "speed": 2,
            "network": "infiniband",
            "bandwidth": "200 Gbit/s",
            "latency": "10 us",
            "cards_per_node": 4,
            "nccl_network": "IB",
            "environment": {"NCCL_IB_HCA": "mlx5"},
        },
        {
            "name": "west",
            "nodes": ["w0"],
            "gpus_per_node": 8,
            "network": "roce",
            "bandwidth": "100 Gbit/s",
            "latency": "20 us",
            "interface": "eth1",
            "outside_interface": "eth2",
        },
    ],
    "between": {"bandwidth": "10 Gbit/s", "latency": "50 us", "interface": "eth0", "nccl_network": "Socket"},
    "pairs": [{"islands": ["west", "east"], "bandwidth": "1 Gbit/s", "latency": "1 ms"}],
    "inside": {"bandwidth": "300 GB/s", "latency": "4 us"},
    "peak": "312 TFLOP/s",
}


def changed(path: str, value: object) -> dict:
    """Returns the file with the field at ``path``, such as islands.0.name, replaced; removed if ``value`` is None."""
    file = copy.deepcopy(FILE)
    *sections, key = (int(step) if step.isdecimal() else step for step in path.split("."))
    target = file
    for section in sections:
        target = target[section]
    if value is None:
        del target[key]
    else:
        target[key] = value
    return file


def test_a_file_says_what_joins_every_two_nodes():
    cluster = parse_islands(FILE)
    assert cluster.nodes == {"e0": 0, "e1": 0, "w0": 1} and cluster.gpus == 24 and not cluster.numbered
    assert vars(cluster.link(0, 0)) == pytest.approx({"bandwidth": 25e9, "latency": 1e-5})
    assert cluster.link(0, 1) == cluster.link(1, 0) == Link(0.125e9, 1e-3)
    assert cluster.islands[0].environment == {"NCCL_IB_HCA": "mlx5"}


def test_every_island_has_its_own_transports_inside_and_outside():
    cluster = parse_islands(FILE)
    assert [tuple(island.transport) for island in cluster.islands] == [
        ("infiniband", None, "IB"),
        ("roce", "eth1", None),
    ]
    assert [tuple(cluster.outside(island)) for island in (0, 1)] == [
        ("ethernet", "eth0", "Socket"),
        ("ethernet", "eth2", "Socket"),
    ]


def test_nodes_may_be_a_number():
    file = changed("islands.0.nodes", 2)
    file["islands"][1]["nodes"] = 1
    cluster = parse_islands(file)
    assert cluster.numbered and list(cluster.nodes) == ["east-0", "east-1", "west-0"]


def test_a_cluster_file_with_islands_is_read(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(FILE))
    assert read_islands(str(path)) == parse_islands(FILE)
    with pytest.raises(ValueError, match="missing.json', which cannot be read"):
        read_islands(str(tmp_path / "missing.json"))


def test_predictions_of_given_runs_refuse_islands():
    with pytest.raises(ValueError, match="has islands, but this takes equal nodes"):
        parse_cluster(FILE)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("islands", [], "islands is \\[\\]; write a list of objects with bandwidth"),
        ("islands", "east", "islands is 'east'; write a list"),
        ("islands.1", "west", "islands\\[1\\] is 'west'; write an object"),
        ("islands.1.name", "east", "islands\\[\\].name has 'east' twice"),
        ("islands.1.name", " ", "islands\\[1\\].name is ' '; write a name"),
        ("islands.1.nodes", ["e0"], "islands\\[\\].nodes has 'e0' twice"),
        ("islands.1.nodes", [], "islands\\[1\\].nodes is \\[\\]; write a list of host names"),
        ("islands.1.nodes", 0, "islands\\[1\\].nodes is 0"),
        ("islands.1.nodes", [3], "islands\\[1\\].nodes\\[0\\] is 3; write a name"),
        ("islands.1.nodes", 1, "nodes are numbers and lists of names"),
        ("islands.1.gpus_per_node", 0, "islands\\[1\\].gpus_per_node is 0"),
        ("islands.1.network", "token ring", "islands\\[1\\].network is 'token ring'; use one of infiniband"),
        ("islands.1.bandwidth", "fast", "islands\\[1\\].bandwidth is 'fast'"),
        ("islands.1.latency", None, "islands\\[1\\].latency is None"),
        ("islands.1.cards_per_node", 1.5, "islands\\[1\\].cards_per_node is 1.5"),
        ("islands.1.interface", 0, "islands\\[1\\].interface is 0; write a name"),
        ("islands.1.outside_interface", "", "islands\\[1\\].outside_interface is ''"),
        ("islands.1.nccl_network", 3, "islands\\[1\\].nccl_network is 3"),
        (
            "islands.1.uplink",
            "1 Gbit",
            "islands\\[1\\].uplink is '1 Gbit'; write a number and a unit",
        ),
        ("islands.1.speed", 0, "islands\\[1\\].speed is 0; use a number above 0"),
        ("islands.1.speed", "twice", "islands\\[1\\].speed is 'twice'"),
        ("islands.1.environment", "NCCL_DEBUG=INFO", "islands\\[1\\].environment is 'NCCL_DEBUG=INFO'"),
        ("islands.0.environment.PATH", "/", "islands\\[0\\].environment.PATH is unknown; use names that begin"),
        ("islands.0.environment.NCCL_DEBUG", 1, "islands\\[0\\].environment.NCCL_DEBUG is 1; write a text"),
        ("islands.1.colour", "red", "islands\\[1\\].colour is unknown"),
        ("between", None, "between is None; write an object"),
        ("between.bandwidth", None, "between.bandwidth is None"),
        ("between.network", "string", "between.network is 'string'"),
        ("between.interface", 7, "between.interface is 7"),
        ("between.cards_per_node", 2, "between.cards_per_node is unknown"),
        ("pairs", "all", "pairs is 'all'; write a list"),
        ("pairs.0", "east-west", "pairs\\[0\\] is 'east-west'"),
        ("pairs.0.islands", ["east", "east"], "pairs\\[0\\].islands is \\['east', 'east'\\]; name two of east, west"),
        ("pairs.0.islands", "east", "pairs\\[0\\].islands is 'east'"),
        ("pairs.0.latency", "soon", "pairs\\[0\\].latency is 'soon'"),
        ("pairs.0.speed", 1, "pairs\\[0\\].speed is unknown"),
        ("pairs", FILE["pairs"] * 2, "pairs\\[1\\].islands is .*, which an earlier pair names"),
        ("inside.bandwidth", 3, "inside.bandwidth is 3"),
        ("peak", "fast", "peak is 'fast'"),
        ("nodes", 2, "nodes is unknown; use between"),
        ("name", "", "name is ''"),
    ],
)
def test_a_wrong_field_is_named(path, value, message):
    with pytest.raises(ValueError, match=message):
        parse_islands(changed(path, value))
