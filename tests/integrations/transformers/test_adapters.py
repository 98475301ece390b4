"""Adapters of peft and activation checkpointing of transformers, layer by layer."""

import logging

import peft
import pytest

from ds_lgamp.config import ConfigError
from tests.integrations.transformers.by_hand import assert_same, computed_by, in_layers, layers_of, whole
from tests.integrations.transformers.models import make, micro_batch

ADAPTERS = {
    "in blocks": {},
    "and on the head": {"target_modules": ["q_proj", "lm_head"]},
    "and the head as a whole": {"modules_to_save": ["lm_head"]},
    "and on the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_adapters_train_and_the_rest_stays_frozen(case):
    model = peft.get_peft_model(make("Llama"), peft.LoraConfig(r=2, init_lora_weights=False, **ADAPTERS[case]))
    batch = micro_batch(0, 0, 0)
    expected = whole(model, batch)
    assert all("lora" in name or "modules_to_save" in name for name in expected.gradients)
    assert_same(expected, in_layers(model, batch))


def test_a_prefix_of_keys_and_values_is_refused():
    config = peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="its blocks get a cache of keys and values"):
        layers_of(peft.get_peft_model(make("Llama"), config))


BLOCK_LISTS = {"GPT-2": "transformer.h", "MPT": "transformer.blocks"}


@pytest.mark.parametrize("name", BLOCK_LISTS)
def test_the_models_own_checkpointing_is_switched_off_and_that_is_said_once(name, caplog):
    model, batch = make(name).train(), micro_batch(0, 0, 0)
    # The name before transformers 5 is the second one.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    expected = whole(model, batch)
    enable()
    with caplog.at_level(logging.WARNING, "ds_lgamp"):
        layers = layers_of(model)
        enable()
        layers.arguments((), batch)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert sum("ds_lgamp.recompute decides" in record.message for record in caplog.records) == 1
    enable()
    layers, forwards = layers_of(model), []
    next(model.get_submodule(BLOCK_LISTS[name])[-1].children()).register_forward_hook(lambda *_: forwards.append(1))
    assert_same(expected, computed_by(layers, model, batch))
    assert len(forwards) == 1
