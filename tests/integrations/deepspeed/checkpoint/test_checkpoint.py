"""A run that is saved and resumed at the same layout equals an uninterrupted run, to the bit."""

from pathlib import Path

import pytest

from ds_lgamp.checkpoint.whole import write_whole
from ds_lgamp.integrations.deepspeed.checkpoint import save_and_load
from ds_lgamp.integrations.deepspeed.checkpoint.description import micro_batches_here
from testing.checkpoints import example
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.checkpoint import resumed_runs as runs
from tests.integrations.deepspeed.checkpoint.live_runs import heard
from tests.integrations.deepspeed.checkpoint.refused_runs import refusals
from tests.slow import chosen, slow_except


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def results(request, folder):
    return run_on_ranks(4, run_all, str(folder), sorted(chosen(request, "layout") | DEFAULT))


def run_all(folder, layouts):
    prepare_rank()
    results = {name: runs.resume(str(Path(folder) / name), runs.LAYOUTS[name]) for name in layouts}
    results["weights"] = runs.weights_only(str(Path(folder) / "weights"))
    results["neighbours"] = runs.neighbours(str(Path(folder) / "neighbours"))
    results["shares"] = runs.shares()
    results["few kept"] = runs.few_kept(str(Path(folder) / "few kept"))
    results["newest whole"] = runs.newest_whole(str(Path(folder) / "newest whole"))
    results["stock is last"] = runs.stock_is_last(str(Path(folder) / "stock is last"))
    results["fewer layers"] = runs.fewer_layers(str(Path(folder) / "fewer layers"))
    results["default device"] = runs.with_another_default_device(str(Path(folder) / "default device"))
    results["extra states"] = runs.extra_states(str(Path(folder) / "extra states"))
    results["curves"] = runs.curves(str(Path(folder) / "curves"))
    results["own buffers"] = runs.own_buffers(str(Path(folder) / "own buffers"))
    results["refusals"] = refusals(folder)
    return results


DEFAULT = {"zero 3, own data", "zero 3, stored activations", "zero 0", "zero 2, bf16"}
"""Layouts that are not slow. Other tests read their checkpoints."""


@pytest.mark.parametrize("layout", slow_except(DEFAULT, list(runs.LAYOUTS)))
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(results, layout):
    for rank in results:
        expected, resumed, again = rank[layout]
        assert resumed == expected
        assert again == expected


def test_weights_alone_start_a_new_run(results):
    for rank in results:
        saved, loaded, global_steps, optimizer_state = rank["weights"]
        assert loaded == saved
        assert global_steps == 0 and not optimizer_state


def test_saving_again_leaves_the_files_of_others_alone(results):
    *others, tensors, tokenizer = results[0]["neighbours"]
    assert others == ["deeper", "state.json"] and tensors.startswith("tensors-") and tokenizer == "tokenizer.json"


def test_every_copy_of_a_buffer_is_kept(results):
    for rank in results:
        assert all(loaded == written for written, loaded in rank["own buffers"])


def test_the_default_device_of_a_script_does_not_matter(results):
    for rank in results:
        saved, loaded = rank["default device"]
        assert loaded == saved


def test_layers_get_their_extra_state_at_any_layout(results):
    for rank in results:
        assert rank["extra states"] == [[24, 24], [24, 24], [24]]


def test_a_function_in_the_state_of_a_scheduler_is_that_of_the_run_that_loads(results):
    for rank in results:
        uninterrupted, resumed = rank["curves"]
        assert resumed == uninterrupted and uninterrupted[1] < uninterrupted[0]


def test_ranks_with_the_same_weights_share_their_writing(results):
    """Ranks 0 and 1 are the first pipeline rank, 2 and 3 the second."""
    for first, second in (results[:2], results[2:]):
        (one, held), (other, _) = first["shares"], second["shares"]
        assert one + other == held and one > 0 and other > 0


def test_only_the_last_checkpoints_are_kept(results):
    kept = [["first"], ["first", "second"], ["second", "third"], ["second", "third"]]
    assert results[0]["few kept"] == [sorted([*tags, "latest", "zero_to_fp32.py"]) for tags in kept]


def test_where_the_last_checkpoint_is_damaged_the_newest_whole_one_is_loaded_and_named_in_latest(results):
    for rank in results:
        *loaded, said = rank["newest whole"]
        assert loaded == [(f"global_step{step}", step, f"global_step{step}") for step in (3, 2, 1)]
        assert "global_step1/tensors-" in said and "__3_0.distcp is damaged: its checksum differs" in said


def test_where_stock_deepspeed_wrote_the_last_checkpoint_no_older_one_is_loaded(results):
    for rank in results:
        said, latest = rank["stock is last"]
        assert "stock is no checkpoint of ds_lgamp; stock DeepSpeed wrote it: convert it" in said and latest == "stock"


def test_a_model_with_more_layers_takes_what_there_is(results):
    small, built, loaded = results[0]["fewer layers"]
    assert small.keys() < built.keys() == loaded.keys()
    assert loaded == {**built, **small}


@pytest.mark.parametrize(
    ("pulled", "there", "here", "expected"),
    [
        (0, (10, 4), (20, 2), 0),
        (7, (10, 4), (10, 4), 7),
        (7, (10, 4), (20, 2), 14),
        (7, (10, 4), (5, 8), 3),
        # The last micro-batch of an epoch may be smaller.
        (10, (10, 4), (19, 2), 19),
        (13, (10, 4), (19, 2), 19 + 6),
    ],
)
def test_the_position_in_the_data_is_kept_in_samples(pulled, there, here, expected):
    """Epochs have the given number of micro-batches with the given samples. The position never exceeds the data that
    the run has seen."""
    keys = "micro_batches_per_epoch", "samples"
    assert micro_batches_here(pulled, dict(zip(keys, there)), dict(zip(keys, here))) == expected


def test_a_checkpoint_is_a_folder_named_in_latest(results, folder):
    checkpoint = folder / "zero 0"
    assert sorted(path.name for path in checkpoint.iterdir()) == ["global_step3", "latest", "zero_to_fp32.py"]
    assert (checkpoint / "latest").read_text() == "global_step3"
    state, tensors = sorted((checkpoint / "global_step3").iterdir())
    assert state.name == "state.json"
    files = sorted(path.name for path in tensors.iterdir())
    assert files == [".metadata", *(f"__{rank}_0.distcp" for rank in range(4)), "index.json"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other shapes", ["is of another model (0.bias is [6] there, [8] here, ", "build the model as it was"]),
        (
            "grouped",
            ["has 1 parameter groups, not 2; build them as they were, or pass load_optimizer_states="],
        ),
        (
            "scheduler",
            ["has learning rate scheduler WarmupLR, but this run has None; use the same, or pass load_lr_scheduler_"],
        ),
        (
            "scheduler of that name",
            ["has the state of another WarmupLR (rank 0: KeyError: 'part'); build it as"],
        ),
        ("other scheduler", ["has learning rate scheduler WarmupLR, but this run has LambdaLR; use the same"]),
        (
            "optimizer",
            ["is from AdamW, but this run has SGD; use AdamW, or pass load_optimizer_states=False"],
        ),
        ("optimizer state", ["is from AdamW, but this run has SGD; use AdamW"]),
        ("block", ["load_checkpoint is called inside a block of deepspeed.zero.GatheredParameters; leave it first"]),
        ("option", ["optimizer.param_groups: name holds a value of type builtins.builtin_function_or_method; use"]),
        ("option of state", ["the optimizer's state holds a value of type builtins.builtin_function_or_method; use"]),
        ("tag ", ["the tag is ''; name a folder inside"]),
        ("tag ..", ["the tag is '..'"]),
        ("tag /absolute", ["the tag is '/absolute'"]),
        ("no such tag", ["global_step99 is no checkpoint of ds_lgamp"]),
        ("tag of its own", ["the checkpoint is one with checksum ", " on ranks 1, 2 and 3; load the same one"]),
        ("load function", ["custom_load_fn is given", "remove it"]),
        ("client state", ["client_state holds under 'here' a value of type builtins.builtin_function_or_method; use"]),
        ("no dictionary", ["client_state is a Namespace; pass a dictionary that holds it"]),
        ("no folder", ["file is a file; name a folder for checkpoints", "existing checkpoints are whole"]),
    ],
)
def test_what_cannot_be_saved_or_loaded_is_refused_on_every_rank(results, name, words):
    for rank in results:
        said = rank["refusals"][name]
        assert all(word in said for word in words) and "\n" not in said


def look_for_checkpoints(directory):
    with heard(save_and_load.logger) as said:
        assert not save_and_load.find_checkpoints(directory, None)
    return said


def test_where_there_is_no_latest_a_warning_says_what_to_do(tmp_path):
    begun = tmp_path / "unfinished"
    hints = {
        "empty": "pass a tag, or save a checkpoint first",
        "whole": "pass the tag 'global_step3', which is whole",
        "whole/global_step3": f"it is a checkpoint itself: name {tmp_path / 'whole'}, and pass the tag 'global_step3'",
        "unfinished": f"the save in global_step3 was not finished; remove {begun}, and go on from one that was",
    }
    (tmp_path / "unfinished" / "global_step3" / "tensors-0badcafe").mkdir(parents=True)
    write_whole(tmp_path / "whole" / "global_step3", example())
    for name, hint in hints.items():
        (said,) = run_on_ranks(1, look_for_checkpoints, tmp_path / name)
        assert said == [f"{tmp_path / name} has no file 'latest'; {hint}"]
