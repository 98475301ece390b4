"""The state of a model by its own names: read whole on rank 0, saved, loaded, and refused where it cannot work."""

import json

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_lgamp.checkpoint.whole import write_safetensors
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain.states import (
    adapted,
    adapter_at_two_layouts,
    read_alone,
    rolled_back,
    saved_prompts,
    saved_with_a_whole_module,
    train_and_read,
    values_of_other_ranks,
    with_longer_batches,
)
from tests.integrations.transformers.models import make
from tests.slow import slow_except

CASES = [("GPT-2", 2, 2, 3), ("GPT-2", 2, 1, 2), ("Llama", 1, 2, 3), ("Llama", 2, 2, 1)]


@pytest.fixture(scope="module", params=slow_except(CASES[:1], CASES))
def seen(request, tmp_path_factory):
    """Returns what every rank saw, the name of the model, and the folder of its saves."""
    name, pipeline, data, stage = request.param
    folder = tmp_path_factory.mktemp("model")
    block = {"pipeline_ranks": pipeline}
    return run_on_ranks(pipeline * data, train_and_read, name, stage, block, str(folder)), name, folder


def test_rank_0_gets_the_weights_of_all_ranks_under_the_models_names(seen):
    ranks, name, _ = seen
    first, *others = ranks
    assert first["state"].keys() == make(name).state_dict().keys() == first["accelerate"]
    for rank in ranks:
        for key, value in rank["weights"].items():
            assert torch.equal(first["state"][key], value), key
    assert all(rank["state"] == {} and rank["accelerate"] == set() for rank in others)


def test_a_checkpoint_names_the_ranks_of_the_pipelines(seen, request):
    """By the data-parallel ranks of the file, a run at another layout finds random states."""
    _, pipeline, data, _ = request.node.callspec.params["seen"]
    layout = json.loads((seen[-1] / "checkpoints" / "trained" / "state.json").read_text())["layout"]
    assert (layout["pipeline_ranks"], layout["data_ranks"]) == (pipeline, data)


def test_tied_weights_stay_tied(seen):
    ranks, name, _ = seen
    assert ranks[0]["tied"] == (["transformer.wte.weight", "lm_head.weight"] if name == "GPT-2" else [])


def test_from_pretrained_loads_what_was_trained(seen):
    ranks, _, folder = seen
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in ranks[0]["state"].items())
    weights = torch.load(folder / "weights.bin")
    assert all(torch.equal(weights[key], value) for key, value in ranks[0]["state"].items())


def test_from_pretrained_loads_what_is_exported_from_a_checkpoint(seen, tmp_path):
    ranks, name, folder = seen
    weights = tmp_path / "weights"
    write_safetensors(folder / "checkpoints" / "trained", weights, torch.float32, 10**9)
    make(name).config.save_pretrained(weights)
    loaded = AutoModelForCausalLM.from_pretrained(weights).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in ranks[0]["state"].items())


def test_a_loaded_state_is_trained_on(seen):
    ranks, _, _ = seen
    for rank in ranks:
        for key, value in rank["loaded"].items():
            assert torch.equal(value, rank["weights"][key] + 1), key


def test_a_state_that_was_read_is_loaded_although_only_the_first_rank_has_it(seen):
    ranks, _, _ = seen
    for rank in ranks:
        assert all(torch.equal(value, rank["weights"][key]) for key, value in rank["back"].items())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shapes", "size mismatch"),
        ("assign", "load_state_dict has assign=True"),
        ("generate", "model.generate is called"),
        ("direct", "the model is called directly in training"),
        ("forward", "was replaced after deepspeed.initialize"),
        ("alone", "rank 0 reads the state of the whole model"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(seen, name, words):
    ranks, _, _ = seen
    assert all(words in rank["refusals"][name] for rank in ranks)


@pytest.mark.parametrize("stage", slow_except([1], [1, 3]))
def test_an_adapter_is_saved_with_a_module_of_another_rank(stage, tmp_path):
    (head,) = [weights for weights in run_on_ranks(2, saved_with_a_whole_module, stage, str(tmp_path)) if weights]
    loaded = peft.PeftModel.from_pretrained(make("Llama"), tmp_path).state_dict()
    (name,) = [name for name in loaded if "lm_head.modules_to_save" in name]
    assert torch.equal(loaded[name], *head.values())


@pytest.mark.parametrize(("pipeline", "stage"), slow_except([(1, 3)], [(1, 3), (2, 2)], several=True))
def test_virtual_tokens_are_saved_also_where_they_have_no_elements(pipeline, stage, tmp_path):
    trained, *_ = run_on_ranks(2, saved_prompts, pipeline, stage, str(tmp_path))
    for folder in (tmp_path, tmp_path / "of_trainer"):
        loaded = peft.PeftModel.from_pretrained(make("Llama"), folder).state_dict()
        assert torch.equal(loaded["prompt_encoder.default.embedding.weight"], trained)


@pytest.mark.parametrize(("pipeline", "stage"), slow_except([(2, 1)], [(2, 1), (1, 3)], several=True))
def test_a_rank_that_reads_alone_what_all_have_read_gets_names_and_no_values(pipeline, stage, tmp_path):
    first, second = run_on_ranks(2, read_alone, pipeline, stage, str(tmp_path))
    refused = first.pop("refused")
    for what, refusal in refused.items():
        assert "that rank 0 alone calls" in refusal and "call state_dict on all ranks" in refusal, what
    assert first.pop("changed") == {name for name in (first.pop("changed_here"), second["changed_here"]) if name}
    assert all(first.values()), first


def test_values_of_layers_on_other_ranks_are_refused_instead_of_missing():
    for seen in run_on_ranks(2, values_of_other_ranks):
        assert seen["about"] == (torch.float32, None, True)
        assert f"<parameter {seen['name']} belongs to a layer on another pipeline rank" in seen["printed"]
        for name, refusal in seen["refusals"].items():
            assert "on another pipeline rank and has no elements on this rank" in refusal, name
            assert name in ("copy", "merge") or seen["name"] in refusal, name


def test_an_adapter_is_saved_whole_and_goes_on_at_another_layout_without_frozen_weights(tmp_path):
    first, _ = run_on_ranks(2, adapter_at_two_layouts, str(tmp_path))
    assert first["losses"] == pytest.approx(first["expected"], rel=1e-6)
    assert "absent there" in first["strict"] and "load_module_strict=False" in first["strict"]
    loaded = peft.PeftModel.from_pretrained(make("Llama"), tmp_path).state_dict()
    fresh = adapted("Llama").state_dict()
    assert first["adapter"] == {name for name in loaded if "lora" in name}
    assert all(not torch.equal(loaded[name], fresh[name]) for name in first["adapter"])


def test_a_loaded_run_begins_a_batch_whatever_the_accumulation_was(tmp_path):
    assert run_on_ranks(1, with_longer_batches, str(tmp_path)) == [[1, 1, 2]]


def test_a_run_that_goes_back_in_the_middle_of_a_batch_drops_it(tmp_path):
    (seen,) = run_on_ranks(1, rolled_back, str(tmp_path))
    assert seen["losses"] == seen["expected"]
    assert seen["complete"].startswith("load_checkpoint is called inside a batch that is computed already")
