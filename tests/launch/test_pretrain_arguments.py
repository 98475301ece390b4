"""Megatron-LM's flags of launch/pretrain_gpt.py set the model and DeepSpeed's configuration."""

import importlib
import json

import pytest
import torch

from testing import ROOT

LAUNCH = ROOT / "launch"


@pytest.fixture
def arguments(monkeypatch):
    monkeypatch.syspath_prepend(LAUNCH)
    return importlib.import_module("arguments")


@pytest.fixture
def parse(arguments, tmp_path):
    """Parses the flags in a text, for a run whose JSON holds ``config``."""
    for suffix in (".bin", ".idx", ".tokenizer.json"):
        (tmp_path / f"data{suffix}").touch()

    def parsed(text, config=None):
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps(config or {}))
        files = ["--data-path", str(tmp_path / "data"), "--deepspeed_config", str(path)]
        return arguments.parse_arguments(None, [*text.split(), *files])

    return parsed


MODELS = {
    "": {
        "ffn_hidden_size": 512,
        "num_query_groups": 4,
        "kv_channels": 32,
        "normalization": "LayerNorm",
        "layernorm_epsilon": 1e-5,
        "qk_layernorm": False,
        "add_bias_linear": True,
        "init_method_std": 0.02,
        "gated_linear_unit": False,
        "activation_func": torch.nn.functional.gelu,
    },
    "--group-query-attention": {"num_query_groups": 1},
    "--group-query-attention --num-query-groups 2 --kv-channels 8": {"num_query_groups": 2, "kv_channels": 8},
    "--normalization RMSNorm --norm-epsilon 1e-6": {"normalization": "RMSNorm", "layernorm_epsilon": 1e-6},
    "--qk-layernorm --disable-bias-linear": {"qk_layernorm": True, "add_bias_linear": False},
    "--init-method-std 0.006 --ffn-hidden-size 96": {"init_method_std": 0.006, "ffn_hidden_size": 96},
    "--swiglu": {
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "ffn_hidden_size": 320,
    },
    "--swiglu --ffn-hidden-size 344": {"gated_linear_unit": True, "ffn_hidden_size": 344},
}


@pytest.mark.parametrize("flags", MODELS)
def test_flags_describe_the_model(flags, arguments, parse):
    config = arguments.transformer_config(parse(flags))
    assert {key: getattr(config, key) for key in MODELS[flags]} == MODELS[flags]


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ("", 384),
        ("--tensor-model-parallel-size 2", 512),
        ("--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 1", 302),
        ("--make-vocab-size-divisible-by 7", 301),
    ],
)
def test_the_vocabulary_is_padded_for_the_tensor_parallel_ranks(flags, size, arguments, parse):
    assert arguments.padded_vocabulary(301, parse(flags)) == size


@pytest.mark.slow
def test_squared_relu_is_megatrons(arguments, parse):
    activation = arguments.transformer_config(parse("--squared-relu")).activation_func
    assert activation(torch.tensor([-2.0, 3.0])).tolist() == [0.0, 9.0]


WARMUP = {"warmup_num_steps": 5, "warmup_type": "linear"}
SCHEDULERS = {
    "": {"type": "WarmupLR", "params": WARMUP},
    "--lr-decay-style linear --train-iters 40": {
        "type": "WarmupDecayLR",
        "params": {**WARMUP, "total_num_steps": 40, "warmup_max_lr": 1e-3},
    },
    "--lr-decay-style cosine --lr-decay-iters 30 --lr 0.01 --min-lr 0.001": {
        "type": "WarmupCosineLR",
        "params": {**WARMUP, "total_num_steps": 30, "cos_min_ratio": 0.1},
    },
}


@pytest.mark.parametrize("flags", SCHEDULERS)
def test_flags_choose_the_scheduler(flags, arguments, parse):
    assert arguments.deepspeed_config(parse(flags))["scheduler"] == SCHEDULERS[flags]


def test_the_scheduler_ends_at_the_optimizers_own_rates(arguments, parse):
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}
    decays = {"linear": ("warmup_max_lr", 0.5), "cosine --min-lr 0.1": ("cos_min_ratio", 0.2)}
    for style, (key, value) in decays.items():
        made = arguments.deepspeed_config(parse(f"--lr-decay-style {style}", adam))
        assert made["scheduler"]["params"][key] == value and made["optimizer"] == adam["optimizer"]


@pytest.mark.parametrize("iterations", [0, 1])
def test_a_shorter_warm_up_than_deepspeeds_is_refused(iterations, arguments, parse):
    with pytest.raises(SystemExit, match=f"--lr-warmup-iters is {iterations}, but DeepSpeed's schedulers warm up over"):
        arguments.deepspeed_config(parse(f"--lr-warmup-iters {iterations}"))
    own = {"scheduler": {"type": "OneCycle"}}
    assert arguments.deepspeed_config(parse(f"--lr-warmup-iters {iterations}", own))["scheduler"] == own["scheduler"]


def test_flags_set_the_options_of_the_optimizer(arguments, parse):
    flags = "--adam-beta1 0.8 --adam-beta2 0.95 --adam-eps 1e-6 --weight-decay 0.1 --lr 0.02"
    params = arguments.deepspeed_config(parse(flags))["optimizer"]["params"]
    expected = {"lr": 0.02, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1, "torch_adam": True}
    assert params == expected


def test_precision_comes_from_the_flags_where_the_json_leaves_it_out(arguments, parse):
    for precision in ("bf16", "fp16"):
        assert arguments.deepspeed_config(parse(f"--{precision}"))[precision] == {"enabled": True}
    config = {"bf16": {"enabled": False}}
    made = arguments.deepspeed_config(parse("--fp16", config))
    assert made["bf16"] == config["bf16"] and "fp16" not in made


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--num-query-groups 2", "--num-query-groups needs --group-query-attention"),
        (
            "--num-attention-heads 3",
            "--hidden-size 128 is no multiple of --num-attention-heads 3; change one of them, or",
        ),
        ("--seq-length 64 --max-position-embeddings 32", "--max-position-embeddings 32 is less than --seq-length 64"),
        ("--swiglu --squared-relu", "--swiglu and --squared-relu are both given"),
        ("--min-lr 0.1", "--min-lr needs --lr-decay-style cosine, not constant"),
        ("--bf16 --fp16", "--bf16 and --fp16 are both given"),
        ("--save-interval 2", "--save-interval needs --save"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, words, parse, capsys):
    with pytest.raises(SystemExit):
        parse(flags)
    assert words in " ".join(capsys.readouterr().err.split())


def test_heads_of_another_size_and_more_rotary_positions_are_not_refused(parse):
    parse("--num-attention-heads 3 --kv-channels 16")
    parse("--position-embedding-type rope --seq-length 64 --max-position-embeddings 32")
