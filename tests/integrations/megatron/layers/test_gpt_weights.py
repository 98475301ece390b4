"""The names of weights in a pipeline and in Megatron-core's GPTModel, with PyTorch's parts and with Transformer
Engine's."""

import pytest

from ds_lgamp.config import ConfigError

PARTS = [
    f"{module}.{kind}"
    for module in (
        *("input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv"),
        *("pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2"),
    )
    for kind in ("weight", "bias")
]


@pytest.fixture(scope="module")
def gpt_weights():
    return pytest.importorskip("ds_lgamp.integrations.megatron.layers.gpt_weights")


def model(tied=False, layers=2):
    """Returns the names in a GPTModel, each with a number for a weight."""
    names = ["embedding.word_embeddings.weight", "embedding.position_embeddings.weight"]
    names += [f"decoder.layers.{layer}.{part}" for layer in range(layers) for part in PARTS]
    names += ["decoder.final_layernorm.weight", "decoder.final_layernorm.bias"]
    return {name: number for number, name in enumerate(names if tied else [*names, "output_layer.weight"])}


@pytest.mark.parametrize("tied", [True, False])
def test_weights_go_to_their_layers_and_come_back(gpt_weights, tied):
    state = model(tied)
    pipeline = gpt_weights.from_gpt_model(state)
    embedding = "tied_modules.word_embeddings" if tied else "0"
    assert pipeline[f"{embedding}.word_embeddings.weight"] == state["embedding.word_embeddings.weight"]
    assert pipeline["1.position_embeddings.weight"] == state["embedding.position_embeddings.weight"]
    assert pipeline["3.layer.mlp.linear_fc2.bias"] == state["decoder.layers.1.mlp.linear_fc2.bias"]
    assert pipeline["4.norm.bias"] == state["decoder.final_layernorm.bias"]
    assert tied or pipeline["5.output_layer.weight"] == state["output_layer.weight"]
    assert gpt_weights.to_gpt_model(pipeline) == state


def test_transformer_engine_has_norms_inside_linear_layers(gpt_weights):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    state = model()
    # With these names Megatron-core's own checkpoints fit both implementations.
    same = get_gpt_layer_local_spec().submodules.sharded_state_dict_keys_map
    fused = {}
    for name, number in state.items():
        for plain, engines in same.items():
            name = name.replace(f".{plain}", f".{engines}")
        fused[name] = number
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in fused

    pipeline = gpt_weights.from_gpt_model(state)
    assert gpt_weights.to_gpt_model(pipeline, "transformer_engine") == fused
    scales = {"decoder.layers.0.mlp.linear_fc1._extra_state": None}
    assert gpt_weights.from_gpt_model(fused | scales) == pipeline
    of_engine = gpt_weights.from_gpt_model(state, "transformer_engine")
    assert "2.layer.mlp.linear_fc1.layer_norm_bias" in of_engine
    assert gpt_weights.to_gpt_model(of_engine | {"2.layer.mlp.linear_fc1._extra_state": None}) == state


def without(weights, *beginnings):
    return {name: number for name, number in weights.items() if not name.startswith(beginnings)}


def with_experts(state, layers=1):
    """Returns the names of a model whose last ``layers`` layers have two experts each, and no biases in these."""
    for layer in range(2 - layers, 2):
        start = f"decoder.layers.{layer}.mlp."
        parts = [f"experts.local_experts.{number}.linear_fc{part}.weight" for number in range(2) for part in (1, 2)]
        state = without(state, f"{start}linear") | {f"{start}{part}": part for part in ("router.weight", *parts)}
    return state


def test_experts_keep_the_norm_ahead_of_them(gpt_weights):
    state = with_experts(model())
    pipeline = gpt_weights.from_gpt_model(state)
    assert pipeline["3.layer.mlp.experts.local_experts.1.linear_fc2.weight"].startswith("experts.local_experts.1.")
    assert gpt_weights.to_gpt_model(pipeline) == state
    fused = gpt_weights.to_gpt_model(pipeline, "transformer_engine")
    assert {name for name in fused if "norm" in name and ".layers." in name} == {
        f"decoder.layers.{layer}.{norm}{kind}"
        for layer, norms in enumerate(
            [
                ("self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_"),
                ("self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm."),
            ]
        )
        for norm in norms
        for kind in ("weight", "bias")
    }
    assert gpt_weights.from_gpt_model(fused) == pipeline


TO_PIPELINE = {
    "nothing": (lambda state: {}, "lack decoder.final_layernorm.weight"),
    "no first layer": (lambda state: without(state, "decoder.layers.0."), "lack decoder.layers.0.input_layernorm.bias"),
    "a layer without a matrix": (
        lambda state: without(state, "decoder.layers.1.mlp.linear_fc2.weight"),
        "lack decoder.layers.1.mlp.linear_fc2.weight",
    ),
    "a layer without a bias that another has": (
        lambda state: without(state, "decoder.layers.0.mlp.linear_fc1.bias"),
        "lack decoder.layers.0.mlp.linear_fc1.bias",
    ),
    "no embedding": (lambda state: without(state, "embedding.word"), "lack embedding.word_embeddings.weight"),
    "a router of experts": (
        lambda state: state | {"decoder.layers.0.mlp.router.weight": 0},
        "lack decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight",
    ),
    "one expert of several in one layer": (
        lambda state: without(with_experts(state, 2), "decoder.layers.1.mlp.experts.local_experts.1."),
        "lack decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight",
    ),
    "a matrix of shared experts in one layer": (
        lambda state: with_experts(state, 2) | {"decoder.layers.0.mlp.shared_experts.linear_fc1.weight": 0},
        "lack decoder.layers.1.mlp.shared_experts.linear_fc1.weight",
    ),
}
TO_MODEL = {
    "another layer in front": (
        lambda weights: {
            f"{int(index) + 1}.{rest}": number
            for index, rest, number in ((*name.split(".", 1), weight) for name, weight in weights.items())
        },
        "lack 0.word_embeddings.weight",
    ),
    "two final norms": (lambda weights: weights | {"9.norm.weight": 0}, "have 9.norm.weight left over"),
    "tied and not": (
        lambda weights: weights | {"tied_modules.word_embeddings.word_embeddings.weight": 0},
        "have 0.word_embeddings.weight left over",
    ),
    "no head": (lambda weights: without(weights, "5."), "lack 5.output_layer.weight"),
}


@pytest.mark.parametrize("case", TO_PIPELINE)
def test_a_state_that_is_no_whole_model_is_refused(case, gpt_weights):
    change, words = TO_PIPELINE[case]
    with pytest.raises(ConfigError, match=f"the weights {words}; take all weights of one GPT model,"):
        gpt_weights.from_gpt_model(change(model()))


@pytest.mark.parametrize("case", TO_MODEL)
def test_weights_that_are_no_whole_pipeline_are_refused(case, gpt_weights):
    change, words = TO_MODEL[case]
    with pytest.raises(ConfigError, match=f"the weights {words}; take all"):
        gpt_weights.to_gpt_model(change(gpt_weights.from_gpt_model(model())))
