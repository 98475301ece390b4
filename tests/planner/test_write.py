"""A configuration that the planner writes is what the engine reads."""

import json
import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ds_lgamp.config import read_block
from ds_lgamp.integrations.program_spec import chunk_bounds, place, program_spec
from ds_lgamp.planner.cluster import Cluster, Link
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.load import demand_of, demand_of_facts
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.models import model_of_flags
from ds_lgamp.planner.write import OnIslands, ds_config, launch_script, why_not, write
from ds_lgamp.schedule.spec import Offload
from testing import ROOT, SCRIPTS
from testing.launching import ON_CPU, run

MODEL = Model.gpt("small", 8, 64, 4, 32, 128)
SLOW = Link(1e9, 1e-5)


def cluster(nodes=1, gpus_per_node=8):
    return Cluster("here", nodes, gpus_per_node, 1e12, 80e9, 1e12, SLOW, SLOW)


def plan(data_ranks=1, pipeline_ranks=1, tensor_ranks=1, micro_batches=8, **rest):
    return Configuration(data_ranks, pipeline_ranks, tensor_ranks, 2, micro_batches, **rest)


ON_HOST = {(): None, ("optimizer",): Offload(), ("optimizer", "param"): Offload(parameters=True)}
"""What the host holds, by what ds_config.json offloads."""


@st.composite
def plans(draw):
    ranks, schedule = draw(st.integers(1, 4)), draw(st.sampled_from(["layered", "interleaved_1f1b", "1f1b", "gpipe"]))
    single, stage = schedule in ("1f1b", "gpipe"), draw(st.integers(0, 3))
    offloads = [None, "optimizer", "parameters"][: 1 if stage == 0 or schedule != "layered" else 3 if stage == 3 else 2]
    return plan(
        draw(st.integers(1, 4)),
        ranks,
        micro_batches=ranks * draw(st.integers(1, 4)),
        zero_stage=stage,
        schedule=schedule,
        chunks_per_rank=1 if single else draw(st.integers(1, 8 // ranks)),
        resident_chunks=draw(st.integers(1, 4)),
        recompute=draw(st.sampled_from(["full", "none"])),
        micro_batch_group=draw(st.sampled_from([None, 1, 3])) if schedule == "layered" else None,
        overlap_update=draw(st.booleans()),
        offload=draw(st.sampled_from(offloads)),
    )


@given(plans())
def test_the_engine_reads_the_same_program_and_chunks(planned):
    assume(why_not(MODEL, planned) is None)
    config = json.loads(json.dumps(ds_config(MODEL, planned)))
    settings = read_block(config)
    ranks = settings.pipeline_ranks
    types = ["Beginning", *["Block"] * MODEL.layers, "End"]
    if settings.one_chunk_per_rank:
        settings = settings.model_copy(update={"chunks_per_rank": 1})
    bounds = chunk_bounds(settings, ranks, types, [float(each == "Block") for each in types])
    blocks = [types[start:end].count("Block") for start, end in zip(bounds, bounds[1:])]
    assert blocks == planned.layers_of_chunks(MODEL)
    # A pipeline computes the micro-batches of all of its ranks.
    micro_batches = config["gradient_accumulation_steps"] * ranks
    stage = config["zero_optimization"]["stage"]
    parts = (key.removeprefix("offload_") for key in config["zero_optimization"] if key.startswith("offload"))
    offload = ON_HOST[tuple(parts)]
    if offload is not None:
        offload = offload._replace(alone=planned.data_ranks == 1)
    updates = "next_step" if settings.overlap_update or offload is not None else "step"
    placement = place(settings, len(blocks), ranks)
    spec = program_spec(settings, placement, micro_batches, stage, updates=updates, offload=offload)
    wanted = planned.spec if stage else replace(planned.spec, resident_chunks=spec.resident_chunks)
    assert spec == wanted
    assert settings.recompute == planned.recompute


@given(plans())
def test_the_batch_is_that_of_all_ranks(planned):
    assume(why_not(MODEL, planned) is None)
    config = ds_config(MODEL, planned)
    product = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * planned.gpus
    assert config["train_batch_size"] == product == planned.sequences


@pytest.mark.parametrize(
    ("planned", "said"),
    [
        (plan(1, 4, micro_batches=6, schedule="layered", chunks_per_rank=2), "micro_batches is 6, but each of 4 pipe"),
        (plan(1, 2, zero_stage=3, micro_batch_outer=True), "stock ZeRO-3 needs pipeline_ranks 1"),
    ],
)
def test_what_no_script_can_run_is_refused(tmp_path, planned, said):
    with pytest.raises(ValueError, match=said):
        write(MODEL, planned, cluster(), tmp_path / "plan")
    assert not (tmp_path / "plan").exists()


def test_files_that_are_there_are_kept(tmp_path):
    (tmp_path / "ds_config.json").write_text("mine")
    with pytest.raises(ValueError, match="which has a ds_config.json; name another folder"):
        write(MODEL, plan(), cluster(), tmp_path)
    assert (tmp_path / "ds_config.json").read_text() == "mine" and not (tmp_path / "launch.sh").exists()


def test_on_islands_the_run_orders_the_ranks_as_the_plan_does(tmp_path):
    planned = plan(4, 2, schedule="layered", zero_stage=3, chunks_per_rank=4)
    demand = replace(demand_of(MODEL, planned), order="pipelines stay together")
    write(MODEL, planned, cluster(), tmp_path, OnIslands(Path("rooms.json"), demand))
    words = shlex.split((tmp_path / "launch.sh").read_text().splitlines()[-1])
    options = words[words.index("run") + 1 :]
    assert options[:2] == ["--cluster", str(Path("rooms.json").absolute())]
    assert options[2] == "--explained" and options[3].endswith("/step.json")
    assert demand_of_facts(json.loads((tmp_path / "step.json").read_text())) == demand


def test_on_islands_tensor_parallel_scripts_train_equal_micro_batches_as_planned(tmp_path):
    for name, tensor_ranks in (("one tensor rank", 1), ("two", 2)):
        planned = plan(4, 2, schedule="layered", zero_stage=3, chunks_per_rank=4, tensor_ranks=tensor_ranks)
        write(MODEL, planned, cluster(), tmp_path / name, OnIslands(Path("rooms.json"), demand_of(MODEL, planned)))
        block = json.loads((tmp_path / name / "ds_config.json").read_text())["ds_lgamp"]
        assert block.get("data_rank_speeds") == (None if tensor_ranks == 1 else [1] * planned.data_ranks)


@pytest.mark.parametrize(
    "flags",
    [
        "--squared-relu",
        "--rotary-percent 0.5 --position-embedding-type rope",
        "--qk-layernorm",
        "--normalization RMSNorm",
        "--disable-bias-linear",
    ],
)
def test_what_flags_of_sizes_do_not_say_is_not_written_under_tensor_parallelism(flags):
    sizes = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128"
    plain, other = (model_of_flags("m", text) for text in (sizes, f"{sizes} {flags}"))
    assert why_not(plain, plan(tensor_ranks=2)) is None and why_not(other, plan()) is None
    assert "is not the GPT that launch/pretrain_gpt.py builds" in why_not(other, plan(tensor_ranks=2))


@pytest.mark.parametrize(("recompute", "says"), [("full", True), ("none", False)])
def test_a_script_of_stock_zero_is_told_to_recompute_where_the_plan_does(recompute, says):
    script = launch_script(MODEL, plan(8, zero_stage=3, micro_batch_outer=True, recompute=recompute), cluster())
    assert ("counts on it to recompute activations" in script) == says


def test_gated_layers_under_tensor_parallelism_are_refused():
    assert "gated feed-forward parts; use tensor_ranks 1" in why_not(replace(MODEL, gated=True), plan(tensor_ranks=2))


def test_stock_zero_3_gets_no_block():
    config = ds_config(MODEL, plan(8, zero_stage=3, micro_batch_outer=True))
    assert read_block(config) is None and config["zero_optimization"] == {"stage": 3}


def test_stock_zero_2_overlaps_its_reductions_as_the_plan_counts_on():
    zero = ds_config(MODEL, plan(8, zero_stage=2, micro_batch_outer=True))["zero_optimization"]
    assert zero == {"stage": 2, "overlap_comm": True}


def test_under_tensor_parallelism_a_pipeline_reads_all_micro_batches_itself():
    planned = plan(2, 2, 4, micro_batches=6)
    config = ds_config(MODEL, planned)
    assert config["gradient_accumulation_steps"] == 6 and "pipeline_ranks" not in config["ds_lgamp"]
    assert config["train_batch_size"] == 2 * 6 * 2
    script = launch_script(MODEL, planned, cluster(2))
    assert "--nnodes 2" in script and "--nproc_per_node 8" in script
    assert "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --num-layers 8" in script


def test_part_of_a_node_beside_whole_nodes_is_refused():
    with pytest.raises(ValueError, match="gpus_per_node of here is 8, which does not divide the 12 GPUs"):
        launch_script(MODEL, plan(12), cluster(2))


def test_megatron_flags_are_those_of_the_script():
    model = replace(MODEL, position_embeddings=0, key_value_heads=2, biases=False)
    script = launch_script(replace(model, tied_embeddings=False), plan(tensor_ranks=2), cluster())
    known = (ROOT / "launch" / "arguments.py").read_text()
    flags = re.findall(r" (--[a-z-]+)", script.splitlines()[-1].partition("--deepspeed_config")[2])
    assert len(flags) > 10 and all(f'"{flag}"' in known for flag in flags), flags


@pytest.mark.slow
@pytest.mark.parametrize(
    "planned",
    [
        plan(1, 2, micro_batches=4, zero_stage=3, schedule="layered", chunks_per_rank=4),
        plan(2, 1, micro_batches=2, zero_stage=3, micro_batch_outer=True),
    ],
    ids=["layered", "stock"],
)
def test_a_written_configuration_trains(tmp_path, planned):
    write(MODEL, planned, cluster(), tmp_path)
    binaries = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**ON_CPU, "PATH": binaries, "PYTHONPATH": str(ROOT), "SCRIPT": str(SCRIPTS / "plain_gpt2.py")}
    output = run([str(tmp_path / "launch.sh"), "--layers", str(MODEL.layers)], 240, environment)
    lines = re.findall(r"^loss ([\d.]+) of (\d+) samples$", output, re.MULTILINE)
    assert len(lines) == 2 and all(int(samples) == planned.sequences for _, samples in lines)
