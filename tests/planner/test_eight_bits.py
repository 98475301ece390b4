"""The planner knows moments in 8 bits of bitsandbytes: their memory, their time, and that the script makes them."""

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given

from ds_lgamp.planner.cluster import Efficiency, named_cluster, with_part
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.hardware import UPDATE_BYTES
from ds_lgamp.planner.memory import default_software, followed, least, memory, units_of
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.models import read_model
from ds_lgamp.planner.search import Allowed, search
from ds_lgamp.planner.work import Work, host_seconds
from ds_lgamp.planner.write import describe, ds_config, launch_script, method_of
from ds_lgamp.schedule.spec import STATE_BLOCK, Hierarchy
from testing import ROOT
from testing.forks import run_module
from tests.planner.configurations import configurations, models
from tests.planner.test_memory_measured import config_of
from tests.planner.training import LAYERS, Case
from tests.slow import slow_except

MODEL = Model.gpt("medium", 16, 4096, 16, 1024, 50304)
ON_DEVICE = Configuration(1, 1, 1, 2, 4, schedule="layered", chunks_per_rank=16, state="8bit")
ON_HOST = replace(ON_DEVICE, zero_stage=3, offload="parameters")
CARD = with_part(named_cluster("rtx4090"), 1, "128 GB")
NARROW = Allowed(state="8bit")


def in_fp32(of):
    return replace(of, state="fp32")


def test_two_moments_take_two_bytes_and_a_scale_for_each_block():
    narrow, exact = memory(MODEL, ON_DEVICE), memory(MODEL, in_fp32(ON_DEVICE))
    # The Trainer asks for 32 bits of embeddings.
    in_8_bits = MODEL.parameters - MODEL.embedding_parameters
    saved = (8 - 2 * (1 + 4 / STATE_BLOCK)) * in_8_bits
    assert exact.optimizer_state - narrow.optimizer_state == pytest.approx(saved, rel=1e-3)
    assert narrow.master_weights == exact.master_weights > 0 and narrow.weights == exact.weights
    assert exact.total - narrow.total == pytest.approx(saved, rel=1e-3)
    assert least(MODEL, in_fp32(ON_DEVICE)) - least(MODEL, ON_DEVICE) == pytest.approx(saved, rel=1e-3)


def test_small_tensors_and_embeddings_have_state_in_32_bits():
    of = replace(ON_DEVICE, chunks_per_rank=1)
    narrow = replace(MODEL, hidden_size=1024, feed_forward_size=4096, head_size=64)
    chunk, tied = units_of(narrow, of, 0)
    # Of each layer: two norms and all biases but that of 4,096 elements.
    assert chunk.in_32_bits == 16 * (4 * 1024 + 3 * 1024 + 1024 + 1024)
    assert tied.in_32_bits == tied.trainable == (50304 + 1024 + 2) * 1024
    assert {unit.alignment for unit in (chunk, tied)} == {STATE_BLOCK}


@given(models(), configurations())
def test_moments_in_8_bits_take_no_more_than_in_32_but_for_the_zeros_behind_tensors(model, drawn):
    assume(drawn.tensor_ranks == 1 and drawn.state == "fp32")
    of = replace(drawn, state="8bit")
    tensors = (model.layers + 1) * (len(model.tensors_in_layer) + 5)
    # Weights, gradients and state of 16 bytes, buffers, and parts of ranks that end with a block.
    zeros = 64 * STATE_BLOCK * (tensors + of.data_ranks * of.chunks)
    assert memory(model, of).total <= memory(model, drawn).total + zeros
    assert least(model, of) <= memory(model, of).total


def test_on_the_host_bitsandbytes_takes_longer_and_all_else_as_long():
    work = Work(MODEL, CARD, ON_HOST)
    narrow, exact = (host_seconds(work.compute, of, 1e9) for of in (ON_HOST, in_fp32(ON_HOST)))
    assert (narrow.load, narrow.store) == (exact.load, exact.store)
    assert narrow.update == Efficiency.host_8_bits * exact.update > exact.update
    measured = Work(MODEL, replace(CARD, efficiency={"host_8_bits": 2}), ON_HOST)
    assert host_seconds(measured.compute, ON_HOST, 1e9).update == 2 * exact.update


def test_on_the_device_updates_take_the_bytes_that_a_kernel_moves():
    narrow, exact = (Work(MODEL, CARD, of).costs().update[1] for of in (ON_DEVICE, in_fp32(ON_DEVICE)))
    # Two moments are read and written.
    assert narrow / exact == pytest.approx((UPDATE_BYTES["fp32"] - 2 * 2 * 4 + 2 * 2) / UPDATE_BYTES["fp32"])


def test_a_search_has_them_only_where_it_is_asked_to_and_divides_no_parameter():
    model, cluster = read_model("gpt2"), replace(with_part(named_cluster("a100"), 2, None), memory=4e9)
    plans = search(model, cluster, 8, allowed=NARROW)
    assert {plan.configuration.state for plan in plans} == {"8bit"}
    assert {plan.configuration.tensor_ranks for plan in plans} == {1}
    assert not any(plan.configuration.micro_batch_outer for plan in plans)
    assert 0 in {plan.configuration.zero_stage for plan in plans}, "no stage is needed"
    assert {plan.configuration.state for plan in search(model, cluster, 8)} == {"fp32"}


def test_plans_with_a_disk_have_none_there():
    model, card = read_model("llama-3b", 2048), with_part(named_cluster("rtx4090"), 1, "64 GB", "5 GB/s")
    assert any(plan.configuration.on_disk for plan in search(model, card, 4))
    plans = search(model, card, 4, allowed=NARROW)
    assert plans and not any(plan.configuration.on_disk for plan in plans)


def test_the_method_names_them():
    assert method_of(ON_HOST) == "layered, parameters on the host, moments in 8 bits"
    assert describe(ON_HOST).startswith(method_of(ON_HOST)) and ON_HOST.to_json()["state"] == "8bit"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensor_ranks": 2}, "tensor_ranks is 2; use 'fp32'"),
        ({"data_ranks": 2, "expert_ranks": 2}, "expert_ranks is 2; use 'fp32'"),
        ({"zero_stage": 3, "offload": "optimizer", "on_disk": True}, "on_disk is True; use 'fp32'"),
        ({"micro_batch_outer": True}, "micro_batch_outer is True; use 'fp32'"),
    ],
)
def test_what_the_engine_refuses_is_refused(changes, said):
    with pytest.raises(ValueError, match=f"state is '8bit', which .* keeps in memory, of whole parameters, but {said}"):
        replace(ON_DEVICE, **changes)


def test_files_name_no_optimizer_and_the_launch_line_says_which_one_the_script_makes():
    config = ds_config(MODEL, ON_HOST)
    assert config == ds_config(MODEL, in_fp32(ON_HOST)) and "optimizer" not in config
    launch = launch_script(MODEL, ON_HOST, CARD)
    assert "Its optimizer is AdamW8bit of bitsandbytes: a Trainer takes --optim adamw_8bit." in launch


SCRIPT = """
import json
import sys

import bitsandbytes
import deepspeed
import peft
import torch

from tests.planner.training import make

name, adapters, config = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
model = make(name)
if adapters:
    model = peft.get_peft_model(model, peft.LoraConfig(r=adapters, target_modules="all-linear"))
optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())
for module in model.modules():
    if isinstance(module, torch.nn.Embedding):
        # As the Trainer does.
        manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
        manager.register_module_override(module, "weight", {"optim_bits": 32})
deepspeed.initialize(model=model, optimizer=optimizer, config=config)
"""
SMALL = Configuration(2, 2, 1, 4, 4, zero_stage=3, schedule="layered", chunks_per_rank=LAYERS // 2, state="8bit")
TOLD = {
    "on the host": ("GPT-2", 0, replace(SMALL, offload="parameters")),
    "on the device": ("Llama", 0, replace(SMALL, zero_stage=1, recompute="none")),
    "one rank, optimizer on the host": (
        "GPT-2",
        0,
        replace(SMALL, data_ranks=1, pipeline_ranks=1, chunks_per_rank=LAYERS, offload="optimizer"),
    ),
    "1f1b": ("GPT-2", 0, replace(SMALL, zero_stage=0, schedule="1f1b", chunks_per_rank=1)),
    "rounded travel": ("Llama", 0, replace(SMALL, weight_bits=8, gradient_bits=8)),
    "shards of nodes": (
        "Llama",
        0,
        replace(SMALL, data_ranks=4, pipeline_ranks=1, chunks_per_rank=LAYERS, hierarchy=Hierarchy(2, False)),
    ),
    "experts": ("Qwen3-MoE", 0, replace(SMALL, zero_stage=2)),
    "dense layers before experts": ("DeepSeek-V3", 0, SMALL),
    "adapters": ("GPT-2", 16, replace(SMALL, keep_frozen="device")),
    "adapters, frozen weights in shards": ("Llama", 64, replace(SMALL, keep_frozen="none")),
}


def explained(folder, case):
    """Returns what ``--explain`` says of every rank of a script with an optimizer of bitsandbytes."""
    (folder / "script.py").write_text(SCRIPT)
    config = {key: value for key, value in config_of(case).items() if key != "optimizer"}
    words = ["ds_lgamp", "run", "--explain", "--json", "--ranks", str(case.configuration.gpus)]
    words += [str(folder / "script.py"), case.name, str(case.adapters), json.dumps(config)]
    ended = run_module(words, folder, {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert ended.status == 0, ended.complaints
    return json.loads(ended.output)["ranks"]


@pytest.mark.parametrize("name", slow_except([*TOLD][:2], [*TOLD]))
def test_memory_is_what_explain_says_of_a_script_with_the_written_configuration(tmp_path, name):
    pytest.importorskip("bitsandbytes")
    model, adapters, of = TOLD[name]
    case = Case(model, of, True, adapters)
    for place, told in enumerate(explained(tmp_path, case)):
        held = followed(case.model, of, place, replace(default_software(of), all_to_all=True))
        kinds = ("weights", "master_weights", "optimizer_state", "resident_weights", "gradients", "gradient_buffers")
        for kind in (*kinds, "loaded_weights", "update"):
            assert told["memory"][kind] == getattr(held, kind), kind
        assert told["memory"]["host"] == (None if held.host is None else vars(held.host))
