"""``ds_lgamp plan --model`` on a cluster file with islands."""

import json

import pytest

from ds_lgamp.cli.main import main

ISLAND = {"nodes": 1, "gpus_per_node": 2, "network": "ethernet", "bandwidth": "100 Gbit/s", "latency": "10 us"}
FILE = {
    "name": "rooms",
    "islands": [{"name": "east", **ISLAND}, {"name": "west", **ISLAND, "speed": 0.5}],
    "between": {"bandwidth": "1 Gbit/s", "latency": "50 us"},
    "peak": "100 TFLOP/s",
    "memory": "80 GB",
    "memory_bandwidth": "1 TB/s",
}


@pytest.fixture
def words(tmp_path):
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(FILE))
    return ["plan", "--model", "gpt2", "--cluster", str(file), "--batch-size", "4", "--top", "2"]


def test_the_table_tells_bytes_by_kind_of_link_and_the_order_of_ranks(words, capsys, tmp_path):
    assert main([*words, "--tokens", "1e9", "--write", str(tmp_path / "run")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "on 4 GPUs of rooms, 4 sequences of 1024 tokens per step" in text
    heads = "exposed", "between", "in islands", "days"
    assert all(word in text for word in (*heads, "islands in the order", "the busiest link between islands"))
    launch = (tmp_path / "run" / "launch.sh").read_text()
    assert f"-m ds_lgamp run --cluster {tmp_path / 'cluster.json'}" in launch and "--nnodes 2" in launch


def test_json_has_the_same_with_units_in_the_names(words, capsys):
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["cluster"] == {"name": "rooms", "gpus": 4, "islands": ["east", "west"]}
    for plan in told["plans"]:
        assert plan["data_ranks"] * plan["pipeline_ranks"] * plan["tensor_ranks"] == 4
        assert 0 <= plan["exposed_seconds"] < plan["seconds"] and plan["memory_bytes_total"] > 0
        assert set(plan["bytes_by_link"]) == {"node", "island", "between"} and plan["bytes_by_link"]["between"] > 0


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--objective", "memory"], "--objective is 'memory', but plans for islands are ranked by time"),
        (["--gpus", "4"], "--gpus does not go with islands"),
        (["--plot", "steps.svg"], "--plot does not go with islands"),
        (["--law", "kaplan"], "--law does not go with islands"),
        (["--rounded"], "--rounded does not go with islands"),
    ],
)
def test_what_plans_for_islands_cannot_do_is_refused(words, more, sentence, capsys):
    with pytest.raises(SystemExit):
        main([*words, *more])
    assert sentence in capsys.readouterr().err


def test_files_need_as_many_gpus_on_every_node(words, tmp_path, capsys):
    wide = {"name": "west", **ISLAND, "gpus_per_node": 6}
    (tmp_path / "cluster.json").write_text(json.dumps({**FILE, "islands": [FILE["islands"][0], wide]}))
    with pytest.raises(SystemExit):
        main([*words, "--batch-size", "8", "--write", str(tmp_path / "run")])
    assert "gpus_per_node differ in rooms" in capsys.readouterr().err
