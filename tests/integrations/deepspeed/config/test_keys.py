"""The table of DeepSpeed's keys: the keys that pass, the keys that are refused, and the match with the installed
DeepSpeed."""

import subprocess
import sys

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.deepspeed.config.check_keys import as_deepspeed_reads, check_keys, without_auto
from ds_lgamp.integrations.deepspeed.config.keys import (
    AMOUNT,
    COUNT,
    GROUP,
    INDEX,
    INTERVAL,
    KEYS,
    NAME,
    OBJECT,
    SHARE,
    STAGE,
    SWITCH,
    VALUES,
    Treatment,
)
from tests.integrations.deepspeed.config.installed_keys import names_of_deepspeed

NAMES = {key.name for key in KEYS}
REFUSED = [key for key in KEYS if key.treatment is Treatment.REFUSED]
FREE_FORM = {"optimizer.params", "scheduler.params"}
"""Keys inside these are arguments of the optimizer's or the scheduler's class."""
COUNTS = {
    "aio": 6,
    "autotuning": 21,
    "checkpoint.writer": 7,
    "compile": 18,
    "data_efficiency": 20,
    "flops_profiler": 7,
    "hybrid_engine": 7,
    "tensor_parallel": 21,
    "weight_quantization": 6,
    "zero_optimization.zenflow": 10,
}
"""The number of keys in each section that the table treats as a whole.

If a number changes, look at the new key. It needs a row if it acts while the section's switch is off.
"""
ODD = 987
"""A value that no key has by default."""
SAMPLES = {
    **{"": ODD, COUNT: 3, INDEX: 0, AMOUNT: 0.5, SWITCH: True, NAME: "Adam", OBJECT: {"lr": 1.0}, STAGE: 2},
    INTERVAL: float("inf"),
    GROUP: -1,
    SHARE: 0.5,
}
WRONG = {
    COUNT: [0, 1.0, "1", True],
    INDEX: [-1, "1", False],
    AMOUNT: [-0.5, float("inf"), "1.0", True],
    SWITCH: ["true", 1],
    NAME: [3],
    OBJECT: [[], "lr"],
    STAGE: [4, "3", True],
    INTERVAL: [0, 1.5, "1", True],
    GROUP: [0, -2, "2", True],
    SHARE: [-0.5, 1.5, "1", True],
}


def nested(name, value):
    """Makes a configuration with one key."""
    for part in reversed(name.removesuffix(".*").split(".")):
        value = {part: value}
    return value


OWN = "Rename it if it is a key of your own"


def refusal(config):
    with pytest.raises(ConfigError) as refused:
        check_keys(config)
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_every_kind_of_value_is_sampled():
    assert SAMPLES.keys() - {""} == WRONG.keys() == VALUES.keys()


def test_a_key_has_one_row():
    assert len(NAMES) == len(KEYS)


@pytest.mark.parametrize("key", REFUSED, ids=lambda key: key.name)
def test_refusals_name_key_value_and_fix_and_harmless_values_pass(key):
    name = key.name.removesuffix(".*")
    message = refusal(nested(name, ODD))
    assert message.startswith(f"{name} is {ODD}: {key.note}") and "remove it" in message
    # A whole section that is null has its own error.
    for value in () if key.name.endswith(".*") else (None, *key.harmless):
        assert check_keys(nested(name, value)) == []


@pytest.mark.parametrize("key", [key for key in KEYS if key.treatment is Treatment.HONOURED], ids=lambda key: key.name)
def test_honoured_keys_pass_unmentioned(key):
    for value in key.harmless or ([] if key.name.endswith(".*") else [SAMPLES[key.takes]]):
        assert check_keys({"steps_per_print": 1} | nested(key.name, value)) == []


@pytest.mark.parametrize("key", [key for key in KEYS if key.takes], ids=lambda key: key.name)
def test_a_value_of_another_kind_is_refused(key):
    for value in WRONG[key.takes]:
        assert refusal(nested(key.name, value)) == f"{key.name} is {value!r}; write {key.takes}"


@pytest.mark.parametrize(
    ("config", "reported"),
    [
        ({}, []),
        ({"zero_optimization": True, "allgather_size": 5}, ["allgather_size"]),
        (
            {"zero_optimization": {"overlap_comm": True, "stage": 3}, "prescale_gradients": False},
            ["prescale_gradients", "zero_optimization.overlap_comm"],
        ),
        ({"prescale_gradients": None, "zero_optimization": {"overlap_comm": None}}, []),
        ({"aio": {"block_size": 1, "queue_depth": 2}}, ["aio"]),
        ({"bfloat16": {"immediate_grad_update": True}}, ["bfloat16.immediate_grad_update"]),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False, "fast_init": True}}},
            ["zero_optimization.offload_optimizer.pin_memory", "zero_optimization.offload_optimizer.fast_init"],
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "nvme_path": "/local"}}},
            ["zero_optimization.offload_optimizer.nvme_path"],
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/local", "buffer_count": 5}}},
            ["zero_optimization.offload_optimizer.buffer_count"],
        ),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8, "mics_shard_size": 8}}, []),
        ({"zero_optimization": {"stage": 2, "mics_shard_size": 8}}, ["zero_optimization.mics_shard_size"]),
        (
            {"zero_optimization": {"stage": 1, "zero_hpz_partition_size": 8, "mics_shard_size": -1}},
            ["zero_optimization.zero_hpz_partition_size"],
        ),
    ],
)
def test_meaningless_keys_are_listed_in_the_order_of_the_table(config, reported):
    assert check_keys(config) == reported


@pytest.mark.parametrize(
    "config",
    [
        {"fp16": {"enabled": False, "loss_scale": 0, "hysteresis": 2}},
        {"zero_optimization": {"offload_param": {"device": "none", "pin_memory": True}}},
        {"flops_profiler": {"enabled": False, "profile_step": 3}},
        {"tensor_parallel": {"autotp_size": 0, "tp": {"tp_size": 1}}},
        {"data_efficiency": {"enabled": False, "data_sampling": {"num_epochs": 3}}},
        {"weight_quantization": {"enabled": False, "num_bits": 4}},
        {"compile": {"debug_log": True}},
    ],
)
def test_keys_beside_a_switch_that_is_off_are_not_mentioned(config):
    assert check_keys(config) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"zero_optimization": {"offload_param": {"device": "CPU"}}},
            "zero_optimization.offload_param.device is 'CPU', but ds_lgamp takes cpu or nvme (with offload",
        ),
        ({"zero_optimization": {"zenflow": {}}}, "zero_optimization.zenflow is {}: "),
        ({"weight_quantization": {"num_bits": 4}}, "weight_quantization is {'num_bits': 4}: "),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, "fp16.fp16_master_weights_and_grads is True: "),
        ({"elasticity": {"enabled": False}}, "elasticity is {'enabled': False}: DeepSpeed has removed it"),
        (
            {"data_types": {"grad_accum_dtype": "int8"}},
            "data_types.grad_accum_dtype is 'int8', but ds_lgamp takes fp32, fp16 or bf16; use one",
        ),
        (
            {"fp16": {"enabled": True}, "bfloat16": {"enabled": True}},
            "fp16.enabled and bfloat16.enabled are True; set one of them to false",
        ),
        (
            {"data_efficiency": {"enabled": False, "data_routing": {"random_ltd": {"enabled": True}}}},
            "data_efficiency.data_routing.random_ltd.enabled is True: ",
        ),
        ({"zero_optimization": 3}, "zero_optimization is 3; it must be an object such as {}"),
        ({"bf16": True}, "bf16 is True; it must be an object such as {}"),
        ({"checkpoint": {"parallel_write": []}}, "checkpoint.parallel_write is []; it must be an object such as {}"),
    ],
)
def test_what_is_in_force_is_refused(config, message):
    assert refusal(config).startswith(message)


@pytest.mark.parametrize(
    ("config", "name", "nearest"),
    [
        ({"zero_optimization": {"overlap_com": 1}}, "zero_optimization.overlap_com", "overlap_comm? Or remove it"),
        ({"bfloat16": {"enable": True}}, "bfloat16.enable", "enabled? Or remove it"),
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation", f"zero_optimization? {OWN}"),
        ({"train_batchsize": None}, "train_batchsize", f"train_batch_size? {OWN}"),
    ],
)
def test_typos_are_refused_with_the_nearest_key(config, name, nearest):
    assert refusal(config) == f"{name} is no known key; did you mean {nearest}"


def test_a_key_that_resembles_none_is_no_typo():
    assert refusal({"optimizer": {"comment": 1}}) == "optimizer.comment is no known key; remove it"


@pytest.mark.parametrize("name", ["fp8", "fp4", "nvfp4", "fp8_format", "Float8", "zero_optimization.fp8"])
def test_eight_and_four_bits_are_refused_unless_they_are_off(name):
    for value in (True, "hybrid", {}, {"enabled": True}):
        message = refusal(nested(name, value))
        assert message.startswith(f"{name} is {value!r}, but DeepSpeed has no such key") and "remove it" in message
    for value in (None, False, {"enabled": False}):
        if "." not in name:
            assert check_keys(nested(name, value)) == []


def test_the_users_own_keys_pass():
    assert check_keys({"experiment": {"overlap_com": "auto"}, "ds_lgamp": {"shedule": 1}}) == []


@pytest.mark.parametrize(
    "name",
    ["train_batch_size", "gradient_clipping", "optimizer.params.lr", "scheduler.params.warmup"],
)
def test_auto_is_refused_where_deepspeed_cannot_fill_it_in(name):
    message = refusal(nested(name, "auto"))
    assert message.startswith(f'{name} is "auto", ') and "write a value" in message


@pytest.mark.parametrize(
    "name",
    ["zero_optimization.sub_group_size", "zero_optimization.offload_param.device", "bf16.enabled", "fp16.enabled"],
)
def test_auto_leaves_the_default_where_deepspeed_drops_it(name):
    section = name.partition(".")[0]
    read = DeepSpeedConfig({"train_batch_size": 1, **nested(name, "auto")})
    without = DeepSpeedConfig({"train_batch_size": 1, **as_deepspeed_reads(nested(name, "auto"))})
    assert check_keys(nested(name, "auto")) == []
    for config in ("zero_config", "bfloat16_config", "float16_config"):
        assert getattr(read, config) == getattr(without, config)
    assert "auto" not in str(as_deepspeed_reads(nested(name, "auto"))[section])


@pytest.mark.parametrize("name", ["data_types.keep_in_fp32_modules", "pipeline.stages", "expert_parallel.top_k"])
def test_auto_passes_where_deepspeed_takes_it(name):
    check_keys(nested(name, "auto"))


def test_the_table_needs_neither_torch_nor_deepspeed():
    code = (
        "import sys, ds_lgamp.integrations.deepspeed.config.check_keys\n"
        "print({'torch', 'deepspeed'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def has_row(name):
    """Returns whether the table has a row for a key or a section."""
    sections = name.split(".")
    return (
        name in NAMES
        or name.rpartition(".")[0] in FREE_FORM
        or any(".".join([*sections[:depth], "*"]) in NAMES for depth in range(1, len(sections) + 1))
        or any(row.startswith(f"{name}.") for row in NAMES)
    )


def test_the_installed_deepspeed_has_no_key_that_the_table_lacks():
    assert sorted(name for name in names_of_deepspeed() if not has_row(name)) == []


def test_the_table_names_no_key_that_the_installed_deepspeed_lacks():
    rows = {name.removesuffix(".*") for name in NAMES} - {BLOCK}
    assert sorted(rows - names_of_deepspeed()) == []


def test_sections_treated_as_a_whole_have_the_keys_that_were_looked_at():
    names = names_of_deepspeed()
    wholes = {name.removesuffix(".*") for name in NAMES if name.endswith(".*")} - {"bfloat16"}
    assert {section: sum(name.startswith(f"{section}.") for name in names) for section in wholes} == COUNTS


def test_auto_values_are_left_out_except_those_that_deepspeed_understands():
    block = {"ds_lgamp": {"chunks_per_rank": 2}}
    config = {"train_batch_size": "auto", "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, **block}
    kept = {"pipeline": {"stages": "auto"}}
    assert without_auto({**config, **kept}) == {"zero_optimization": {"stage": 2}, **block, **kept}
