"""A model computed layer by layer equals the model, whatever its architecture."""

import pytest
import torch

from ds_lgamp.config import ConfigError
from tests.integrations.transformers.by_hand import assert_same, in_layers, layers_of, whole
from tests.integrations.transformers.models import ARCHITECTURES, make, micro_batch
from tests.integrations.transformers.planned import model_with_plan, planned_configs
from tests.slow import slow_except

DEFAULT = ["GPT-2", "Gemma 3", "BLOOM", "DistilBERT", "Falcon", "Mixtral"]
COMPUTING_WITH_MORE = "computes with what a block returned beside hidden states"
DEPENDING = "another tensor that depends on parameters"
REFUSED = {
    "embedding_gemma2_text": DEPENDING,
    "gemma4_text": DEPENDING,
    "glm_moe_dsa": COMPUTING_WITH_MORE,
    "hrm_text": "'model.z_L_init' is in no module beside the blocks",
    "hy_v4": COMPUTING_WITH_MORE,
    "mistral_large4_text": COMPUTING_WITH_MORE,
}
"""Why architectures with a plan are refused, by model type."""


@pytest.mark.parametrize("name", slow_except(DEFAULT, list(ARCHITECTURES)))
def test_output_and_gradients_are_those_of_the_model(name):
    model, batch = make(name), micro_batch(0, 0, 0)
    assert_same(whole(model, batch), in_layers(model, batch))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_architecture_with_a_pipeline_plan_is_equal_or_refused(part):
    """Those that do not run when made small automatically do not count; most are parts of composite models."""
    refused, equal = {}, []
    for config in planned_configs()[part::4]:
        try:
            model, batch = model_with_plan(config)
            expected = whole(model, batch)
        except Exception:
            continue
        try:
            assert_same(expected, in_layers(model, batch))
            equal.append(config.model_type)
        except ConfigError as error:
            refused[config.model_type] = str(error)
        except Exception as error:
            raise AssertionError(config.model_type) from error
    assert len(equal) >= 20
    print(f"equal: {equal}\nrefused: {refused}")
    for model_type, sentence in refused.items():
        assert model_type in REFUSED and REFUSED[model_type] in sentence


REFUSED_MODELS = {
    "T5": ("T5Config", "AutoModelForSeq2SeqLM", {}, "T5ForConditionalGeneration has an encoder and a decoder"),
    "BART": ("BartConfig", "AutoModelForSeq2SeqLM", {}, "BartForConditionalGeneration has an encoder and a decoder"),
    "layerdrop": ("OPTConfig", None, {"layerdrop": 0.1}, "layerdrop of OPTForCausalLM's config is 0.1; .* set it to 0"),
    "router logits": ("MixtralConfig", None, {"output_router_logits": True}, "output_router_logits of Mixtral"),
    "hidden states": ("GPT2Config", None, {"output_hidden_states": True}, "output_hidden_states of GPT2"),
    "tuples": ("GPT2Config", None, {"return_dict": False}, "return_dict of GPT2LMHeadModel's config is False"),
    "one block many times": ("AlbertConfig", "AutoModelForMaskedLM", {}, "AlbertForMaskedLM has no list of blocks"),
    "between blocks": ("Gemma4TextConfig", None, {}, "another tensor that depends on parameters"),
}


@pytest.mark.parametrize("case", REFUSED_MODELS)
def test_a_model_that_cannot_be_split_is_refused_by_name(case):
    config, head, settings, sentence = REFUSED_MODELS[case]
    with pytest.raises(ConfigError, match=sentence):
        layers_of(make(config, head, **settings))


def test_a_module_that_runs_on_both_sides_of_the_blocks_is_refused():
    model = make("Llama")
    model.lm_head.register_forward_hook(
        lambda _, __, logits: logits + model.model.embed_tokens(torch.zeros(1).long()).sum()
    )
    with pytest.raises(ConfigError, match="'model.embed_tokens' runs ahead of the blocks and again behind them"):
        layers_of(model)


def test_blocks_that_share_parameters_are_refused():
    model = make("Llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with pytest.raises(ConfigError, match="its blocks share parameters"):
        layers_of(model)


def test_dummy_inputs_that_do_not_suffice_are_named(monkeypatch):
    model = make("Llama")
    monkeypatch.setattr(type(model), "dummy_inputs", {"input_ids": torch.tensor([[1000]])})
    with pytest.raises(ConfigError, match="its forward failed with IndexError on its dummy_inputs"):
        layers_of(model)


def test_flash_attention_is_replaced_for_the_survey_only(monkeypatch):
    model = make("Llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    layers_of(model)
    assert model.config._attn_implementation == "flash_attention_2"
