"""``ds_lgamp plan --model``: the table, JSON, files, and what is refused."""

import json
import re
from dataclasses import replace
from io import StringIO

import pytest
import torch

from ds_lgamp.cli.cluster import here
from ds_lgamp.cli.main import main
from ds_lgamp.cli.terminal import plain, print_rows
from ds_lgamp.planner.cluster import named_cluster, parse_cluster, with_part
from ds_lgamp.planner.write import why_not
from ds_lgamp.runtime.node import Calibration, HostRates, LinkRate

WORDS = ["plan", "--model", "gpt2", "--cluster", "a100-25gbit", "--gpus", "8", "--batch-size", "16", "--top", "3"]


def out_of(capsys, *words):
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_the_table_ranks_plans_and_says_why(capsys):
    text = out_of(capsys, *WORDS, "--tokens", "1e9")
    assert "on 8 of 8 GPUs of a100-25gbit, 16 sequences of 1024 tokens per step" in text
    assert all(head in text for head in ("method", "MFU", "bubble", "days", "cost"))
    assert "takes" in text and "A step computes for" in text


def test_no_figure_of_a_table_is_cut_off_on_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    words, figures = "layered, optimizer on the host", ["10 x 2 by 5", f"{plain(32.7, 3)} s", f"${plain(149_900, 4)}"]
    output = StringIO()
    output.isatty = lambda: True
    print_rows("title", ["method", "batch", "step", "cost"], [[words, *figures]], output)
    assert all(figure in output.getvalue() for figure in figures) and "…" not in output.getvalue()
    wide = StringIO()
    print_rows("title", ["method", *map(str, range(20))], [[words, *["$149,900"] * 20]], wide)
    assert wide.getvalue().count("$149,900") == 20 and all(word in wide.getvalue() for word in words.split())


@pytest.mark.parametrize(
    ("number", "told"), [(149_937, "149,900"), (9.374e6, "9,374,000"), (1.612e-5, "0.00001612"), (12.0, "12")]
)
def test_money_is_written_without_an_exponent(number, told):
    assert plain(number, 4) == told


def test_json_has_the_same_with_units_in_the_names(capsys):
    told = json.loads(out_of(capsys, *WORDS, "--json"))
    first, *_ = told["plans"]
    assert sum(first["parts_seconds"].values()) == pytest.approx(first["seconds"])
    assert first["data_ranks"] * first["pipeline_ranks"] * first["tensor_ranks"] == 8
    assert first["memory_bytes_total"] > 0 and first["days"] is None and first["dollars"] > 0
    assert len(told["reasons"]) == 2


def test_of_models_with_experts_the_table_has_the_ranks_that_divide_them(capsys, tmp_path):
    sizes = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128"
    words = [*WORDS[:2], f"{sizes} --num-experts 8 --moe-router-topk 2", *WORDS[3:]]
    table = out_of(capsys, *words)
    assert re.search(r" T +E +chunks ", table) and "E: ranks that divide the experts of a layer" in table
    assert re.search(r"0\.00\d+ billion parameters \(0\.00\d+ active\)", table)
    told = json.loads(out_of(capsys, *words, "--json"))
    assert told["model"]["active_parameters"] < told["model"]["parameters"]
    assert all(
        {"expert_ranks"} <= plan.keys() and plan["parts_seconds"]["expert_parallel"] >= 0 for plan in told["plans"]
    )
    assert " E " not in out_of(capsys, *WORDS)


def test_files_of_the_best_plan_that_a_script_can_run_and_a_plot_are_written(capsys, tmp_path):
    out_of(capsys, *WORDS, "--write", str(tmp_path / "run"), "--plot", str(tmp_path / "steps.svg"))
    config = json.loads((tmp_path / "run" / "ds_config.json").read_text())
    assert config["train_batch_size"] == 16 and "ds_lgamp" in config
    assert "torchrun" in (tmp_path / "run" / "launch.sh").read_text()
    assert "</svg>" in (tmp_path / "steps.svg").read_text()


def test_rounded_plans_are_told_and_written_where_they_are_asked_for(capsys, tmp_path):
    link = {"bandwidth": "1 Gbit/s", "latency": "30 us"}
    rates = {"peak": "300 TFLOP/s", "memory": "20 GB", "memory_bandwidth": "2 TB/s", "inside": link, "between": link}
    (tmp_path / "slow.json").write_text(json.dumps({"name": "slow", "nodes": 4, "gpus_per_node": 1, **rates}))
    words = ["plan", "--model", "gpt2", "--cluster", str(tmp_path / "slow.json"), "--batch-size", "16", "--top", "1"]
    assert "rounded" not in out_of(capsys, *words)
    table = out_of(capsys, *words, "--rounded", "4")
    assert "4-bit gradients" in table and "What travels rounded changes results a little" in table
    told = json.loads(out_of(capsys, *words, "--rounded", "--json", "--write", str(tmp_path / "run")))["plans"]
    assert {plan.get("gradient_bits") for plan in told} == {None, 8}
    config = json.loads((tmp_path / "run" / "ds_config.json").read_text())
    assert told[0]["activation_dtype"] == config["ds_lgamp"]["activation_dtype"] == "fp8"


def test_state_in_bf16_is_told_and_written_where_it_is_asked_for(capsys, tmp_path):
    assert "bf16" not in out_of(capsys, *WORDS)
    words = [*WORDS, "--state", "bf16"]
    assert "State in bf16, rounded by chance, changes results" in out_of(capsys, *words)
    told = json.loads(out_of(capsys, *words, "--json", "--write", str(tmp_path / "run")))["plans"]
    assert {plan["state"] for plan in told} == {"bf16"}
    config = json.loads((tmp_path / "run" / "ds_config.json").read_text())
    assert config["bf16"]["bf16_optimizer_states"] and config["ds_lgamp"]["stochastic_rounding"]


def test_moments_in_8_bits_are_told_and_left_to_the_script_where_they_are_asked_for(capsys, tmp_path):
    words = [*WORDS, "--state", "8bit"]
    assert "the script makes the optimizer of bitsandbytes that has them" in out_of(capsys, *words)
    told = json.loads(out_of(capsys, *words, "--json", "--write", str(tmp_path / "plan")))["plans"]
    assert {plan["state"] for plan in told} == {"8bit"}
    assert "optimizer" not in json.loads((tmp_path / "plan" / "ds_config.json").read_text())
    assert "AdamW8bit of bitsandbytes" in (tmp_path / "plan" / "launch.sh").read_text()


def test_plans_of_adapters_say_where_frozen_weights_lie_and_what_is_sent(capsys, tmp_path):
    words = [*WORDS, "--adapters", "16"]
    table = out_of(capsys, *words)
    assert "0.1244 billion parameters and 0.002359 of adapters" in table
    assert "In a step of the first plan, the rank that sends most sends " in table
    told = json.loads(out_of(capsys, *words, "--json", "--write", str(tmp_path / "run")))
    assert told["model"]["adapter_parameters"] == 2_359_296
    homes = {plan.get("keep_frozen"): plan["bytes_sent"] for plan in told["plans"]}
    assert homes.keys() == {None, "device", "host", "none"}
    assert homes["host"]["loaded"] > 0 == homes["host"]["frozen_gathers"] < homes["none"]["frozen_gathers"]
    assert 'r=16, target_modules="all-linear"' in (tmp_path / "run" / "launch.sh").read_text()
    assert "adapter" not in out_of(capsys, *WORDS) + out_of(capsys, *WORDS, "--json")


def test_if_no_script_can_run_a_printed_plan_the_best_of_all_others_is_written(capsys, tmp_path, monkeypatch):
    refuse = "ds_lgamp.cli.plan_search.why_not"
    monkeypatch.setattr(refuse, lambda model, of: why_not(model, of) if of.tensor_ranks == 2 else "not so")
    assert main([*WORDS, "--write", str(tmp_path / "run")]) == 0
    told = capsys.readouterr()
    assert " T2, " in told.err and re.search(
        r"no script can run the first plan, and this one takes \S+% long", told.err
    )
    assert "--tensor-model-parallel-size 2 " in (tmp_path / "run" / "launch.sh").read_text()
    monkeypatch.setattr(refuse, lambda model, configuration: "not so")
    with pytest.raises(SystemExit):
        main([*WORDS, "--write", str(tmp_path / "none")])
    assert "--write finds no plan that a script can run: not so" in capsys.readouterr().err


def test_steps_by_a_formula_are_marked(capsys, monkeypatch):
    assert "~0." not in out_of(capsys, *WORDS)
    assert json.loads(out_of(capsys, *WORDS, "--json"))["exact_seconds"] is None, "ZeRO-3"
    monkeypatch.setattr("ds_lgamp.planner.work.MOST_COMPUTES", 0)
    assert "~0." in out_of(capsys, *WORDS)


def test_the_shortest_training_is_told_by_method(capsys):
    words = ["plan", "--model", "x32", "--cluster", "a100", "--law", "width", "--tokens", "1e10"]
    text = out_of(capsys, *words)
    assert "critical batch 826 sequences (width)" in text and "days on" in text
    methods = json.loads(out_of(capsys, *words, "--json"))["methods"]
    assert methods["layered"]["days"] <= methods["1f1b"]["days"]


GPT2 = ["--model", "gpt2", "--cluster", "a100", "--batch-size", "8"]
LAW = ["--model", "x32", "--cluster", "a100", "--law", "width"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (GPT2[:4], "--model needs --batch-size"),
        ([*GPT2, "--model", "gpt5"], "model is 'gpt5'; use a config.json"),
        ([*GPT2, "--cluster", "z9"], "cluster is 'z9'; use a file or one of a100"),
        ([*GPT2, "--batch-size", "0"], "'0' must be a whole number from 1"),
        ([*GPT2, "--tokens", "-1"], "'-1' must be a number above 0"),
        ([*GPT2, "--objective", "x"], "invalid choice: 'x' (choose from"),
        ([*GPT2, "--gpus", "12"], "--gpus is 12, but a100 has 16"),
        ([*GPT2, "--host-memory", "much"], "--host-memory is 'much'"),
        ([*GPT2, "--here"], "argument --here: not allowed with argument --cluster"),
        (["--model", "gpt2", "--here", "--batch-size", "8"], "--here finds no GPU on this machine; name one with"),
        (["--calibrate", "--here"], "--here belongs to --model; give --cluster"),
        (LAW, "--law needs --tokens"),
        ([*LAW, "--top", "3"], "--top does not go with --law"),
        ([*LAW, "--rounded"], "--rounded does not go with --law"),
        ([*LAW, "--state", "bf16"], "--state does not go with --law"),
        ([*GPT2, "--state", "fp16"], "invalid choice: 'fp16'"),
        (["--runs", "runs.csv", "--cluster", "a100", "--state", "bf16"], "--state belongs to --model; remove it"),
        ([*LAW, "--adapters", "8"], "--law does not go with --adapters"),
        ([*GPT2, "--rounded", "--adapters", "8"], "--rounded does not go with --adapters"),
        ([*GPT2, "--adapters", "0"], "'0' must be a whole number from 1"),
        ([*GPT2, "--rounded", "2"], "invalid choice: 2 (choose from 8, 4)"),
        (["--runs", "runs.csv", "--cluster", "a100", "--top", "3"], "--top belongs to --model; remove it"),
        (["--cluster", "a100"], "one of the arguments --model --runs --calibrate is required"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(words, sentence, capsys):
    with pytest.raises(SystemExit):
        main(["plan", *words])
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\xff\xfe{\x00}\x00", "which is no text in UTF-8 (invalid start byte); save it as such"),
        (b"[" * 100_000, "which is nested too deeply to read; name another file"),
        (b"{", "which is no JSON: Expecting property name"),
        (b"[]", "which holds no JSON object; name another file"),
    ],
)
@pytest.mark.parametrize("option", ["model", "cluster"])
def test_a_file_that_cannot_be_understood_is_named_with_its_option(content, sentence, option, capsys, tmp_path):
    path = tmp_path / "wrong.json"
    path.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        main(["plan", *GPT2, f"--{option}", str(path)])
    assert ended.value.code == 2 and f"{option} is '{path}', {sentence}" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_and_a_table_that_is_not_there_are_named(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    for words, sentence in (
        ([*WORDS, "--write", str(tmp_path / "file" / "run")], "cannot be written (Not a directory); name another fold"),
        (["plan", "--runs", "nope.csv", "--cluster", "a100"], "--runs is 'nope.csv', which cannot be read (No such"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2 and sentence in capsys.readouterr().err


def test_a_calibration_writes_a_cluster_that_the_planner_reads(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("ds_lgamp.runtime.node.COPIED", {"cpu": 1 << 16})
    monkeypatch.setattr("ds_lgamp.runtime.node.SQUARES", {"cpu": (16, 64)})
    path = tmp_path / "here.json"
    path.write_text('{"name": "ours", "price": "2 USD/h", "between": {"bandwidth": "25 Gbit/s", "latency": "9 us"}}')
    assert main(["plan", "--calibrate", "--cluster", str(path)]) == 0
    told = capsys.readouterr().err
    assert "inside was not measured" in told and "between was not measured" not in told
    cluster = parse_cluster(json.loads(path.read_text()))
    assert (cluster.name, cluster.nodes, cluster.gpus_per_node) == ("ours", 1, 1)
    assert cluster.peak > 1e6 and cluster.memory > 1e9 and cluster.memory_bandwidth > 1e6
    assert cluster.between.bandwidth == 25e9 / 8 and cluster.price == pytest.approx(2 / 3600), "kept, as not measured"
    monkeypatch.setattr("ds_lgamp.cli.cluster.calibrate", None)
    for content, words in (
        ("no JSON", "which is no JSON"),
        ('{"islands": []}', "has islands, but --calibrate describes nodes that are alike"),
        ('{"nodes": "two"}', "whose nodes is 'two'; write a whole number"),
    ):
        path.write_text(content)
        with pytest.raises(SystemExit):
            main(["plan", "--calibrate", "--cluster", str(path)])
        assert words in capsys.readouterr().err and path.read_text() == content


def test_one_process_calibrates_a_file_of_many_gpus(capfd, tmp_path, monkeypatch):
    found = Calibration(1, 1, 1e12, 10.0, 10**9, 1e9, None, None, None)
    monkeypatch.setattr("ds_lgamp.cli.cluster.calibrate", lambda device: found)
    path = tmp_path / "ours.json"
    path.write_text('{"nodes": 16, "gpus_per_node": 8}')
    assert main(["plan", "--calibrate", "--cluster", str(path), "--json"]) == 0
    written = json.loads(capfd.readouterr().out)
    assert (written["nodes"], written["gpus_per_node"]) == (16, 8) and json.loads(path.read_text()) == written
    # The network of the ready cluster was not reached, and its nodes have four cards.
    assert "between" not in written["efficiency"] and written["between"]["cards_per_node"] == 4


def test_here_plans_for_what_was_measured(capsys, monkeypatch):
    """Two GPUs of 8 GB, and a host of 64 GB that takes no part in reaching its rates."""
    found = Calibration(1, 1, 1e14, 50.0, 8 * 10**9, 1e12, None, None, None, HostRates(64 * 10**9, 2e10, 5e10))
    monkeypatch.setattr("ds_lgamp.cli.cluster.calibrate", lambda device: found)
    monkeypatch.setattr("ds_lgamp.cli.cluster._begin", lambda ranks: torch.device("meta"))
    monkeypatch.setattr("ds_lgamp.cli.cluster.device_count", lambda device: 2)
    monkeypatch.setattr("ds_lgamp.cli.cluster.link_between", lambda first, second: LinkRate(1e10, 1e-5))
    cluster = here()
    assert (cluster.gpus, cluster.memory, cluster.inside.bandwidth) == (2, 8e9, 1e10)
    assert (cluster.host.memory, cluster.host.bus) == (32e9, 2e10), "two GPUs share the host's memory"
    assert (cluster.efficiency["bus"], cluster.efficiency["host_memory"]) == (1, 1)
    text = out_of(capsys, "plan", "--model", "gpt2", "--here", "--gpus", "1", "--batch-size", "8")
    assert "on 1 of 1 GPUs of this machine" in text


def test_host_memory_says_what_the_gpus_of_a_node_share():
    node = named_cluster("rtx4090", 8)
    assert with_part(node, 2, "128 GB").host.memory == 64e9
    assert with_part(node, 2, None) == replace(node, gpus_per_node=2)
    with pytest.raises(ValueError, match="--gpus is 9, but rtx4090 has 8"):
        with_part(node, 9, None)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("ds_lgamp.cli.cluster.calibrate", None)
    with pytest.raises(SystemExit):
        main(["plan", "--calibrate", "--cluster", str(tmp_path / "no folder" / "ours.json")])
    assert "cannot be written (No such file or directory); name another file" in capsys.readouterr().err


def test_a_disk_is_proposed_with_what_it_must_hold(capsys):
    small = ["--cluster", "rtx4090", "--gpus", "1", "--host-memory", "16 GB", "--batch-size", "4", "--top", "1"]
    words = ["plan", "--model", "llama-1b", *small, "--sequence-length", "1024", "--disk", "5 GB/s"]
    printed = " ".join(out_of(capsys, *words).split())
    assert "on a disk" in printed and "The disk of a node holds" in printed and "/local_nvme" in printed
    plan = json.loads(out_of(capsys, *words, "--json"))["plans"][0]
    assert plan["on_disk"] and plan["memory_bytes"]["disk"] > 16e9
