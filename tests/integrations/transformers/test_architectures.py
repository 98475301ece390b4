"""A model computed layer by layer equals the model, whatever its architecture."""

from queue import SimpleQueue

import pytest
import torch
import transformers
from transformers.modeling_outputs import BaseModelOutputWithPast

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.split.call import Call
from ds_lgamp.integrations.transformers.models import without_cache
from tests.integrations.transformers.by_hand import (
    assert_equal,
    assert_same,
    computed_by,
    evaluated,
    in_layers,
    layers_of,
    whole,
)
from tests.integrations.transformers.models import ARCHITECTURES, make, micro_batch, micro_batch_of
from tests.integrations.transformers.planned import model_with_plan, planned_configs
from tests.slow import slow_except

DEFAULT = ["BLOOM", "DistilBERT", "Falcon", "BERT with choices"]
"""Others of different kinds train in tests of engines, of losses in pieces and of routers."""
REFUSED = {"hrm_text": "calls its blocks 'model.L_module.layers' without gradients, but"}
"""Why architectures with a plan are refused, by model type."""
NOT_MADE = set(
    "cohere_compass_text deepseek_ocr2_encoder deepseek_ocr2_text diffusion_gemma_text ernie4_5_vl_moe_text "
    "gemma3n_text glm5_next_text ministral qwen3_omni_moe_talker_code_predictor qwen3_omni_moe_talker_text "
    "t5_gemma_module t5gemma2_decoder t5gemma2_text voxtral_realtime_text".split()
)
"""Architectures with a plan that do not run when shrink.py makes them small; most are parts of composite models."""


@pytest.mark.parametrize("name", slow_except(DEFAULT, list(ARCHITECTURES)))
def test_output_and_gradients_are_those_of_the_model(name):
    model, batch = make(name), micro_batch_of(name, 0, 0, 0)
    assert_same(whole(model, batch), in_layers(model, batch))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_architecture_with_a_pipeline_plan_is_equal_or_refused(part):
    configs = planned_configs()[part::4]
    equal, refused, not_made = set(), {}, set()
    for config in configs:
        name = config.model_type
        try:
            model, batch = model_with_plan(config)
            expected = whole(model, batch)
        except Exception:
            not_made.add(name)
            continue
        try:
            layers = layers_of(model)
            assert_same(expected, computed_by(layers, model, batch))
            torch.manual_seed(1)
            with torch.no_grad():
                output = model(**batch, **without_cache(model))
            assert_equal(output, evaluated(layers, batch))
            equal.add(name)
        except ConfigError as error:
            refused[name] = str(error)
        except Exception as error:
            raise AssertionError(name) from error
    print(f"equal: {len(equal)} {sorted(equal)}\nrefused: {refused}\nnot made small: {sorted(not_made)}")
    names = {config.model_type for config in configs}
    assert refused.keys() == names & REFUSED.keys()
    assert all(REFUSED[name] in sentence for name, sentence in refused.items())
    assert not_made == names & NOT_MADE


REFUSED_MODELS = {
    "pictures without dummy inputs": (
        *("ViTConfig", "AutoModelForImageClassification", {}),
        "ViTForImageClassification takes pixel_values; set ds_lgamp.dummy_inputs to small arguments that it takes",
    ),
    "layerdrop": ("OPTConfig", None, {"layerdrop": 0.1}, "layerdrop of OPTForCausalLM's config is 0.1; .* set it to 0"),
    "hidden states": ("GPT2Config", None, {"output_hidden_states": True}, "output_hidden_states of GPT2"),
    "tuples": ("GPT2Config", None, {"return_dict": False}, "return_dict of GPT2LMHeadModel's config is False"),
    "one block many times": (
        "AlbertConfig",
        "AutoModelForMaskedLM",
        {},
        "AlbertForMaskedLM cannot be split .*: its forward called 4 of 1 blocks",
    ),
}


@pytest.mark.parametrize("case", REFUSED_MODELS)
def test_a_model_that_cannot_be_split_is_refused_by_name(case):
    config, head, settings, sentence = REFUSED_MODELS[case]
    with pytest.raises(ConfigError, match=sentence):
        layers_of(make(config, head, **settings))


HOOKED = {
    "a module runs on both sides": (
        *("lm_head", lambda model, logits: logits + model.model.embed_tokens(torch.zeros(1).long()).sum()),
        "'model.embed_tokens' runs before the blocks and again after them",
    ),
    "a parameter is read before the blocks without its module": (
        *("model.embed_tokens", lambda model, hidden: hidden + model.lm_head.weight.sum()),
        "reads a parameter of 'lm_head' before the blocks without calling it",
    ),
}
"""Hooks after modules, with which the model is refused."""


@pytest.mark.parametrize("case", HOOKED)
def test_what_belongs_to_both_sides_of_the_blocks_is_refused(case):
    path, hook, sentence = HOOKED[case]
    with pytest.raises(ConfigError, match=sentence):
        layers_of(hooked(path, hook))


def hooked(path, hook):
    """Makes a Llama in which ``hook`` changes what the module at this path returns."""
    model = make("Llama")
    model.get_submodule(path).register_forward_hook(lambda _, __, returned: hook(model, returned))
    return model


def test_a_parameter_that_is_read_after_the_blocks_alone_makes_both_ends_one_module():
    model, batch = make("Llama with a functional head"), micro_batch(0, 0, 0)
    first, *_, last = layers_of(model).modules
    assert first is last
    assert_same(whole(model, batch), in_layers(model, batch))


READS = {
    "a head": (lambda model, hidden: hidden + model.lm_head.weight.sum(), False),
    "the data type of a parameter": (lambda model, hidden: hidden.to(model.model.embed_tokens.weight.dtype), False),
    "the shape of a parameter": (lambda model, hidden: hidden / model.model.embed_tokens.weight.shape[0], True),
}
"""What is read after the blocks without a call, and whether that makes both ends one module: a shape is one of a
parameter's values."""


@pytest.mark.parametrize("case", READS)
def test_what_is_read_after_the_blocks_may_make_both_ends_one_module(case):
    hook, are_one = READS[case]
    first, *_, last = layers_of(hooked("model.norm", hook)).modules
    assert (first is last) == are_one


def test_what_a_hook_before_the_blocks_keeps_for_one_after_them_is_refused():
    model, seen = make("Llama"), {}
    model.model.embed_tokens.register_forward_hook(lambda _, __, embedded: seen.update(embedded=embedded))
    model.model.norm.register_forward_hook(lambda _, __, hidden: hidden + seen["embedded"])
    with pytest.raises(
        ConfigError, match="uses what 'model.embed_tokens' returned besides hidden states, but gets it from a hook"
    ):
        layers_of(model)


def passing_to_the_last(model, hidden, arguments):
    hidden, first = model.layers[0](hidden, **arguments)
    for layer in model.layers[1:]:
        hidden, _ = layer(hidden, extra=first if layer is model.layers[-1] else None, **arguments)
    return hidden


def counting_later(model, hidden, arguments):
    """Gives blocks what the block before the one before them returns besides hidden states."""
    extras = [None, None]
    for layer in model.layers:
        hidden, extra = layer(hidden, extra=extras[-2], **arguments)
        extras.append(extra)
    return hidden + torch.stack(extras[2:]).mean()


def skipping_one(model, hidden, arguments):
    for layer in model.layers[1:]:
        hidden = layer(hidden, **arguments)
    return hidden


ODD = {
    passing_to_the_last: (True, "a block gets what another one returned than the one right before it"),
    counting_later: (True, "a block gets what another one returned than the one right before it"),
    skipping_one: (False, "its forward called 3 of 4 blocks"),
}


@pytest.mark.parametrize("walk", ODD)
def test_a_forward_that_does_more_than_call_its_blocks_is_refused(walk):
    returns_more, sentence = ODD[walk]
    with pytest.raises(ConfigError, match=sentence):
        layers_of(with_walk(walk, returns_more))


def test_a_block_may_not_get_what_an_earlier_one_than_that_before_it_returned_with_later_arguments_either():
    def walk(model, hidden, arguments):
        later = hidden.shape[1] > 5
        return (passing_to_the_last if later else passing_more_on)(model, hidden, arguments)

    layers = layers_of(with_walk(walk, True))
    layers.calls.all = [Call(*layers.arguments((), {"input_ids": micro_batch(0, 0, 0)["input_ids"]}))]
    with pytest.raises(ConfigError, match="gets what a block returned that is not the one right before it"):
        layers.modules[0](layers.calls.current)


def passing_the_embedding(model, hidden, arguments):
    embedded = hidden
    for layer in model.layers:
        hidden = layer(hidden, embedded=embedded, **arguments)
    return hidden


def touching_the_last(model, hidden, arguments):
    """Computes with what the last block returns besides hidden states."""
    for layer in model.layers:
        hidden, extra = layer(hidden, **arguments)
    return hidden + extra.mean()


def adding_up(model, hidden, arguments):
    """Computes between blocks with what they return besides hidden states."""
    total = 0
    for layer in model.layers:
        hidden, extra = layer(hidden, **arguments)
        total = total + extra.square().mean()
    return hidden * total


def collecting(model, hidden, arguments):
    """Computes after the blocks with all that they return besides hidden states, and gives each that of the one before
    it."""
    extras = [None]
    for layer in model.layers:
        hidden, extra = layer(hidden, extra=extras[-1], **arguments)
        extras.append(extra)
    return hidden + torch.stack(extras[1:]).softmax(0)[0, ..., None]


def passing_more_on(model, hidden, arguments):
    """Passes what a block returns besides hidden states to the next one."""
    extra = None
    for layer in model.layers:
        hidden, extra = layer(hidden, extra=extra, **arguments)
    return hidden


@pytest.mark.parametrize(
    "walk",
    [passing_the_embedding, passing_more_on, touching_the_last, adding_up, collecting],
    ids=lambda walk: walk.__name__,
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_and_what_follows_them_may_get_more_than_hidden_states(walk, ranks):
    """What is computed before the blocks, and what blocks return."""
    model = with_walk(walk, returns_more=walk is not passing_the_embedding)
    batch = {"input_ids": micro_batch(0, 0, 0)["input_ids"]}
    layers = layers_of(model, pipeline_ranks=ranks)
    assert_same(whole(model, batch), computed_by(layers, model, batch))
    assert_equal(model.eval()(**batch, **without_cache(model)), evaluated(layers, batch))


def with_walk(walk, returns_more):
    """Makes a Llama that calls its blocks as ``walk`` does. They return a tuple if it ``returns_more``."""
    model = make("Llama")
    base = model.model

    class Block(type(base.layers[0])):
        def forward(self, hidden, extra=None, embedded=None, **arguments):
            hidden = hidden if embedded is None else hidden + embedded
            hidden = super().forward(hidden if extra is None else hidden * extra[..., None], **arguments)
            return (hidden, hidden.mean(-1)) if returns_more else hidden

    for layer in base.layers:
        layer.__class__ = Block

    def forward(input_ids=None, **_):
        hidden = base.embed_tokens(input_ids)
        places = torch.arange(hidden.shape[1])[None]
        arguments = {"position_ids": places, "position_embeddings": base.rotary_emb(hidden, places)}
        return BaseModelOutputWithPast(base.norm(walk(base, hidden, arguments)))

    base.forward = forward
    return model


def test_a_survey_leaves_the_model_and_its_generators_as_they_were():
    model = make("GPT-2 with dropout").train()
    model.lm_head.eval()
    stock = model.transformer.h[0].forward
    own = model.transformer.h[0].forward = lambda *positional, **named: stock(*positional, **named)
    before = torch.get_rng_state()
    training = {name: module.training for name, module in model.named_modules()}
    # What hooks have put into a list is taken back.
    seen = SimpleQueue()
    model.transformer.drop.register_forward_hook(lambda module, *_: seen.put(module.training))
    model.transformer.wte.register_forward_hook(lambda _, __, embedded: embedded + 0 * torch.rand(1))
    layers_of(model)
    assert {seen.get() for _ in range(seen.qsize())} == {False, True}
    assert {name: module.training for name, module in model.named_modules()} == training
    assert model.transformer.h[0].__dict__["forward"] is own
    assert all("forward" not in vars(block) for block in model.transformer.h[1:])
    assert torch.equal(torch.get_rng_state(), before)


def test_blocks_that_share_parameters_are_refused():
    model = make("Llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with pytest.raises(ConfigError, match="its blocks share parameters"):
        layers_of(model)


def test_dummy_inputs_that_do_not_suffice_are_named(monkeypatch):
    model = make("Llama")
    monkeypatch.setattr(type(model), "dummy_inputs", {"input_ids": torch.tensor([[1000]])})
    sentence = r"its forward failed with IndexError on the dummy inputs input_ids \[1, 1\], .*; set ds_lgamp.dummy_inp"
    with pytest.raises(ConfigError, match=sentence):
        layers_of(model)


def test_a_model_whose_forward_needs_labels_says_so_by_its_dummy_inputs():
    class Labelled(transformers.LlamaForCausalLM):
        dummy_inputs = {name: torch.arange(1, 9).view(2, 4) for name in ("input_ids", "labels")}

        def forward(self, input_ids, labels, **others):
            assert len(labels) == len(input_ids) == 2
            return super().forward(input_ids, labels=labels, **others)

    model, batch = make("Llama"), micro_batch(0, 0, 0)
    model.__class__ = Labelled
    assert_same(whole(model, batch), in_layers(model, batch))


def test_a_head_that_classifies_the_last_token_needs_no_padding_token():
    model = make("Llama", "AutoModelForSequenceClassification", pad_token_id=None)
    batch = {"input_ids": torch.arange(1, 9)[None], "labels": torch.tensor([1])}
    assert_same(whole(model, batch), in_layers(model, batch))


@pytest.mark.parametrize(("supports_sdpa", "wanted"), [(True, "sdpa"), (False, "eager")])
def test_flash_attention_is_replaced_for_the_survey_only(supports_sdpa, wanted, monkeypatch):
    model, seen = make("Llama"), SimpleQueue()
    monkeypatch.setattr(type(model), "_supports_sdpa", supports_sdpa)
    model.config._attn_implementation_internal = "flash_attention_2"
    model.lm_head.register_forward_hook(lambda *_: seen.put(model.config._attn_implementation))
    layers_of(model)
    assert {seen.get() for _ in range(seen.qsize())} == {wanted}
    assert model.config._attn_implementation == "flash_attention_2"


def test_a_forward_that_leaves_blocks_out_with_other_arguments_is_named():
    def dropping_the_last(model, hidden, arguments):
        for layer in list(model.layers)[: 3 if len(hidden) > 1 else 4]:
            hidden = layer(hidden, **arguments)
        return hidden

    with pytest.raises(ConfigError, match="the forward of the model skipped blocks"):
        in_layers(with_walk(dropping_the_last, False).train(), micro_batch(0, 0, 0))


def test_a_block_that_returns_other_things_than_the_first_one_is_named():
    model = make("Llama")
    layers, block = layers_of(model), model.model.layers[2]
    stock = block.forward
    block.forward = lambda *positional, **named: (stock(*positional, **named), None)
    with pytest.raises(ConfigError, match="block 2 of the model returned other things besides hidden states than"):
        computed_by(layers, model, micro_batch(0, 0, 0))


def test_a_switch_in_the_configuration_of_a_part_is_refused_too():
    config = transformers.Gemma3Config(text_config={"num_hidden_layers": 1, "output_hidden_states": True})
    with pytest.raises(ConfigError, match="output_hidden_states of GPT2LMHeadModel's config is on"):
        model = make("GPT-2")
        model.config = config
        layers_of(model)


def test_a_trial_on_short_inputs_throws_no_switch_and_a_call_may_not_either():
    """BigBird's attention is another one on short sequences, and then on all others."""
    config = transformers.BigBirdConfig(
        vocab_size=48,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        block_size=2,
        num_random_blocks=1,
        attention_type="block_sparse",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BigBirdForMaskedLM(config)
    tokens = torch.randint(3, 48, (2, 32), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    layers = layers_of(model)
    assert model.bert.attention_type == "block_sparse"
    assert_same(whole(model, batch), computed_by(layers, model, batch))
    with pytest.raises(ConfigError, match="puts another module into the place of 'self' of a BigBirdAttention"):
        computed_by(layers, model, {name: value[:, :5] for name, value in batch.items()})
