"""Plans for adapters beside frozen weights: what they compute, where frozen weights lie, what a step sends."""

import json
from dataclasses import replace

import peft
import pytest
import torch

from ds_lgamp.config import read_block
from ds_lgamp.cost.units import ElementBytes
from ds_lgamp.planner.activations import Software, end_bytes, layer_bytes
from ds_lgamp.planner.candidates import candidates
from ds_lgamp.planner.cluster import Cluster, Host, Link
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.hardware import ELEMENT
from ds_lgamp.planner.load import sent
from ds_lgamp.planner.memory import default_software, followed, memory, units_of
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.models import read_model
from ds_lgamp.planner.search import search
from ds_lgamp.planner.work import Work, exact_seconds
from ds_lgamp.planner.write import ds_config, launch_script
from testing import ROOT
from testing.forks import run_module
from tests.planner.test_memory_measured import config_of
from tests.planner.training import HIDDEN, LAYERS, LENGTH, Case, make, model_of

RANK = 16
MODEL = read_model("llama-1b", 2048).adapted(RANK)
PLAIN = Configuration(4, 1, 1, 1, 4, zero_stage=3, schedule="layered", chunks_per_rank=16, keep_frozen="none")
DEVICE, HOST = (replace(PLAIN, keep_frozen=home) for home in ("device", "host"))
IDEAL = {"matmul": 1.0, "memory": 1.0, "inside": 1.0, "between": 1.0, "crowding": 0.0, "gap_seconds": 0.0, "bus": 1.0}


def cluster(between=1e9, nodes=4, memory=80e9, host=200e9, bus=20e9):
    links = Link(200e9, 1e-30), Link(between, 1e-30)
    there = Host(bus=bus, memory=host, memory_bandwidth=100e9)
    return Cluster("here", nodes, 1, 300e12, memory, 2e12, *links, efficiency=IDEAL, host=there)


def test_adapters_alone_have_gradients_and_state():
    trains, frozen, tied = units_of(MODEL, replace(PLAIN, chunks_per_rank=1), 0)
    assert trains.trainable == trains.parameters == MODEL.adapter_parameters
    assert frozen.frozen and tied.frozen and frozen.trainable == tied.trainable == 0 and tied.copies == 1
    assert frozen.parameters + tied.parameters == MODEL.parameters
    needs, everything = memory(MODEL, DEVICE), memory(replace(MODEL, adapters=0), replace(PLAIN, keep_frozen=None))
    assert needs.optimizer_state < everything.optimizer_state / 50
    assert needs.master_weights == needs.optimizer_state / 2


@pytest.mark.parametrize(("of", "on_device", "on_host"), [(PLAIN, 0.25, 0), (DEVICE, 1, 0), (HOST, 0, 1)])
def test_frozen_weights_lie_in_shards_or_whole_where_they_are_kept(of, on_device, on_host):
    base, adapters, needs = 2 * MODEL.parameters, 2 * MODEL.adapter_parameters, memory(MODEL, of)
    assert needs.weights == pytest.approx(on_device * base + adapters / 4, rel=1e-3)
    assert needs.host == pytest.approx(on_host * base, rel=1e-6)
    if on_host:
        assert memory(MODEL, replace(of, home_shared_by=4)).host == pytest.approx(base / 4, rel=1e-6)


@pytest.mark.parametrize(("gpus_per_node", "most"), [(8, 8), (4, 4), (1, 1)])
def test_ranks_of_a_node_share_what_lies_on_its_host(gpus_per_node, most):
    of_nodes = replace(cluster(), gpus_per_node=gpus_per_node, nodes=8 // gpus_per_node)
    found = [one for one in candidates(MODEL, of_nodes, 8) if one.keep_frozen == "host"]
    assert found and all(one.home_shared_by == min(one.data_ranks, most) for one in found)
    assert found[0].to_json()["home_shared_by"] == found[0].home_shared_by


def test_weights_that_are_kept_are_never_gathered():
    shards, device, host = (sent(MODEL, of) for of in (PLAIN, DEVICE, HOST))
    # 16 chunks are gathered for forward and backward, two of them once, and so is what is tied.
    assert shards.frozen_gathers > 2 * ELEMENT * MODEL.parameters * 3 / 4 * 13 / 16
    assert device.frozen_gathers == host.frozen_gathers == 0
    assert shards.gathers == device.gathers == host.gathers < 0.02 * shards.frozen_gathers
    assert host.loaded == pytest.approx(shards.frozen_gathers * 4 / 3) and device.loaded == shards.loaded == 0


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_frozen_weights_never_move(stage):
    found = sent(MODEL, replace(PLAIN, zero_stage=stage, keep_frozen=None))
    assert found.frozen_gathers == found.loaded == 0
    assert found.reductions + found.gathers == pytest.approx(2 * ELEMENT * MODEL.adapter_parameters * 3 / 4)


def test_a_slow_network_delays_frozen_weights_in_shards_and_a_slow_bus_those_on_the_host():
    def seconds(of, **changes):
        return exact_seconds(MODEL, cluster(**changes), of)

    assert seconds(PLAIN) > 2 * seconds(PLAIN, between=100e9)
    assert seconds(DEVICE) < 1.2 * seconds(DEVICE, between=100e9)
    assert seconds(HOST, bus=1e9) > 2 * seconds(HOST, bus=1e12)
    assert seconds(DEVICE, bus=1e9) == seconds(DEVICE, bus=1e12)
    assert seconds(HOST, bus=1e12) == pytest.approx(seconds(DEVICE))


def test_a_gather_of_adapters_and_a_load_from_the_host_run_at_the_same_time():
    shards, device, host = (Work(MODEL, cluster(), of).gather(4e6, 0.0, 4e9) for of in (PLAIN, DEVICE, HOST))
    assert device == pytest.approx(ELEMENT * 4e6 * 3 / 4 / 1e9)
    assert shards == pytest.approx(device + ELEMENT * 4e9 * 3 / 4 / 1e9)
    assert host == pytest.approx(ELEMENT * 4e9 / 20e9)


def test_a_backward_of_frozen_weights_takes_about_as_long_as_a_forward():
    whole = Work(replace(MODEL, adapters=0), cluster(), replace(PLAIN, keep_frozen=None)).compute
    adapted = whole.layer(MODEL, 8, 1, True)
    plain = whole.layer(replace(MODEL, adapters=0), 8, 1, True)
    assert plain.forward < adapted.forward < 1.5 * plain.forward
    assert adapted.backward < 0.9 * plain.backward


def test_the_search_tries_every_home_and_tells_the_best_of_each():
    plans = search(MODEL, cluster(), 16, best=3)
    homes = {plan.configuration.keep_frozen for plan in plans}
    assert homes >= {None, "device", "host", "none"}
    assert all(plan.configuration.tensor_ranks == 1 for plan in plans)
    assert "layered, frozen weights on the device" in {plan.method for plan in plans}
    seconds = {plan.configuration.keep_frozen: plan.prediction.seconds for plan in reversed(plans)}
    assert seconds["device"] <= seconds["host"] < seconds["none"]


def test_where_devices_are_small_frozen_weights_stay_on_the_host_or_in_shards():
    model = read_model("llama-3b", 2048).adapted(RANK)
    whole = ELEMENT * model.parameters
    best = search(model, cluster(memory=whole, host=2 * whole), 16, best=1)[0]
    assert best.configuration.pipeline_ranks > 1 or best.configuration.keep_frozen in ("host", "none")
    alone = search(model, cluster(nodes=1, memory=whole, host=2 * whole), 4, best=1)[0]
    assert alone.configuration.keep_frozen == "host"
    with pytest.raises(ValueError, match="nothing fits"):
        search(model, cluster(nodes=1, memory=whole, host=whole / 2), 4, best=1)


def test_homes_are_tried_for_adapters_alone():
    assert all(one.keep_frozen is None for one in candidates(replace(MODEL, adapters=0), cluster(), 8))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"keep_frozen": "disk"}, "keep_frozen is 'disk'; use one of None, device, host, none"),
        ({"keep_frozen": "host", "zero_stage": 2}, "keep_frozen is 'host', which zero_stage 3 of this project has"),
        ({"keep_frozen": "device", "offload": "parameters"}, "but offload 'parameters' says where weights lie, too"),
    ],
)
def test_homes_that_the_engine_refuses_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(PLAIN, **changes)


def test_models_in_which_peft_adds_other_adapters_are_refused():
    experts = replace(Model.gpt("gpt", 2, 64, 4, 32, 100), experts=4)
    with pytest.raises(ValueError, match="adapters is 4, but gpt has 4 experts, beside which peft adds"):
        experts.adapted(4)


@pytest.mark.parametrize("home", ["device", "host", "none"])
def test_what_is_written_asks_for_the_home_and_names_the_adapters(home):
    of = replace(PLAIN, keep_frozen=home)
    assert read_block(ds_config(MODEL, of)).keep_frozen == home
    assert 'LoraConfig(r=16, target_modules="all-linear")' in launch_script(MODEL, of, cluster())


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "Qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autograd_keeps_of_a_layer_with_adapters_what_the_formula_says(name, dtype):
    model = peft.get_peft_model(make(name), peft.LoraConfig(r=8, target_modules="all-linear")).to(dtype)
    base = model.base_model.model.base_model
    hidden = torch.randn(1, LENGTH, HIDDEN, dtype=dtype, requires_grad=True)
    positions = {}
    if name != "GPT-2":
        positions = {"position_embeddings": base.rotary_emb(hidden, torch.arange(LENGTH)[None])}
    known = {each.untyped_storage()._cdata for each in (*model.parameters(), *positions.get("position_embeddings", ()))}
    kept = {}

    def keep(tensor):
        if tensor.untyped_storage()._cdata not in known:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        (base.h if name == "GPT-2" else base.layers)[0](hidden, **positions)
    software = Software(ElementBytes(weights=dtype.itemsize, gradients=dtype.itemsize))
    told = layer_bytes(model_of(name).adapted(8), 1, 1, software).kept
    assert sum(each.untyped_storage().nbytes() for each in kept.values()) == pytest.approx(told, rel=0.01)
    # The first norm of the model keeps nothing, because a frozen embedding gets no gradient.
    assert 0 < end_bytes(model_of(name).adapted(8), 1, 1, software).unkept < told / 4


SCRIPT = """
import json
import sys

import deepspeed
import peft

from tests.planner.training import make

model = peft.get_peft_model(make("Llama"), peft.LoraConfig(r=8, target_modules="all-linear"))
deepspeed.initialize(model=model, model_parameters=model.parameters(), config=json.loads(sys.argv[1]))
"""


@pytest.mark.parametrize("home", ["none", pytest.param("host", marks=pytest.mark.slow)])
def test_a_step_gathers_sends_loads_and_holds_what_explain_says(tmp_path, home):
    sharers = 2 if home == "host" else 1
    of = Configuration(
        2, 2, 1, 4, 4, 3, "layered", LAYERS // 2, resident_chunks=1, keep_frozen=home, home_shared_by=sharers
    )
    case = Case("Llama", of, True, adapters=8)
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["ds_lgamp", "run", "--explain", "--json", "--ranks", "4", str(tmp_path / "script.py")]
    ended = run_module([*words, json.dumps(config_of(case))], tmp_path, {"PYTHONPATH": str(ROOT)})
    assert ended.status == 0, ended.complaints
    told = json.loads(ended.output)["ranks"]
    step = sent(case.model, of)
    software = replace(default_software(of), all_to_all=True)
    assert max(rank["collective_bytes_sent"] for rank in told) == step.gathers + step.frozen_gathers + step.reductions
    assert max(rank["bus_bytes_loaded"] or 0 for rank in told) == step.loaded
    for number, rank in enumerate(told):
        held = followed(case.model, of, number, software)
        for kind in ("weights", "master_weights", "resident_weights", "gradients", "gradient_buffers"):
            assert rank["memory"][kind] == getattr(held, kind), kind
        if home == "host":
            assert rank["memory"]["host"]["weights"] == held.host.weights
