"""Plans for models with experts: layers of two kinds, and ranks that divide the experts of a layer."""

import json
import shlex
from argparse import Namespace
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from deepspeed.module_inject.auto_ep_config import parse_autoep_config
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.config import read_block
from ds_lgamp.integrations.deepspeed.config.check_keys import check_keys
from ds_lgamp.integrations.megatron.loop.arguments import _refuse_another_stage, _refuse_disagreement, check_file
from ds_lgamp.planner.activations import Software
from ds_lgamp.planner.candidates import candidates
from ds_lgamp.planner.cluster import Cluster, Link
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.island_search import _proposals
from ds_lgamp.planner.load import megatron_demand
from ds_lgamp.planner.memory import batch_bytes, memory, units_of
from ds_lgamp.planner.models import model_of_flags
from ds_lgamp.planner.predict import predict
from ds_lgamp.planner.search import Allowed, search
from ds_lgamp.planner.work import Work, exact_seconds
from ds_lgamp.planner.write import CONFIG_FILE, describe, ds_config, launch_script, why_not
from tests.planner.training import model_of

QWEN, DEEPSEEK, GPT_OSS = (model_of(name) for name in ("Qwen3-MoE", "DeepSeek-V3", "GPT-OSS"))
FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128 --num-experts 8 "
    "--moe-router-topk 2 --swiglu --disable-bias-linear --normalization RMSNorm"
)
MEGATRON = model_of_flags("flags", FLAGS)
INSIDE, BETWEEN = Link(1e11, 1e-6), Link(1e9, 1e-5)
PERFECT = {"matmul": 1.0, "memory": 1.0, "inside": 1.0, "between": 1.0, "crowding": 0.0}


def cluster(nodes: int = 1, gpus_per_node: int = 8, **fields) -> Cluster:
    plain = Cluster("here", nodes, gpus_per_node, 1e13, 80e9, 1e12, INSIDE, BETWEEN, cards_per_node=8, price=1.0)
    return replace(plain, **{"efficiency": PERFECT, **fields})


plan = partial(Configuration, tensor_ranks=1, micro_batch=2, micro_batches=4, schedule="layered", chunks_per_rank=2)


@given(
    st.sampled_from([QWEN, DEEPSEEK, GPT_OSS]), st.sampled_from([1, 2]), st.integers(1, 2), st.sampled_from([1, 2, 4])
)
def test_ranks_have_all_parameters_together(model, pipeline_ranks, chunks, expert_ranks):
    """Whatever kinds of layers a chunk has. Experts count once for each rank that divides them."""
    expert_ranks = expert_ranks if model.divided_by else 1
    of = plan(4, pipeline_ranks, chunks_per_rank=chunks, expert_ranks=expert_ranks)
    units = [unit for rank in range(pipeline_ranks) for unit in units_of(model, of, rank)]
    found = sum(unit.parameters * unit.expert_ranks for unit in units)
    assert model.parameters <= found <= model.parameters + 32 * expert_ranks * len(units)
    experts = sum(count * kind.experts * kind.expert_parameters for count, kind in model.kinds if kind.experts > 1)
    divided = sum(unit.parameters * unit.expert_ranks for unit in units if unit.expert_ranks > 1)
    assert divided == (experts if expert_ranks > 1 else 0)


def test_experts_are_sharded_over_the_ranks_that_have_the_same_ones():
    """Dense parameters over all of them. Weights take 2 bytes and the optimizer's state 8, in bf16 with Adam."""
    experts = 4 * 8 * QWEN.expert_parameters
    dense = QWEN.parameters - experts
    for stage, expert_ranks in product(range(4), (1, 2, 4, 8)):
        found = memory(QWEN, plan(8, 1, zero_stage=stage, expert_ranks=expert_ranks))
        dense_shards, expert_shards = (8, 8 // expert_ranks) if stage else (1, 1)
        state = dense / dense_shards + experts / expert_ranks / expert_shards
        assert found.optimizer_state == pytest.approx(8 * state, rel=0.002)
        held = state if stage == 3 else dense + experts / expert_ranks
        assert found.weights == pytest.approx(2 * held, rel=0.002)


def test_all_to_alls_take_the_time_of_their_bytes():
    """Four for each layer with experts and micro-batch, and two more to recompute it. Every rank sends each token to
    two experts, (E - 1) / E of which are elsewhere. Of four layers, the first of DeepSeek-V3 has no experts, so the
    second pipeline rank is the slowest."""
    sent = 2 * (2 * DEEPSEEK.sequence_length) * 2 * DEEPSEEK.hidden_size
    for recompute, rounds in (("none", 4), ("full", 6)):
        of = plan(4, 2, schedule="1f1b", chunks_per_rank=1, expert_ranks=4, recompute=recompute)
        inside = predict(DEEPSEEK, cluster(), of)
        each = INSIDE.latency + sent * 3 / 4 / INSIDE.bandwidth
        assert inside.expert_parallel == pytest.approx(4 * 2 * rounds * each)
        # Two members on each of two nodes: half of the bytes leave the node.
        across = predict(DEEPSEEK, cluster(4, 2), of)
        each = BETWEEN.latency + sent / 2 / BETWEEN.bandwidth
        assert across.expert_parallel == pytest.approx(4 * 2 * rounds * each)
        assert predict(DEEPSEEK, cluster(), replace(of, expert_ranks=1)).expert_parallel == 0


def test_the_clock_waits_for_all_to_alls_in_every_pass_of_a_layer_with_experts():
    of = plan(8, 1, chunks_per_rank=4, expert_ranks=4)
    slow, ideal = (Work(DEEPSEEK, cluster(inside=inside), of).costs() for inside in (INSIDE, Link(1e30, 1e-30)))
    sent = 2 * (2 * DEEPSEEK.sequence_length) * 2 * DEEPSEEK.hidden_size
    each = INSIDE.latency + sent * 3 / 4 / INSIDE.bandwidth
    for passes in ("forward", "backward", "recompute"):
        longer = [own - without for own, without in zip(getattr(slow, passes), getattr(ideal, passes))]
        assert longer == pytest.approx([0, 2 * each, 2 * each, 2 * each], rel=1e-6), passes


def test_gathers_and_reductions_are_those_of_both_groups():
    for stage, expert_ranks in product((1, 3), (1, 2, 4, 8)):
        work = Work(QWEN, cluster(), plan(8, 1, zero_stage=stage, expert_ranks=expert_ranks))
        experts = 4 * (8 // expert_ranks) * QWEN.expert_parameters / 4 if expert_ranks > 1 else 0
        found = work.collectives(5e5, experts)
        others = 8 // expert_ranks
        wanted = 7 * INSIDE.latency + 1e6 * 7 / 8 / INSIDE.bandwidth
        if experts and others > 1:
            wanted += (others - 1) * INSIDE.latency + 2 * experts * (others - 1) / others / INSIDE.bandwidth
        assert (found.gather, found.reduce) == (pytest.approx(wanted), pytest.approx(wanted))
        assert sum(layer.experts for layer in work.layers) == experts


def test_the_clock_runs_a_step_whose_parts_add_up():
    of = plan(4, 2, zero_stage=3, expert_ranks=4)
    for recompute in ("full", "none"):
        told = predict(DEEPSEEK, cluster(), replace(of, recompute=recompute), on_clock=True)
        assert told.seconds == pytest.approx(exact_seconds(DEEPSEEK, cluster(), replace(of, recompute=recompute)))
        assert told.expert_parallel > 0


@pytest.mark.parametrize(("model", "found"), [(QWEN, {1, 2, 4, 8}), (GPT_OSS, {1}), (MEGATRON, {1, 2, 4, 8})])
def test_ranks_divide_experts_where_something_can_run_it(model, found):
    several = list(candidates(model, cluster(2), 16))
    assert {one.expert_ranks for one in several} == found
    for one in several:
        assert one.data_ranks % one.expert_ranks == model.experts % one.expert_ranks == 0
        assert one.expert_ranks == 1 or not (one.micro_batch_outer or one.tensor_ranks > 1)
    if model is GPT_OSS:
        assert {one.tensor_ranks for one in several} == {1}


def test_a_search_divides_experts_where_gpus_are_small():
    """Below stage 3, all experts on every rank need more than dense parameters and a part of them."""
    of = replace(QWEN, experts=128, hidden_size=1024, head_size=64, feed_forward_size=2048)
    least = memory(of, plan(8, 1, zero_stage=3, chunks_per_rank=4)).total
    plans = search(of, cluster(memory=1.2 * least), 16, allowed=Allowed(offload=False))
    assert plans[0].configuration.expert_ranks > 1 and plans[0].prediction.expert_parallel > 0
    assert f" E{plans[0].configuration.expert_ranks}," in describe(plans[0].configuration)
    assert all(plan.configuration.hierarchy is None or plan.configuration.expert_ranks == 1 for plan in plans)


@pytest.mark.parametrize("model", [QWEN, DEEPSEEK])
@pytest.mark.parametrize("expert_ranks", [1, 2, 4])
def test_a_written_configuration_is_one_that_the_engine_reads(model, expert_ranks):
    planned = plan(4, 2, zero_stage=3, expert_ranks=expert_ranks)
    assert why_not(model, planned) is None
    config = json.loads(json.dumps(ds_config(model, planned)))
    assert check_keys(config) == [] and read_block(config).pipeline_ranks == 2
    if expert_ranks == 1:
        assert "expert_parallel" not in config
    else:
        read = parse_autoep_config(config["expert_parallel"])
        assert (read.enabled, read.autoep_size) == (True, expert_ranks)


@pytest.mark.parametrize("stage", range(4))
def test_of_flags_megatron_lm_gets_a_file_and_flags_that_agree(stage):
    planned = plan(4, 2, zero_stage=stage, expert_ranks=2, micro_batches=3)
    config = json.loads(json.dumps(ds_config(MEGATRON, planned)))
    words = shlex.split(launch_script(MEGATRON, planned, cluster()).splitlines()[-1])
    flags = words[words.index("--ds-lgamp-config") + 2 : -1]
    assert words[words.index("--ds-lgamp-config") + 1].endswith(CONFIG_FILE)
    args = {"use_distributed_optimizer": False, "clip_grad": 1.0, "fp16": False, "data_parallel_size": 4}
    for flag, value in zip(flags, [*flags[1:], "--"]):
        if flag.startswith("--"):
            args[flag[2:].replace("-", "_")] = True if value.startswith("--") else int(value)
    assert (args["expert_model_parallel_size"], args["pipeline_model_parallel_size"]) == (2, 2)
    job = check_file(config, read_block(config))
    _refuse_disagreement(Namespace(**args), job)
    if stage < 2:
        _refuse_another_stage(Namespace(**args), job)
    assert job.settings.chunks_per_rank is None and "expert_parallel" not in config


def test_masks_of_gpt_oss_count_while_a_micro_batch_is_under_way():
    """One for windows and one for whole sequences, 2 bytes for each pair of tokens. The layered schedule has all
    micro-batches under way at once, or those of a group; 1F1B one for each pipeline rank."""
    masks, software = 2 * 2 * 2 * GPT_OSS.sequence_length**2, Software()

    def of_masks(of):
        without = batch_bytes(replace(GPT_OSS, attention_masks=0), of, software)
        return (batch_bytes(GPT_OSS, of, software) - without) / masks

    assert of_masks(plan(1, 1)) == 4 and of_masks(plan(1, 1, micro_batch_group=1)) == 1
    assert of_masks(plan(1, 2, schedule="1f1b", chunks_per_rank=1)) == 2
    assert of_masks(plan(1, 1, micro_batches=40)) == 40


def test_on_islands_every_rank_has_all_experts():
    """Orders of ranks know no all-to-alls."""
    assert {one.expert_ranks for one in _proposals(QWEN, cluster(2), 16)} == {1}


def test_what_megatron_lms_loop_does_not_know_is_not_written():
    assert "the host holds something" in why_not(MEGATRON, plan(4, 1, zero_stage=3, offload="optimizer"))
    with pytest.raises(
        ValueError, match="--expert-model-parallel-size is 2, whose all-to-alls a cluster file does not"
    ):
        megatron_demand(shlex.split(f"{FLAGS} --expert-model-parallel-size 2"), {}, 4)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"expert_ranks": 3}, "expert_ranks is 3, which does not divide the 8 data_ranks; use a divisor"),
        ({"expert_ranks": 0}, "expert_ranks is 0; use a whole number from 1"),
        ({"expert_ranks": 2, "tensor_ranks": 2}, "expert_ranks is 2, and tensor_ranks 2, which is not planned"),
        ({"expert_ranks": 2, "micro_batch_outer": True}, "and micro_batch_outer True, which is not planned together"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        plan(8, 1, **fields)


def test_experts_that_nothing_divides_are_refused():
    with pytest.raises(ValueError, match="expert_ranks is 2, but nothing divides the experts of GPT-OSS; use 1"):
        memory(GPT_OSS, plan(8, 1, expert_ranks=2))
    with pytest.raises(ValueError, match="expert_ranks is 16; it must divide the 8 experts of Qwen3-MoE"):
        memory(QWEN, plan(16, 1, expert_ranks=16))
