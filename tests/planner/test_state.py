"""The planner knows state in bf16, rounded by chance: its memory, its time, and that a user must ask for it."""

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given

from ds_lgamp.config import read_block
from ds_lgamp.cost.units import ElementBytes
from ds_lgamp.planner.cluster import Efficiency, named_cluster, with_part
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.hardware import HOST_UPDATE_BYTES, UPDATE_BYTES
from ds_lgamp.planner.memory import default_software, element_bytes, fits, followed, least, memory, of_rank
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.models import model_of_flags, read_model
from ds_lgamp.planner.search import IN_BF16, Allowed, NothingFits, search
from ds_lgamp.planner.work import Work, host_seconds
from ds_lgamp.planner.write import describe, ds_config, launch_script, method_of, why_not
from ds_lgamp.schedule.spec import BLOCK_ON_DEVICE, BLOCK_ON_HOST, RANDOM_NUMBERS
from testing import ROOT
from testing.forks import run_module
from testing.ranks import run_on_ranks
from tests.planner.configurations import configurations, models
from tests.planner.test_memory_measured import config_of
from tests.planner.test_rounded import SCRIPT
from tests.planner.training import LAYERS, Case, measure_all_on_rank
from tests.slow import slow_except

MODEL = Model.gpt("medium", 16, 2048, 16, 1024, 50304)
ON_DEVICE = Configuration(1, 1, 1, 2, 4, zero_stage=1, schedule="layered", chunks_per_rank=16, state="bf16")
ON_HOST = replace(ON_DEVICE, zero_stage=3, offload="parameters")
CARD = with_part(named_cluster("rtx4090"), 1, "128 GB")
HALF = Allowed(state="bf16")
KEYS = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def in_fp32(of):
    return replace(of, state="fp32")


def test_a_parameter_takes_eight_bytes_on_the_host_in_place_of_eighteen():
    halved, exact = memory(MODEL, ON_HOST), memory(MODEL, in_fp32(ON_HOST))
    # Beside that, an update has copies of a block in fp32, and random numbers.
    update = 16 * BLOCK_ON_HOST + 4 * (RANDOM_NUMBERS + BLOCK_ON_HOST)
    assert halved.host == pytest.approx(8 * MODEL.parameters + update, abs=1e6)
    assert exact.host == pytest.approx(18 * MODEL.parameters, rel=0.001)
    assert halved.total == exact.total


def test_an_update_copies_weight_gradient_and_moments_to_fp32():
    size = ElementBytes(weights=2, gradients=2, optimizer=8).with_state_in_half()
    assert size == ElementBytes(
        weights=2, gradients=2, optimizer=4, update=16, copies_weights=False, update_block=BLOCK_ON_DEVICE
    )


def test_on_the_device_weights_are_their_own_masters():
    halved, exact = memory(MODEL, ON_DEVICE), memory(MODEL, in_fp32(ON_DEVICE))
    assert halved.master_weights == 0 < exact.master_weights
    assert halved.weights == exact.weights and 2 * halved.optimizer_state == exact.optimizer_state
    assert halved.total < exact.total - 7.9 * MODEL.parameters
    assert least(MODEL, ON_DEVICE) < least(MODEL, in_fp32(ON_DEVICE)) - 7.9 * MODEL.parameters


@given(models(), configurations())
def test_state_in_bf16_never_takes_more_than_the_copies_it_saves(model, drawn):
    assume(drawn.state == "bf16")
    size = element_bytes(drawn, default_software(drawn))
    update = size.passing_update(1 << 40, size.update_block) + size.random_numbers(size.update_block)
    assert memory(model, drawn).total <= memory(model, in_fp32(drawn)).total + update
    assert least(model, drawn) <= memory(model, drawn).total


def test_on_the_host_updates_take_longer_and_gradients_half_as_long():
    work = Work(MODEL, CARD, ON_HOST)
    halved, exact = (host_seconds(work.compute, of, 1e9) for of in (ON_HOST, in_fp32(ON_HOST)))
    assert halved.load == exact.load and 2 * halved.store == exact.store
    assert exact.update == HOST_UPDATE_BYTES * 1e9 / (CARD.host.memory_bandwidth * Efficiency.host_memory)
    assert halved.update == Efficiency.host_rounding * exact.update
    measured = replace(CARD, efficiency={"host_rounding": 0.5})
    assert 2 * host_seconds(Work(MODEL, measured, ON_HOST).compute, ON_HOST, 1e9).update == exact.update
    assert work.costs().update[1] == pytest.approx(
        Efficiency.host_rounding * Work(MODEL, CARD, in_fp32(ON_HOST)).costs().update[1]
    )


def test_on_the_device_updates_take_the_bytes_of_their_operations():
    halved, exact = (Work(MODEL, CARD, of).costs().update[1] for of in (ON_DEVICE, in_fp32(ON_DEVICE)))
    assert halved / exact == pytest.approx(UPDATE_BYTES["bf16"] / UPDATE_BYTES["fp32"])


def test_a_search_keeps_state_in_bf16_only_where_it_is_asked_to():
    model = read_model("gpt2")
    cluster = with_part(named_cluster("a100"), 2, None)
    assert {plan.configuration.state for plan in search(model, cluster, 8)} == {"fp32"}
    plans = search(model, cluster, 8, allowed=HALF)
    assert {plan.configuration.state for plan in plans} == {"bf16"}
    assert all(plan.configuration.zero_stage and not plan.configuration.micro_batch_outer for plan in plans)
    assert {plan.configuration.data_ranks for plan in plans} == {1, 2}, "also where a stage divides nothing"


def test_where_nothing_fits_the_sentence_names_it_if_it_would_help():
    """18 bytes per parameter of 8 billion are more than 128 GB, and 8 are not. Of 32 billion, both are."""
    with pytest.raises(NothingFits, match="16.5 GB more than there are.*or a smaller model") as told:
        search(read_model("llama-8b", 4096), CARD, 16)
    assert str(told.value).endswith(IN_BF16) and "--state bf16" in IN_BF16
    plan = search(read_model("llama-8b", 4096), CARD, 16, best=1, allowed=HALF)[0]
    assert fits(read_model("llama-8b", 4096), plan.configuration, CARD) and plan.memory.host < 81e9
    # Plans for islands, which offload nothing, have no state in bf16.
    for model, allowed in (("qwen-32b", Allowed()), ("qwen-32b", HALF), ("llama-1b", Allowed(offload=False))):
        with pytest.raises(NothingFits) as told:
            search(read_model(model, 4096), CARD, 16, allowed=allowed)
        assert "bf16" not in str(told.value).partition("Use more")[2]


def test_the_method_names_it():
    assert method_of(ON_HOST) == "layered, parameters on the host, state in bf16"
    assert describe(ON_HOST).startswith("layered, parameters on the host, state in bf16, W1") and (
        ON_HOST.to_json()["state"] == "bf16"
    )


@given(models(), configurations())
def test_files_ask_for_it_by_deepspeeds_keys_and_by_that_of_the_block(model, planned):
    assume(why_not(model, planned) is None and not planned.micro_batch_outer)
    config = json.loads(json.dumps(ds_config(model, planned)))
    halved = planned.state == "bf16"
    assert config["bf16"] == {"enabled": True, **(KEYS if halved else {})}
    assert read_block(config).stochastic_rounding is halved


def test_the_launch_line_says_which_optimizers_it_takes():
    assert "Its optimizer is Adam or AdamW of torch." in launch_script(MODEL, ON_HOST, CARD)
    assert "optimizer" not in launch_script(MODEL, in_fp32(ON_HOST), CARD)


@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_megatrons_own_loop_has_none_of_it(state):
    flags = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128"
    model = model_of_flags("m", f"{flags} --num-experts 8 --moe-router-topk 2")
    of = Configuration(2, 1, 1, 1, 4, zero_stage=1, state=state)
    assert why_not(model, in_fp32(of)) is None
    assert f"state is '{state}', which Megatron-LM's training loop, for m, does not know" in why_not(model, of)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"state": "fp16"}, "state is 'fp16'; use one of fp32, bf16"),
        ({"zero_stage": 0}, "state is 'bf16'.* but zero_stage is 0"),
        ({"micro_batch_outer": True}, "state is 'bf16'.* and micro_batch_outer True; use 'fp32'"),
    ],
)
def test_what_no_engine_has_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(ON_DEVICE, **changes)


def written(of):
    """Returns a small Llama with the configuration that the planner writes."""
    case = Case("Llama", of, True)
    return case, {**config_of(case), "bf16": ds_config(case.model, of)["bf16"]}


SMALL = Configuration(2, 2, 1, 4, 4, zero_stage=3, schedule="layered", chunks_per_rank=LAYERS // 2, state="bf16")
TOLD = {
    "on the host": replace(SMALL, offload="parameters"),
    "one rank, optimizer on the host": replace(
        SMALL, data_ranks=1, pipeline_ranks=1, chunks_per_rank=LAYERS, offload="optimizer"
    ),
    "on the device": replace(SMALL, zero_stage=1, recompute="none"),
    "1f1b": replace(SMALL, zero_stage=1, schedule="1f1b", chunks_per_rank=1),
    "rounded travel": replace(SMALL, weight_bits=8, gradient_bits=8),
}
ON_DISK = [
    replace(SMALL, state=state, offload=offload, on_disk=True)
    for state in ("fp32", "bf16")
    for offload in ("parameters", "optimizer")
]


def explained(folder, of, config):
    """Returns what ``--explain`` says of every rank of a written configuration."""
    (folder / "script.py").write_text(SCRIPT)
    words = ["ds_lgamp", "run", "--explain", "--json", "--ranks", str(of.gpus), str(folder / "script.py")]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = run_module([*words, json.dumps(config)], folder, environment)
    assert ended.status == 0, ended.complaints
    return json.loads(ended.output)["ranks"]


@pytest.mark.parametrize("name", slow_except([*TOLD][:1], [*TOLD]))
def test_memory_is_what_explain_says_of_the_written_configuration(tmp_path, name):
    of = TOLD[name]
    case, config = written(of)
    for rank, told in enumerate(explained(tmp_path, of, config)):
        held = followed(case.model, of, rank, replace(default_software(of), all_to_all=True))
        kinds = ("weights", "master_weights", "optimizer_state", "resident_weights", "gradients", "gradient_buffers")
        for kind in (*kinds, "loaded_weights", "update"):
            assert told["memory"][kind] == getattr(held, kind), kind
        assert told["memory"]["host"] == (None if held.host is None else vars(held.host))


@pytest.mark.parametrize("of", slow_except([ON_DISK[0]], ON_DISK), ids=describe)
def test_memory_beside_a_disk_is_what_explain_says_of_the_written_configuration(tmp_path, of):
    case, config = written(of)
    for rank, told in enumerate(explained(tmp_path, of, config)):
        needed = of_rank(case.model, of, replace(default_software(of), all_to_all=True), rank)
        assert (needed.host, needed.disk) == (told["memory"]["host"]["peak"], told["disk"]["held"])


@pytest.mark.slow
def test_a_training_takes_the_memory_that_the_planner_tells_to_half_a_percent():
    """Of an update nothing stays but its random numbers, which take a quarter to a half of it here."""
    trainings = [written(of) for of in (TOLD["on the device"], TOLD["1f1b"])]
    for (case, _), measured in zip(trainings, zip(*run_on_ranks(4, measure_all_on_rank, trainings, seconds=600))):
        software = replace(default_software(case.configuration), all_to_all=True)
        told = memory(case.model, case.configuration, software)
        assert told.total == pytest.approx(max(measured), rel=0.005), case
