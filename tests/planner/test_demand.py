"""What a step sends, from sizes alone."""

import json
from dataclasses import replace

import pytest

from ds_lgamp.cost.activations import ActivationBytes, ChunkBytes
from ds_lgamp.cost.traffic import hop_bytes
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.load import demand_of, demand_of_facts, facts_of, megatron_demand
from ds_lgamp.planner.models import read_model
from ds_lgamp.schedule.spec import Hierarchy

FLAGS = """--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 16 --vocab-size 4096""".split()


def test_a_layered_step_gathers_twice_and_reduces_once():
    model = read_model("gpt3-175b")
    chosen = Configuration(4, 8, 2, 1, 8, zero_stage=3, schedule="layered", chunks_per_rank=12)
    sent = demand_of(model, chosen).data_bytes
    parameters = model.layers * model.layer_parameters / (8 * 2)
    # Two gathers and one reduction of 16-bit elements, of which a rank sends 3/4; the last chunk is gathered once.
    assert sent[3] == pytest.approx(3 * 2 * parameters * 3 / 4, rel=0.1)


@pytest.mark.parametrize("replicated", [False, True])
def test_shards_of_nodes_tell_what_travels_between_peers(replicated):
    model, hierarchy = read_model("gpt3-175b"), Hierarchy(2, replicated)
    plain = Configuration(8, 8, 1, 1, 8, zero_stage=3, schedule="layered", chunks_per_rank=12)
    demand = demand_of(model, replace(plain, hierarchy=hierarchy))
    assert demand.hierarchy == hierarchy and demand_of(model, plain).peer_bytes == ()
    # One gather and one reduction, or one sum over replicas, of the half that a rank keeps: 3/4 of it each.
    kept = model.layers * model.layer_parameters / 8 / 2
    assert demand.peer_bytes[3] == pytest.approx(2 * 2 * kept * 3 / 4, rel=0.1)
    # Inside a node, two gathers and one reduction send half of a chunk each.
    assert demand.data_bytes[3] - demand.peer_bytes[3] == pytest.approx(3 * 2 * kept, rel=0.1)


def test_flags_of_megatron_say_what_its_step_sends():
    config = {"ds_lgamp": {"chunks_per_rank": 4}}
    demand = megatron_demand([*FLAGS, "--pipeline-model-parallel-size", "2"], config, 4)
    assert (demand.pipeline_ranks, demand.data_ranks, demand.tensor_ranks) == (2, 2, 1)
    # 4 micro-batches of 2 x 32 tokens with 64 elements of 2 bytes leave 4 chunks of rank 0, and 3 of rank 1.
    assert demand.hop_bytes == (4 * 4 * 2 * 32 * 64 * 2, 3 * 4 * 2 * 32 * 64 * 2)


def test_stock_schedules_have_one_chunk_per_rank():
    config = {"ds_lgamp": {"schedule": "1f1b"}}
    one = megatron_demand([*FLAGS, "--pipeline-model-parallel-size", "2"], config, 4)
    assert one.hop_bytes == (4 * 2 * 32 * 64 * 2, 0)


@pytest.mark.parametrize(
    ("flags", "block", "chunks"),
    [
        ([], {}, 4),
        ([], {"chunks_per_rank": None, "layers_per_chunk": None, "micro_batch_group": "all"}, 4),
        ([], {"layers_per_chunk": 2}, 2),
        (["--num-layers-per-virtual-pipeline-stage", "2"], {}, 2),
        (["--num-virtual-stages-per-pipeline-rank", "2"], {}, 2),
    ],
    ids=str,
)
def test_flags_and_block_of_megatron_cut_the_chunks(flags, block, chunks):
    pipeline = ["--pipeline-model-parallel-size", "2"]
    demand = megatron_demand([*FLAGS, *pipeline, *flags], {"ds_lgamp": block}, 4)
    assert demand.hop_bytes[0] == chunks * 4 * 2 * 32 * 64 * 2


def test_the_file_says_the_stage_of_a_megatron_job():
    by_stage = [
        megatron_demand(FLAGS, {"ds_lgamp": {}, "zero_optimization": {"stage": stage}}, 4).data_bytes[0]
        for stage in range(4)
    ]
    # Stage 0 sums, 1 and 2 reduce and gather once. Stage 3 gathers twice, but for what is resident at the turn.
    assert by_stage[0] == pytest.approx(by_stage[1], rel=0.01) == by_stage[2]
    assert 1.5 < by_stage[3] / by_stage[2] < 1.7


@pytest.mark.parametrize(("flags", "parts"), [([], 1), (["--sequence-parallel"], 2)])
def test_with_sequence_parallelism_tensor_ranks_send_a_part_of_a_result(flags, parts):
    ranks = ["--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2"]
    demand = megatron_demand([*FLAGS, *ranks, *flags], {"ds_lgamp": {"chunks_per_rank": 4}}, 4)
    assert demand.hop_bytes[0] == 4 * 8 * 2 * 32 * 64 * 2 / parts


@pytest.mark.parametrize("hierarchy", [None, Hierarchy(2, False)])
def test_a_step_is_written_as_explain_tells_it(hierarchy):
    chosen = Configuration(4, 4, 2, 1, 8, zero_stage=3, schedule="layered", chunks_per_rank=4, hierarchy=hierarchy)
    demand = replace(demand_of(read_model("gpt3-175b"), chosen), order="islands in the order east, west")
    assert demand_of_facts(json.loads(json.dumps(facts_of(demand)))) == demand


def test_results_that_stay_on_a_rank_are_no_messages():
    chunks = [ChunkBytes(size, 0, 0) for size in (1, 10, 100, 0)]
    sent = [hop_bytes(rank, (0, 0, 1, 0), 3, ActivationBytes(0, 0, chunks)) for rank in (0, 1)]
    assert sent == [3 * 10, 3 * 100]


def test_context_parallel_ranks_reduce_as_data_parallel_ones():
    flags = [*FLAGS, "--context-parallel-size", "2"]
    both = megatron_demand(flags, {}, 4)
    assert (both.pipeline_ranks, both.data_ranks) == (1, 4)


def test_ranks_that_flags_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="--pipeline-model-parallel-size 3, .* do not divide 4 ranks"):
        megatron_demand([*FLAGS, "--pipeline-model-parallel-size", "3"], {}, 4)


def test_flags_that_number_ranks_in_another_order_are_refused():
    with pytest.raises(ValueError, match="--use-tp-pp-dp-mapping is given, but a cluster file lays ranks out"):
        megatron_demand([*FLAGS, "--use-tp-pp-dp-mapping"], {}, 4)
