"""Reads stock DeepSpeed's files, refuses the ones it cannot convert, and runs no code from them."""

import errno
import os
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.whole import WholeCheckpoint
from ds_lgamp.integrations.deepspeed.checkpoint import stock_writer
from ds_lgamp.integrations.deepspeed.checkpoint.stock_reader import read_stock
from ds_lgamp.integrations.deepspeed.checkpoint.stock_writer import write_stock

SHAPES = {
    "tied_modules.embedding.weight": (5, 3),
    "1.weight": (3, 3),
    "1.bias": (3,),
    "2.weight": (3, 3),
    "2.bias": (3,),
    "4.weight": (3, 3),
    "4.bias": (3,),
}
RANK, SHARD, LAYER = (
    "mp_rank_00_model_states.pt",
    "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "layer_01-model_states.pt",
)


def whole_checkpoint(tied: bool = True) -> WholeCheckpoint:
    """Makes a checkpoint of six layers as a run with a block saves it. The fourth layer is a function. The last uses
    the tied embedding."""
    shapes = SHAPES if tied else {name: shape for name, shape in SHAPES.items() if "tied" not in name}
    torch.manual_seed(3)
    parameters = {name: torch.randn(shape) for name, shape in shapes.items()}
    moments = {key: {name: torch.rand(shape) for name, shape in shapes.items()} for key in ("exp_avg", "exp_avg_sq")}
    options = torch.optim.AdamW([torch.zeros(1)], lr=0.5).defaults
    state = {
        "layout": {"pipeline_ranks": 3, "data_ranks": 1, "chunk_bounds": [0, 1, 6], "data_type": "float32"},
        "layers": {
            "types": ["Embedding", "Linear", "Linear", "identity", "Linear", "Embedding"],
            "tied": {"embedding": [0, 5]} if tied else {},
            "partition_method": "type:linear|embedding",
            "extra_states": ["4.inner._extra_state"],
        },
        "parameters": {
            name: {"shape": list(shape), "group": 0 if len(shape) > 1 else 1} for name, shape in shapes.items()
        },
        "optimizer": {
            "class": "AdamW",
            "groups": [dict(options), {**options, "weight_decay": 0.0}],
            "scalars": [{"step": torch.tensor(7.0)}, {"step": torch.tensor(7.0)}],
        },
        "lr_scheduler": {"class": "WarmupLR", "state": {"last_batch_iteration": 6}},
        "loss_scaler": None,
        "counters": {"global_steps": 7, "global_samples": 70, "skipped_steps": 1},
    }
    return WholeCheckpoint(parameters, {"2.seen": torch.ones(2)}, moments, state, {"epoch": 4})


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "tag"
    write_stock(whole_checkpoint(), path, 2, 2)
    return path


def edit(path: Path, change) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


@pytest.mark.parametrize("data_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("pipeline_ranks", [1, 2, 5])
def test_what_is_written_is_read(tmp_path, pipeline_ranks, data_ranks):
    """Some shards contain only padding."""
    there = whole_checkpoint()
    write_stock(there, tmp_path / "tag", pipeline_ranks, data_ranks)
    here = read_stock(tmp_path / "tag")
    assert here.parameters.keys() == SHAPES.keys() and here.client_state == {"epoch": 4}
    for read, written in [(here.parameters, there.parameters), (here.buffers, there.buffers)] + [
        (here.moments[key], there.moments[key]) for key in ("exp_avg", "exp_avg_sq")
    ]:
        assert read.keys() == written.keys()
        assert all(torch.equal(read[name], written[name]) for name in read)
    assert here.state["parameters"] == there.state["parameters"]
    assert here.state["layers"]["extra_states"] == there.state["layers"]["extra_states"]
    assert here.state["optimizer"]["scalars"] == there.state["optimizer"]["scalars"]
    assert [group["weight_decay"] for group in here.state["optimizer"]["groups"]] == [0.01, 0.0]
    assert (tmp_path / "latest").read_text() == "tag"


def test_a_shard_says_how_much_of_it_is_padding(tmp_path):
    """DeepSpeed's tools cut that much off where they join shards."""
    write_stock(whole_checkpoint(), tmp_path / "tag", 2, 3)
    found = set()
    for path in (tmp_path / "tag").glob("*_optim_states.pt"):
        shard = torch.load(path, weights_only=False)["optimizer_state_dict"]
        keys = ("single_partition_of_fp32_groups", "group_paddings", "param_slice_mappings")
        for flat, padding, places in zip(*(shard[key] for key in keys), strict=True):
            assert flat.numel() - padding == sum(place.numel for place in places.values())
            found.add(padding)
    assert len(found) > 1


@pytest.mark.parametrize(
    ("method", "bounds"),
    [("uniform", [0, 3, 6]), ("type:linear", [0, 3, 6]), ("parameters", [0, 3, 6]), ("TYPE:Embedding", [0, 5, 6])],
)
def test_layers_are_cut_where_stock_cuts_them(tmp_path, method, bounds):
    whole = whole_checkpoint()
    whole.state["layers"]["partition_method"] = method
    write_stock(whole, tmp_path / "tag", 2, 1)
    second = torch.load(tmp_path / "tag" / "mp_rank_01_model_states.pt", weights_only=False)
    held = {name for group in second["param_shapes"] for name in group}
    assert held == {name for name in SHAPES if name[0] == "t" or int(name[0]) >= bounds[1]}


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


@pytest.mark.parametrize("name", [RANK, SHARD, LAYER])
def test_a_malicious_file_runs_nothing(folder, tmp_path, name):
    edit(folder / name, lambda content: content.update(more=Malicious(tmp_path / "ran")))
    refusal = rf"{name} cannot be read without running code from it .it asks for \w+\.system"
    with pytest.raises(CheckpointError, match=refusal):
        read_stock(folder)
    assert not (tmp_path / "ran").exists()


class Got:
    """Is written as the attribute of an object, as Python 3.11.0 to 3.11.3 write members of enumerations."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


def test_a_stage_is_read_however_python_wrote_it(folder):
    stage = Got(ZeroStageEnum, "optimizer_states")
    edit(folder / SHARD, lambda content: content["optimizer_state_dict"].update(zero_stage=stage))
    assert read_stock(folder).state["counters"]


@pytest.mark.parametrize("arguments", [(Namespace, "__init__"), (ZeroStageEnum, "mro")], ids=["class", "no member"])
def test_a_file_gets_no_other_attributes(folder, arguments):
    edit(folder / SHARD, lambda content: content.update(more=Got(*arguments)))
    with pytest.raises(CheckpointError, match="cannot be read without running code from it"):
        read_stock(folder)


def test_arguments_of_a_script_are_read(folder):
    arguments = Namespace(
        dtype=torch.bfloat16, out=Path("runs"), kinds={"a"}, frozen=frozenset("b"), size=torch.Size([1])
    )
    edit(folder / RANK, lambda content: content.update(args=arguments))
    assert read_stock(folder).client_state["args"] == arguments


def test_fused_adam_is_read_as_the_class_that_stands_for_it(folder):
    """On GPUs DeepSpeed makes FusedAdam for "Adam" and "AdamW". Its groups count the steps and have other options."""

    def as_fused_adam(content):
        state = content["optimizer_state_dict"]["base_optimizer_state"]
        kept = {"lr", "betas", "eps", "weight_decay", "params"}
        state["param_groups"] = [
            {**{key: group[key] for key in kept}, "bias_correction": True, "step": 7} for group in state["param_groups"]
        ]
        for values in state["state"].values():
            del values["step"]

    for path in folder.glob("zero_*"):
        edit(path, as_fused_adam)
    assert read_stock(folder).state["optimizer"]["class"] == "FusedAdam"
    for path in folder.glob("mp_rank_*"):
        edit(path, lambda content: content.update(ds_config={"optimizer": {"type": "Adam", "params": {"lr": 0.5}}}))
    optimizer = read_stock(folder).state["optimizer"]
    assert optimizer["class"] == "AdamW" and optimizer["scalars"] == [{"step": 7}] * 2
    assert optimizer["groups"][1] == {"lr": 0.5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def test_fused_adam_finds_the_steps_where_it_counts_them(folder):
    state = torch.load(folder / SHARD, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]
    assert [(group["step"], group["bias_correction"]) for group in state["param_groups"]] == [(7, True)] * 2


CONVERTED = {
    "dp_world_size": 1,
    "mp_world_size": 2,
    "module": None,
    "optimizer": None,
    "global_steps": 1,
    "iteration": 1,
}
"""What scripts write of a rank that convert a model into layer files."""


def converted(folder: Path) -> None:
    """Writes the files of such a script."""
    for rank in range(2):
        torch.save(CONVERTED, folder / f"mp_rank_{rank:02d}_model_states.pt")
    for layer in (0, 1, 3):
        torch.save({"weight": torch.full((2, 3), float(layer))}, folder / f"layer_{layer:02d}-model_00-model_states.pt")


def test_layer_files_without_optimizer_state_are_weights(tmp_path):
    converted(tmp_path)
    whole = read_stock(tmp_path)
    assert {name: tensor[0, 0].item() for name, tensor in whole.parameters.items()} == {
        "0.weight": 0.0,
        "1.weight": 1.0,
        "3.weight": 3.0,
    }
    assert whole.state["optimizer"] is None and not whole.moments and not whole.client_state
    assert whole.state["layout"]["chunk_bounds"] == [0, 4] and whole.state["counters"]["global_steps"] == 0


def test_a_run_that_lost_its_optimizer_state_is_no_weights_alone(folder):
    for shard in folder.glob("*_optim_states.pt"):
        shard.unlink()
    with pytest.raises(CheckpointError):
        read_stock(folder)


def test_layer_files_of_tensor_parallel_ranks_are_refused(tmp_path):
    converted(tmp_path)
    torch.save({"weight": torch.zeros(2, 3)}, tmp_path / "layer_00-model_01-model_states.pt")
    with pytest.raises(CheckpointError, match="was written with tensor parallelism"):
        read_stock(tmp_path)


def change_rank(**entries):
    return lambda folder: edit(folder / RANK, lambda content: content.update(entries))


def change_shard(**entries):
    return lambda folder: edit(
        folder / SHARD.replace("_1_", "_0_"), lambda c: c["optimizer_state_dict"].update(entries)
    )


def at_stage_0(folder):
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    write_stock(whole_checkpoint(), folder, 2, 1, stage=0)


def groups_that_look_alike(folder):
    def only_first(content):
        state = content["optimizer_state_dict"]
        groups = state["base_optimizer_state"]["param_groups"]
        groups[0]["weight_decay"] = groups[1]["weight_decay"]

    for path in folder.glob("zero_*"):
        edit(path, only_first)
    for path in folder.glob("zero_*mp_rank_01*"):
        edit(path, lambda content: content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"].pop())


REFUSED = [
    (lambda folder: (folder / RANK).unlink(), "mp_rank_00_model_states.pt is missing"),
    (lambda folder: (folder / SHARD).unlink(), "zero_pp_rank_1_mp_rank_00_optim_states.pt is missing; copy"),
    (lambda folder: (folder / LAYER).unlink(), "has optimizer state of 1.weight, which none of its layer files holds"),
    (lambda folder: (folder / LAYER).write_bytes(b"nonsense"), "layer_01-model_states.pt cannot be read"),
    (
        lambda folder: edit(folder / LAYER, lambda content: content.update({"inner._extra_state": torch.ones(1)})),
        "layer_01-model_states.pt has inner._extra_state, which is neither parameter nor buffer",
    ),
    (lambda folder: torch.save([1], folder / LAYER), "holds a list, no dictionary"),
    (
        lambda folder: torch.save({}, folder / RANK),
        "no complete checkpoint of a DeepSpeed pipeline .KeyError",
    ),
    (change_rank(module={"weight": torch.ones(2)}), "holds a whole model, so no PipelineModule was saved"),
    (
        lambda folder: (folder / RANK).rename(folder / f"zero_pp_rank_0_{RANK}"),
        "is of stage 3, so no PipelineModule was",
    ),
    (change_rank(checkpoint_parallel_dimensions={"tp_degree": 2}), "was written with tensor parallelism"),
    (
        change_rank(ds_config={"zero_optimization": {"round_robin_gradients": True}}),
        "zero_optimization.round_robin_gradients",
    ),
    (change_rank(dp_world_size=1), r"has \d+ master weights of [\d.a-z]+, which has \d+ elements; copy"),
    (change_shard(base_optimizer_state=[{}]), "zero_optimization.elastic_checkpoint"),
    (at_stage_0, "DeepSpeed does not name what its optimizer holds.*save it at stage 1"),
    (groups_that_look_alike, "different parameter groups that cannot be told apart"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_cannot_be_read_is_refused(folder, change, message):
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        read_stock(folder)


def test_fp16_at_stage_0_is_refused(tmp_path):
    write_stock(whole_checkpoint(tied=False), tmp_path / "tag", 1, 1, stage=0)
    change_rank(optimizer={"fp32_groups": [], "optimizer_state_dict": {}})(tmp_path / "tag")
    with pytest.raises(CheckpointError, match="the optimizer of fp16 at zero_optimization.stage 0"):
        read_stock(tmp_path / "tag")


def without_optimizer(whole):
    whole.state["optimizer"] = None


def of_bf16(whole):
    whole.state["layout"]["data_type"] = "bfloat16"


def of_transformers(whole):
    whole.state["layers"]["names_of_model"] = True


def of_frozen(whole):
    whole.state["optimizer"]["of_parameters"] = {"1.bias": {}}


NOT_WRITTEN = [
    (None, {"stage": 2}, "the stage is 2"),
    (None, {"data_ranks": 0}, "the layout is 2 pipeline x 0 data ranks"),
    (of_bf16, {"stage": 0}, "the stage is 0 and the weights are bfloat16"),
    (without_optimizer, {}, "no optimizer state"),
    (of_frozen, {}, "parameters such as 1.bias were frozen for a time and count their steps by themselves"),
    (
        of_transformers,
        {},
        "is of a plain model, of which stock DeepSpeed loads no layers; export its weights",
    ),
    (lambda whole: whole.client_state.update(global_steps=3), {}, "client_state has global_steps"),
    (lambda whole: whole.moments["exp_avg"].pop("1.bias"), {}, "1.bias has no exp_avg"),
]


@pytest.mark.parametrize(("change", "arguments", "message"), NOT_WRITTEN)
def test_what_cannot_be_written_is_refused(tmp_path, change, arguments, message):
    whole = whole_checkpoint()
    if change is not None:
        change(whole)
    with pytest.raises(CheckpointError, match=message):
        write_stock(whole, tmp_path / "tag", **{"pipeline_ranks": 2, "data_ranks": 2, **arguments})
    assert not (tmp_path / "tag").exists()


def test_of_a_checkpoint_that_does_not_fit_on_the_disk_nothing_stays(tmp_path, monkeypatch):
    saved = []

    def save(file, content):
        saved.append(content)
        if len(saved) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        torch.save(content, file)

    monkeypatch.setattr(stock_writer, "save_into", save)
    with pytest.raises(OSError, match="No space left"):
        write_stock(whole_checkpoint(), tmp_path / "run" / "tag", 2, 2)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_checkpoint_is_not_overwritten(folder):
    with pytest.raises(CheckpointError, match="tag exists; remove it or name another folder"):
        write_stock(whole_checkpoint(), folder, 2, 2)


def test_what_stock_saved_is_written_again_for_as_many_pipeline_ranks(folder, tmp_path):
    whole = read_stock(folder)
    write_stock(whole, tmp_path / "again", 2, 3)
    assert torch.equal(read_stock(tmp_path / "again").parameters["4.bias"], whole.parameters["4.bias"])
    with pytest.raises(CheckpointError, match="which layers use the tied modules embedding, so what 3 pipeline ranks"):
        write_stock(whole, tmp_path / "third", 3, 1)


def test_another_number_of_ranks_is_refused_where_nothing_shows_their_layers(tmp_path):
    write_stock(whole_checkpoint(tied=False), tmp_path / "tag", 2, 2)
    whole = read_stock(tmp_path / "tag")
    with pytest.raises(CheckpointError, match="does not say how 3 share the layers; load it in a run with a ds_lgamp"):
        write_stock(whole, tmp_path / "three", 3, 1)
