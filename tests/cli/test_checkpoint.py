"""``ds_lgamp checkpoint``: its output, its files and its refusals."""

import gc
import json
import sys
import weakref

import pytest
import safetensors
import safetensors.torch
import torch

from ds_lgamp.checkpoint.folder import write_latest
from ds_lgamp.checkpoint.whole import read_whole, verify, write_whole
from ds_lgamp.cli.main import main
from testing.checkpoints import content, example, flip, flip_in, items_file, written


@pytest.fixture
def run(tmp_path):
    """Returns a directory with the example as its latest checkpoint."""
    written(tmp_path / "run" / "global_step3")
    write_latest(tmp_path / "run", "global_step3")
    return tmp_path / "run"


@pytest.fixture
def command(capfd):
    """Returns the exit status, the standard output and the standard error."""

    def run(*words):
        try:
            status = main(["checkpoint", *map(str, words)])
        except SystemExit as error:
            status = error.code
        return status, *capfd.readouterr()

    return run


def refused(done, words):
    status, output, error = done
    assert status == 1 and output == "" and error.count("\n") == 1
    assert error.startswith("ds_lgamp checkpoint ") and words in error


def exported():
    """Returns names and values of the example in other formats."""
    whole = example()
    return {**{name: tensor.float() for name, tensor in whole.parameters.items()}, **whole.buffers}


def same(tensors, expected):
    return tensors.keys() == expected.keys() and all(
        tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor) for name, tensor in expected.items()
    )


def test_info_is_what_a_person_asks_first(command, run):
    status, output, error = command("info", run)
    assert status == 0 and error == ""
    size = sum(path.stat().st_size for path in (run / "global_step3").rglob("*") if path.is_file())
    assert output.splitlines() == [
        f"checkpoint   {run / 'global_step3'}",
        "steps        3, 96 samples",
        "layout       2 pipeline x 4 data-parallel ranks, ZeRO stage 3, layered, 3 chunks",
        "data type    bfloat16",
        "parameters   5 of 95 elements, 2 buffers",
        "optimizer    AdamW, 1 groups, state: exp_avg, square, step",
        "lr scheduler LambdaLR",
        f"on disk      {size:,} bytes",
        "versions     ds_lgamp 0.1.0, torch 2.13.0, deepspeed 0.19.8",
    ]


def test_info_as_json_has_the_same_and_layout_and_counters_in_full(command, run):
    status, output, error = command("info", run / "global_step3", "--json")
    assert status == 0 and error == ""
    described = json.loads(output)
    assert described["parameters"] == {"count": 5, "elements": 95} and described["buffers"] == 2
    assert described["optimizer"] == {"class": "AdamW", "groups": 1, "state": ["exp_avg", "square", "step"]}
    assert described["layout"] == example().state["layout"] and described["counters"] == example().state["counters"]
    assert described["lr_scheduler"] == "LambdaLR" and described["versions"]["torch"] == "2.13.0"


def test_verify_reads_every_byte(command, run):
    assert command("verify", run) == (0, f"{run / 'global_step3'} is whole\n", "")
    path = items_file(run / "global_step3")
    flip(path, path.stat().st_size // 2, 3)
    refused(command("verify", run), f"verify: {path} is damaged: its checksum differs; restore the")


def test_what_was_done_is_told_as_json(command, run, tmp_path):
    def told(*words):
        return json.loads(command(*words, "--json")[1])

    assert told("verify", run) == {"folder": str(run / "global_step3"), "whole": True}
    assert told("export", run, tmp_path / "weights") == {"folder": str(tmp_path / "weights")}
    imported = {"folder": str(tmp_path / "new"), "weights_only": True}
    assert told("import", tmp_path / "weights", tmp_path / "new") == imported


@pytest.mark.parametrize("action", ["info", "verify", "export"])
def test_what_is_no_checkpoint_is_refused(command, tmp_path, action):
    words = [tmp_path / "absent", *([tmp_path / "target"] if action == "export" else [])]
    refused(command(action, *words), f"{action}: {tmp_path / 'absent'} is no checkpoint of ds_lgamp; name a folder")
    write_latest(tmp_path, "gone")
    words[0] = tmp_path
    refused(command(action, *words), f"{action}: {tmp_path / 'gone'} is no checkpoint of ds_lgamp; name a folder")


def test_weights_are_exported_into_one_file(command, run, tmp_path):
    target = tmp_path / "weights"
    assert command("export", run, target) == (0, f"wrote {target}\n", "")
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]
    assert same(safetensors.torch.load_file(target / "model.safetensors"), exported())
    with safetensors.safe_open(target / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_parameters_are_exported_in_bf16_and_buffers_as_they_are(command, run, tmp_path):
    assert command("export", run, tmp_path / "weights", "--dtype", "bf16")[0] == 0
    expected = {name: tensor.bfloat16() for name, tensor in example().parameters.items()} | example().buffers
    assert same(safetensors.torch.load_file(tmp_path / "weights" / "model.safetensors"), expected)


def test_large_weights_are_exported_into_several_files_one_after_another(command, run, tmp_path, monkeypatch):
    """Two tensors of the example, of 240 and 112 bytes, exceed the limit of 100 bytes per file."""
    save, held, most = safetensors.torch.save_file, [], []

    def save_and_look(tensors, *arguments, **options):
        gc.collect()
        most.append(sum(tensor.nbytes for tensor in map(lambda reference: reference(), held) if tensor is not None))
        held.extend(weakref.ref(tensor) for tensor in tensors.values())
        save(tensors, *arguments, **options)

    monkeypatch.setattr(safetensors.torch, "save_file", save_and_look)
    assert command("export", run, tmp_path / "weights", "--max-shard-size", 1e-7)[0] == 0
    assert most == [0, 0, 0]
    files = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == [*files, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "weights" / "model.safetensors.index.json").read_text())
    tensors = {}
    for file in files:
        own = safetensors.torch.load_file(tmp_path / "weights" / file)
        assert {name for name, place in index["weight_map"].items() if place == file} == own.keys()
        assert len(own) == 1 or sum(tensor.nbytes for tensor in own.values()) <= 100
        tensors |= own
    assert same(tensors, exported())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("arguments", [[], ["--max-shard-size", "1e-7"]])
def test_exported_weights_are_imported_as_they_were(command, run, tmp_path, arguments):
    assert command("export", run, tmp_path / "weights", *arguments)[0] == 0
    status, output, error = command("import", tmp_path / "weights", tmp_path / "new" / "tag")
    assert (status, error) == (0, "")
    assert output == f"wrote {tmp_path / 'new' / 'tag'}: weights only, for load_module_only=True\n"
    assert (tmp_path / "new" / "latest").read_text() == "tag"
    verify(tmp_path / "new" / "tag")
    whole = read_whole(tmp_path / "new" / "tag")
    assert whole.state["optimizer"] is None and not whole.moments and whole.client_state == {}
    assert same(whole.parameters, {name: tensor.float() for name, tensor in example().parameters.items()})
    assert same(whole.buffers, example().buffers)
    assert list(whole.parameters)[0] == "tied_modules.embed.weight" and list(whole.parameters)[-1] == "10.weight"
    status, output, _ = command("info", tmp_path / "new")
    assert status == 0 and "optimizer    none, weights only\n" in output


@pytest.mark.parametrize("arguments", [[], ["--max-shard-size", "1e-7"]])
def test_a_model_of_transformers_is_exported_by_its_own_names_and_imported_by_those_of_its_layers(
    command, tmp_path, arguments
):
    names = ("tied_modules.ends.model.embed.weight", "1.model.blocks.0.weight", "2.model.blocks.1.weight")
    whole = example()
    whole.state["layers"]["names_of_model"] = True
    whole.state["parameters"] = {name: {"shape": [30], "group": None} for name in names}
    parameters = {name: torch.randn(30) for name in names}
    buffers = {"1.model.blocks.0.mask": torch.ones(2)}
    write_whole(tmp_path / "run", whole._replace(parameters=parameters, buffers=buffers, moments={}))
    assert command("export", tmp_path / "run", tmp_path / "weights", *arguments)[0] == 0
    found = {}
    for file in (tmp_path / "weights").glob("*.safetensors"):
        found |= safetensors.torch.load_file(file)
    own = dict(zip(["model.embed.weight", "model.blocks.0.weight", "model.blocks.1.weight"], parameters.values()))
    assert same(found, {**own, "model.blocks.0.mask": torch.ones(2)})
    assert command("import", tmp_path / "weights", tmp_path / "new" / "tag")[0] == 0
    imported = read_whole(tmp_path / "new" / "tag")
    assert same(imported.parameters, parameters) and same(imported.buffers, buffers)
    assert imported.state["layers"]["names_of_model"]


def test_weights_of_others_are_imported(command, tmp_path):
    """The file does not name its buffers. Tensors that do not hold real numbers become buffers."""
    state = {"0.weight": torch.randn(2, 3).half(), "0.num_batches_tracked": torch.tensor(4)}
    safetensors.torch.save_file(state, tmp_path / "start.v1.safetensors")
    (tmp_path / "run").mkdir()
    assert command("import", tmp_path / "start.v1.safetensors", tmp_path / "run")[0] == 0
    assert (tmp_path / "run" / "latest").read_text() == "start.v1"
    whole = read_whole(tmp_path / "run" / "start.v1")
    assert same(whole.parameters, {"0.weight": state["0.weight"]})
    assert same(whole.buffers, {"0.num_batches_tracked": state["0.num_batches_tracked"]})
    assert whole.state["layout"]["data_type"] == "float16"


def test_a_checkpoint_becomes_one_of_stock_deepspeed_and_back(command, run, tmp_path):
    ranks = ["--pipeline-ranks", 2, "--data-ranks", 3]
    (tmp_path / "stock").mkdir()
    target = tmp_path / "stock" / "global_step3"
    exported = command("export", run, tmp_path / "stock", "--format", "deepspeed", *ranks)
    assert exported[:2] == (0, f"wrote {target}\n")
    assert (tmp_path / "stock" / "latest").read_text() == "global_step3"
    assert len(list(target.glob("*optim_states.pt"))) == 6
    imported = command("import", tmp_path / "stock", tmp_path / "new" / "tag")
    assert imported[:2] == (0, f"wrote {tmp_path / 'new' / 'tag'}\n")
    verify(tmp_path / "new" / "tag")
    there, here = example(), read_whole(tmp_path / "new" / "tag")
    assert same(here.parameters, there.parameters) and same(here.buffers, there.buffers)
    for key, moments in there.moments.items():
        assert same(here.moments[key], moments)
    assert here.client_state == there.client_state and here.state["counters"]["global_steps"] == 3
    refused(command("export", run, tmp_path / "stock", "--format", "deepspeed", *ranks), "global_step3 exists; remove")
    (target / "layer_00-model_states.pt").unlink()
    refused(command("import", tmp_path / "stock", tmp_path / "third"), "import: ")
    assert not (tmp_path / "third").exists()


def test_what_is_there_is_never_overwritten(command, run, tmp_path):
    before = content(read_whole(run / "global_step3"))
    refused(command("export", run, run), f"export: {run} exists; remove it or name another folder")
    assert command("export", run, tmp_path / "weights")[0] == 0
    for target in (run / "global_step3", run / "absent" / ".." / "global_step3"):
        refused(command("import", tmp_path / "weights", target), "global_step3 exists; remove it or name another")
    refused(command("export", run, tmp_path / "weights"), "weights exists; remove it or name another folder")
    assert content(read_whole(run / "global_step3")) == before
    assert (run / "latest").read_text() == "global_step3"


def test_a_failed_export_leaves_nothing(command, run, tmp_path):
    flip_in(run / "global_step3", "parameters/10.weight")
    refused(command("export", run, tmp_path / "weights", "--max-shard-size", 1e-7), "__0_0.distcp is damaged")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run"]


def test_a_failed_import_leaves_nothing(command, run, tmp_path):
    (tmp_path / "weights.safetensors").write_bytes(b"none")
    refused(
        command("import", tmp_path / "weights.safetensors", tmp_path / "new" / "tag"),
        "cannot be read as a safetens",
    )
    refused(command("import", tmp_path / "absent.safetensors", tmp_path / "new" / "tag"), "absent.safetensors is missi")
    safetensors.torch.save_file({"0.seen": torch.tensor(4)}, tmp_path / "weights.safetensors")
    refused(command("import", tmp_path / "weights.safetensors", tmp_path / "new" / "tag"), "has no weights; name a fil")
    refused(command("import", run, tmp_path / "new" / "tag"), "is a checkpoint of ds_lgamp already; load it as it is")
    assert not (tmp_path / "new").exists()


def test_files_and_index_must_agree(command, run, tmp_path):
    assert command("export", run, tmp_path / "weights", "--max-shard-size", 1e-7)[0] == 0
    index = tmp_path / "weights" / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["1.gain"], listed["weight_map"]["0.weight"] = (
        "model-00001-of-00003.safetensors",
        "gone.safetensors",
    )
    index.write_text(json.dumps(listed))
    refused(command("import", tmp_path / "weights", tmp_path / "new"), "disagree about 1.gain; restore both")
    listed["weight_map"] = {"0.weight": "gone.safetensors"}
    index.write_text(json.dumps(listed))
    refused(command("import", tmp_path / "weights", tmp_path / "new"), "gone.safetensors is missing")


def test_without_the_package_the_user_is_told_to_install_it(command, run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    refused(command("export", run, tmp_path / "weights"), "safetensors is not installed; pip install safetensors")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["export", "a", "b", "--format", "deepspeed"], "needs --pipeline-ranks and --data-ranks of at least 1"),
        (["export", "a", "b", "--format", "deepspeed", "--pipeline-ranks", "1", "--data-ranks", "0"], "at least 1"),
        (["export", "a", "b", "--pipeline-ranks", "1"], "--data-ranks belong to --format deepspeed"),
        (
            [
                "export",
                "a",
                "b",
                "--format",
                "deepspeed",
                "--pipeline-ranks",
                "1",
                "--data-ranks",
                "1",
                "--dtype",
                "bf16",
            ],
            "--dtype and --max-shard-size belong to --format safetensors",
        ),
        (["export", "a", "b", "--max-shard-size", "0"], "--max-shard-size is 0; use a size above 0, in 10^9 bytes"),
        (["export", "a", "b", "--max-shard-size", "nan"], "--max-shard-size is nan; use a size above 0"),
        (["export", "a", "b", "--dtype", "fp8"], "invalid choice: 'fp8'"),
        (["export", "a"], "TARGET"),
        ([], "ACTION"),
    ],
)
def test_usage_errors_exit_with_2(command, words, complaint):
    status, output, error = command(*words)
    assert status == 2 and output == "" and complaint in error
