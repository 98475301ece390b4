"""Models by name, from a config.json and from flags."""

import json

import pytest

from ds_lgamp.planner.model import Model
from ds_lgamp.planner.models import NAMES, model_of_flags, read_model
from ds_lgamp.planner.transformers_config import model_of_config

FLAGS = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --vocab-size 50257"


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt3-175b", 175), ("gpt-530b", 530), ("megatron-1t", 1008), ("llama-8b", 8.03), ("llama-70b", 70.6)],
)
def test_a_name_has_the_parameters_that_its_source_tells(name, billions):
    assert read_model(name).parameters == pytest.approx(billions * 1e9, rel=0.01)


def test_every_name_is_a_model():
    assert [read_model(name).name for name in NAMES] == list(NAMES)


@pytest.mark.parametrize("size", [32, 160])
def test_the_x_family_has_heads_of_its_size_and_twelve_times_its_fifth_power_of_parameters(size):
    model = read_model(f"x{size}")
    assert (model.layers, model.attention_heads, model.head_size, model.sequence_length) == (
        size,
        size,
        size,
        16 * size,
    )
    assert model.layers * model.layer_parameters == pytest.approx(12 * size**5, rel=0.01)


def test_a_given_length_replaces_that_of_the_source(tmp_path):
    path = tmp_path / "flags.txt"
    path.write_text(FLAGS.replace(" --seq-length", " \\\n  --seq-length") + "  # a comment")
    for source in ("gpt3-175b", "x32", FLAGS, str(path)):
        assert read_model(source, 512).sequence_length == 512
    assert read_model(str(path)) == read_model(FLAGS).__class__(**{**vars(read_model(FLAGS)), "name": "flags"})


@pytest.mark.parametrize("text", ["{", "[]", None])
def test_what_is_no_model_is_refused_with_the_names_that_are(tmp_path, text):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match="model is '.*config.json'"):
        read_model(str(path))


def test_a_config_is_named_after_its_folder(tmp_path):
    (tmp_path / "small").mkdir()
    path = tmp_path / "small" / "config.json"
    path.write_text(json.dumps(config()))
    assert read_model(str(path)).name == "small"


def config(**changes) -> dict:
    """A Llama as transformers writes it, but for keys that do not matter."""
    keys = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 131072,
    }
    return {key: value for key, value in {**keys, **changes}.items() if value != "absent"}


def test_training_is_not_as_long_as_the_longest_context():
    assert model_of_config("m", config()).sequence_length == 8192
    assert model_of_config("m", config(max_position_embeddings=2048)).sequence_length == 2048
    assert model_of_config("m", config(), 16384).sequence_length == 16384


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "t5"}, "model_type is 't5'; the planner reads bert, deepseek_v3"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"num_hidden_layers": -3}, "num_hidden_layers is -3"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True"),
        ({"num_attention_heads": 5}, "key_value_heads is 2; it must divide the 5"),
        (
            {"model_type": "gpt_neox", "num_attention_heads": 5},
            "attention heads is 5; it must divide the hidden size 64",
        ),
        (
            {"model_type": "llama", "num_hidden_layers": 10**6},
            r"layers is 1000000 \(num_hidden_layers .* takes 500 at most",
        ),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]; the planner reads bert"),
        ({"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 32}, "word_embed_proj_dim is 32"),
        ({"model_type": "gpt_oss", "num_local_experts": 4}, "head_dim is missing"),
        (
            {"model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 16, "layer_types": ["full_attention"]},
            r"layer_types is \['full_attention'\]; name sliding_attention or full_attention for each of 3 layers",
        ),
        ({"model_type": "mixtral", "num_local_experts": 1}, "num_local_experts is 1, of which the planner does not"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 4, "first_k_dense_replace": -1}, "dense_replace is -1"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    ],
)
def test_a_key_that_is_missing_or_not_understood_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        model_of_config("m", config(**changes))


def test_a_file_of_flags_with_an_open_quote_is_named(tmp_path):
    path = tmp_path / "flags.txt"
    path.write_text(f'{FLAGS} --data-path "here')
    with pytest.raises(ValueError, match="model is '.*flags.txt', where a quote among the flags is not closed; close"):
        read_model(str(path))


def test_flags_of_a_gpt_are_the_gpt_of_the_paper():
    model = model_of_flags("m", FLAGS)
    # 50257 words in multiples of 128
    assert model == Model.gpt("m", 24, 1024, 16, 2048, 50304)


def test_flags_of_a_llama_are_the_llama():
    flags = (
        "--num-layers=32 --hidden-size=4096 --num-attention-heads=32 --ffn-hidden-size=14336 --seq-length=8192 "
        "--vocab-size=128256 --group-query-attention --num-query-groups=8 --swiglu --normalization RMSNorm "
        "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --bf16"
    )
    llama = read_model("llama-8b")
    assert model_of_flags("llama-8b", flags) == llama


@pytest.mark.parametrize("source", ["gpt3-175b", FLAGS])
def test_sequences_are_no_longer_than_learned_positions(source):
    assert read_model(source, 1024).sequence_length == 1024
    with pytest.raises(ValueError, match="sequence_length is 4096, but .* has 2048 learned positions"):
        read_model(source, 4096)


def test_norms_and_linear_layers_may_differ_in_biases():
    mixed = model_of_flags("m", f"{FLAGS} --normalization RMSNorm")
    plain = model_of_flags("m", FLAGS)
    # Two norms a layer and the last one lose their biases.
    assert plain.parameters - mixed.parameters == (2 * 24 + 1) * 1024


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (FLAGS.replace("--num-layers 24", ""), "--num-layers is missing"),
        (FLAGS.replace(" 24", " many"), "--num-layers is 'many'"),
        (FLAGS.replace("16", "15"), "--num-attention-heads is 15; it must divide the --hidden-size 1024"),
        (f"{FLAGS} --multi-latent-attention", "--multi-latent-attention changes the model"),
        (f"{FLAGS} --moe-layer-freq 2", "--moe-layer-freq changes the model"),
    ],
)
def test_a_flag_that_is_missing_or_not_understood_is_named(flags, message):
    with pytest.raises(ValueError, match=message):
        model_of_flags("m", flags)
