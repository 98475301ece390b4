"""The planner knows what travels rounded: its bytes, its time, its memory, when it pays, and how to ask for it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given

from ds_lgamp.config import read_block
from ds_lgamp.cost.units import aligned, packed_bytes
from ds_lgamp.integrations.deepspeed.config.precision import travel_of
from ds_lgamp.integrations.deepspeed.config.run_checks import refuse_needless_rounding
from ds_lgamp.planner.cluster import Cluster, Link
from ds_lgamp.planner.configuration import ROUNDED, Configuration
from ds_lgamp.planner.hardware import RESTORE_BYTES, ROUND_BYTES, Group
from ds_lgamp.planner.load import demand_of
from ds_lgamp.planner.memory import default_software, followed, memory
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.models import model_of_flags
from ds_lgamp.planner.search import Allowed, search
from ds_lgamp.planner.work import Work, exact_seconds, is_quick
from ds_lgamp.planner.write import describe, ds_config, method_of, why_not
from ds_lgamp.runtime.messages import message_bytes
from ds_lgamp.schedule.spec import Hierarchy
from testing import ROOT
from testing.forks import run_module
from testing.ranks import run_on_ranks
from tests.planner.configurations import configurations, models
from tests.planner.test_memory_measured import LARGEST_DEVIATION, config_of
from tests.planner.training import LAYERS, Case, measure_all_on_rank, model_of
from tests.slow import slow_except

MODEL = Model.gpt("medium", 4, 2048, 16, 1024, 5000)
PLAIN = Configuration(4, 1, 1, 1, 4, zero_stage=3, schedule="layered", chunks_per_rank=4)
WEIGHTS, GRADIENTS = {"weight_bits": 8}, {"gradient_bits": 8}
PIPELINE = replace(PLAIN, data_ranks=2, pipeline_ranks=2, chunks_per_rank=2)
ALL = replace(PIPELINE, **WEIGHTS, gradient_bits=4, activation_dtype="fp8")
EXACT = replace(ALL, **dict.fromkeys(ROUNDED))
IDEAL = {"matmul": 1.0, "memory": 1.0, "inside": 1.0, "between": 1.0, "crowding": 0.0, "gap_seconds": 0.0}


def cluster(between=1e9, nodes=4, gpus_per_node=1, memory_bandwidth=2e12, **changes):
    links = Link(200e9, 1e-30), Link(between, 1e-30)
    return Cluster("here", nodes, gpus_per_node, 300e12, 80e9, memory_bandwidth, *links, efficiency=IDEAL, **changes)


def test_a_gather_of_rounded_weights_takes_their_bytes_and_the_kernels_around_it():
    exact, rounded = (Work(MODEL, cluster(), replace(PLAIN, **way)).gather(3.2e9) for way in ({}, WEIGHTS))
    assert exact == pytest.approx(2 * 3.2e9 * 3 / 4 / 1e9)
    # Every rank rounds a quarter, and restores all.
    kernels = (ROUND_BYTES * 3.2e9 / 4 + RESTORE_BYTES * 3.2e9) / 2e12
    assert rounded == pytest.approx(1.0625 * 3.2e9 * 3 / 4 / 1e9 + kernels)


@pytest.mark.parametrize(("bits", "each"), [(8, 1.0625), (4, 0.5625)])
def test_rounded_gradients_take_an_all_to_all(bits, each):
    """On nodes with several GPUs it sends more through their cards than a ring, which sends each byte out once."""
    assert each == packed_bytes(aligned(1), bits) / aligned(1)
    here, rounding = cluster(), replace(PLAIN, gradient_bits=bits)
    kernels = (ROUND_BYTES + RESTORE_BYTES) * 3.2e9 / 2e12
    assert Work(MODEL, here, rounding).reduction(3.2e9) == pytest.approx(each * 3.2e9 * 3 / 4 / 1e9 + kernels)
    full = cluster(1e9, nodes=2, gpus_per_node=8, cards_per_node=8)
    wide = replace(PLAIN, data_ranks=16, gradient_bits=bits)
    work = Work(MODEL, full, wide)
    assert work.data_group == Group(8, 2)
    assert work.reduction(3.2e9) == pytest.approx(each * 3.2e9 * 8 / 16 / 1e9 + kernels)
    assert Work(MODEL, full, replace(wide, gradient_bits=None)).reduction(3.2e9) == pytest.approx(
        2 * 3.2e9 * 15 / 16 / 8e9
    )


def test_one_data_parallel_rank_sends_nothing_and_rounds_nothing():
    alone = Work(MODEL, cluster(nodes=1), replace(PLAIN, data_ranks=1, **WEIGHTS, **GRADIENTS))
    assert alone.gather(1e9) == alone.reduction(1e9) == 0


def test_a_message_of_rounded_hidden_states_keeps_its_link_for_half_as_long():
    work, exact = (Work(MODEL, cluster(), of) for of in (ALL, EXACT))
    elements = MODEL.sequence_length * MODEL.hidden_size
    hop, message = work.message
    assert message == pytest.approx((1 + 4 / 128) * elements / 1e9) and exact.message[1] == 2 * elements / 1e9
    # The kernels delay the message, but its link may carry another one meanwhile.
    assert hop - message == pytest.approx((ROUND_BYTES + RESTORE_BYTES) * elements / 2e12)


def test_hidden_states_have_the_bytes_of_the_engines_messages():
    """Two chunks of the first rank, and one of the second, send their results of every micro-batch."""
    result = torch.empty(1, MODEL.sequence_length, MODEL.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    of = replace(ALL, chunks_per_rank=2)
    each = message_bytes(result, "fp8")
    assert demand_of(MODEL, of).hop_bytes == (2 * of.micro_batches * each, of.micro_batches * each)
    # Below 1,024 elements they travel as they are.
    small = Model.gpt("small", 4, 32, 4, 16, 128)
    result = torch.empty(1, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    assert demand_of(small, of).hop_bytes[1] == of.micro_batches * message_bytes(result, "fp8") == 4 * result.nbytes
    assert (
        Work(small, cluster(), of).message[1] == Work(small, cluster(), replace(of, activation_dtype=None)).message[1]
    )


@given(models(), configurations())
def test_nothing_that_travels_rounded_has_more_bytes_or_keeps_a_network_for_longer(model, configuration):
    assume(configuration.rounds)
    exact = replace(configuration, **dict.fromkeys(ROUNDED))
    sent, whole = (demand_of(model, of) for of in (configuration, exact))
    for kind in ("data_bytes", "hop_bytes"):
        pairs = list(zip(getattr(sent, kind), getattr(whole, kind)))
        assert all(less <= more for less, more in pairs)
        assert kind == "data_bytes" or any(less < more for less, more in pairs) == (
            configuration.activation_dtype is not None
        )
    # A GPU whose kernels take no time, on nodes of one GPU, where an all-to-all sends as much as a ring.
    here = cluster(nodes=configuration.gpus, memory_bandwidth=1e30)
    assume(model.attention_heads % configuration.tensor_ranks == 0)
    costs, longer = (Work(model, here, of).costs() for of in (configuration, exact))
    for kind in ("gather", "reduce"):
        assert all(less <= more * (1 + 1e-9) for less, more in zip(getattr(costs, kind), getattr(longer, kind)))
    for kind in ("hop", "message"):
        assert all(getattr(costs, kind)[link] <= more * (1 + 1e-9) for link, more in getattr(longer, kind).items())


def test_memory_holds_what_travels_packed():
    exact, rounded = memory(MODEL, PLAIN), memory(MODEL, replace(PLAIN, **WEIGHTS, **GRADIENTS))
    assert rounded.weights == exact.weights and rounded.optimizer_state == exact.optimizer_state
    assert rounded.gathered_weights + rounded.gradient_buffers > exact.gathered_weights + exact.gradient_buffers
    messages = [memory(MODEL, of).messages for of in (replace(EXACT, recompute="none"), replace(ALL, recompute="none"))]
    assert 0 < messages[1] < messages[0]


def test_a_search_rounds_only_where_it_is_asked_to_and_where_that_pays():
    """On nodes of one GPU behind a slow network."""

    def rounding(between, bits=None):
        found = search(MODEL, cluster(between), 16, best=1, allowed=Allowed(rounded=bits))
        return [plan.configuration for plan in found if plan.configuration.rounds]

    assert not rounding(1e9)
    found = rounding(1e9, 8)
    assert {of.gradient_bits for of in found} <= {None, 8} and any(of.weight_bits for of in found)
    assert any(of.activation_dtype for of in found)
    assert {of.gradient_bits for of in rounding(1e9, 4)} == {None, 4}
    assert not rounding(1e13, 8)


def test_plans_that_round_are_faster_than_themselves_without_and_others_stay():
    without, found = (search(MODEL, cluster(), 16, best=3, allowed=Allowed(rounded=bits)) for bits in (None, 8))
    assert {plan.method for plan in without} <= {plan.method for plan in found}
    assert found[0].prediction.seconds < without[0].prediction.seconds
    for plan in (plan for plan in found if plan.configuration.rounds and is_quick(plan.configuration)):
        of, exact = plan.configuration, replace(plan.configuration, **dict.fromkeys(ROUNDED))
        seconds = exact_seconds(MODEL, cluster(), of)
        assert plan.prediction.seconds == pytest.approx(seconds)
        assert seconds < exact_seconds(MODEL, cluster(), exact)


def test_a_search_adds_no_rounded_plan_that_does_not_suit():
    found = search(MODEL, cluster(), 16, best=1, allowed=Allowed(rounded=8), suits=lambda of: not of.rounds)
    assert not any(plan.configuration.rounds for plan in found)


def test_the_words_and_json_tell_what_is_rounded():
    assert method_of(ALL) == "layered, 8-bit weights, 4-bit gradients, fp8 hidden states"
    assert describe(replace(PLAIN, **WEIGHTS, stores_weights=True)).startswith(
        "layered, gathered weights on the host, 8-bit weights, W4"
    )
    assert {name: ALL.to_json()[name] for name in ROUNDED} == dict(zip(ROUNDED, (8, 4, "fp8")))
    assert not set(ROUNDED) & set(EXACT.to_json())


@given(models(), configurations())
def test_files_ask_for_it_by_the_keys_that_the_engine_reads(model, planned):
    assume(planned.rounds and why_not(model, planned) is None)
    config = json.loads(json.dumps(ds_config(model, planned)))
    settings = read_block(config)
    stage = SimpleNamespace(zero_config=SimpleNamespace(stage=config["zero_optimization"]["stage"]))
    assert travel_of(settings, config, stage) == planned.travel
    assert settings.activation_dtype == planned.activation_dtype
    in_bf16 = SimpleNamespace(
        float16_config=SimpleNamespace(enabled=False), bfloat16_config=SimpleNamespace(enabled=True)
    )
    refuse_needless_rounding(settings, in_bf16, planned.pipeline_ranks)


def test_megatrons_own_loop_rounds_nothing():
    flags = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128"
    model = model_of_flags("m", f"{flags} --num-experts 8 --moe-router-topk 2")
    of = replace(PIPELINE, zero_stage=1, chunks_per_rank=2)
    assert why_not(model, of) is None
    assert "something travels rounded, which Megatron-LM's" in why_not(model, replace(of, activation_dtype="fp8"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight_bits": 4}, "weight_bits is 4; use one of None, 8"),
        ({"gradient_bits": 2}, "gradient_bits is 2; use one of None, 8, 4"),
        ({"activation_dtype": "bf16"}, "activation_dtype is 'bf16'; use one of None, fp8"),
        ({**WEIGHTS, "zero_stage": 2}, "weight_bits is 8, which weights have in gathers of zero_stage 3"),
        ({**GRADIENTS, "zero_stage": 0}, "gradient_bits is 8, but zero_stage 0 sums exact gradients"),
        ({"activation_dtype": "fp8"}, "activation_dtype is 'fp8', but one pipeline rank sends no hidden states"),
        ({**WEIGHTS, "hierarchy": Hierarchy(2, False)}, "weight_bits or gradient_bits is set, but shards"),
        (
            {**GRADIENTS, "expert_ranks": 2},
            "weight_bits or gradient_bits is set, but shards of nodes and divided experts",
        ),
        ({**GRADIENTS, "micro_batch_outer": True}, "micro_batch_outer is True, which is stock DeepSpeed's way"),
    ],
)
def test_what_the_engine_does_not_round_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(PLAIN, **changes)


SCRIPT = """
import json
import sys

import deepspeed

from tests.planner.training import make

model = make("Llama")
deepspeed.initialize(model=model, model_parameters=model.parameters(), config=json.loads(sys.argv[1]))
"""
TOLD = {
    "all at stage 3": {"zero_stage": 3, **WEIGHTS, **GRADIENTS, "activation_dtype": "fp8"},
    "gradients in 4 bits at stage 2": {"zero_stage": 2, "gradient_bits": 4, "recompute": "none"},
    "weights that wait on the host": {"zero_stage": 3, **WEIGHTS, "stores_weights": True, "resident_chunks": 1},
    "1f1b": {"zero_stage": 1, **GRADIENTS, "activation_dtype": "fp8", "schedule": "1f1b", "chunks_per_rank": 1},
}


def explained(folder, of):
    """Returns what ``--explain`` says of each pipeline rank of a small Llama."""
    (folder / "script.py").write_text(SCRIPT)
    config = json.dumps(config_of(Case("Llama", of, True)))
    words = ["ds_lgamp", "run", "--explain", "--json", "--ranks", str(of.gpus), str(folder / "script.py"), config]
    ended = run_module(words, folder, {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert ended.status == 0, ended.complaints
    return json.loads(ended.output)["ranks"]


@pytest.mark.parametrize("name", slow_except([*TOLD][:1], [*TOLD]))
def test_a_step_sends_and_holds_what_explain_says(tmp_path, name):
    model = model_of("Llama")
    of = replace(Configuration(2, 2, 1, 4, 4, schedule="layered", chunks_per_rank=LAYERS // 2), **TOLD[name])
    exact = replace(of, **dict.fromkeys(ROUNDED))
    sent, as_it_is = demand_of(model, of), demand_of(model, exact)
    for rank, told in enumerate(explained(tmp_path, of)):
        assert told["collective_bytes_sent"] == sent.data_bytes[rank] < as_it_is.data_bytes[rank]
        held = followed(model, of, rank, replace(default_software(of), all_to_all=True))
        for kind in ("weights", "master_weights", "resident_weights", "gradients", "gradient_buffers"):
            assert told["memory"][kind] == getattr(held, kind), kind


@pytest.mark.slow
def test_a_training_that_rounds_takes_the_memory_that_the_planner_tells():
    of = Configuration(2, 2, 1, 1, 2, 3, "layered", LAYERS // 2, weight_bits=8, gradient_bits=4, activation_dtype="fp8")
    case = Case("Llama", of, True)
    measured = max(peak for (peak,) in run_on_ranks(4, measure_all_on_rank, [(case, config_of(case))], seconds=600))
    software = replace(default_software(of), all_to_all=True)
    assert memory(model_of("Llama"), of, software).total == pytest.approx(measured, rel=LARGEST_DEVIATION)
