"""What scripts pass to a model: honoured, or refused by name."""

from functools import cache
from inspect import signature
from itertools import product
from unittest.mock import MagicMock

import pytest
import torch

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.split.call import Call
from tests.integrations.transformers.by_hand import assert_same, computed_by, in_layers, layers_of, whole
from tests.integrations.transformers.models import LENGTH, make, micro_batch
from tests.slow import slow_except


def packed() -> dict[str, torch.Tensor]:
    """Makes two sequences in one row, as DataCollatorWithFlattening does for attention without boundaries."""
    tokens = micro_batch(0, 0, 0)["input_ids"][:1]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    return {"input_ids": tokens, "position_ids": positions, "labels": tokens.masked_fill(positions == 0, -100)}


def boundaries() -> dict[str, object]:
    """Makes the boundaries of packed sequences for flash attention. Other attention ignores them."""
    bounds = torch.tensor([0, 4, 10], dtype=torch.int32)
    return {**packed(), "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 6, "max_length_k": 6}


def embedded() -> dict[str, torch.Tensor]:
    """Makes hidden states in place of tokens."""
    batch = micro_batch(0, 0, 0)
    del batch["input_ids"]
    return {**batch, "inputs_embeds": torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(0))}


HONOURED = {
    "position_ids": ("GPT-2", lambda: {**micro_batch(0, 0, 0), "position_ids": torch.arange(3, 3 + LENGTH)[None]}),
    "token_type_ids": (
        "BERT",
        lambda: {**micro_batch(0, 0, 0), "token_type_ids": torch.arange(LENGTH).repeat(2, 1) % 2},
    ),
    "no mask": ("Llama", lambda: {name: value for name, value in micro_batch(0, 0, 0).items() if "mask" not in name}),
    "packed sequences": ("Llama", packed),
    "packed sequences, sliding window": ("Gemma 3", packed),
    "boundaries of packed sequences": ("Qwen3", boundaries),
    "inputs_embeds": ("Llama", embedded),
    "num_items_in_batch": ("Llama", lambda: {**micro_batch(0, 0, 0), "num_items_in_batch": torch.tensor(7)}),
    "use_cache": ("Llama", lambda: {**micro_batch(0, 0, 0), "use_cache": True}),
}


@cache
def split(name):
    """Splits every model once, for all arguments."""
    model = make(name)
    return model, layers_of(model)


@pytest.mark.parametrize("case", HONOURED)
def test_an_argument_of_the_model_is_honoured(case):
    name, arguments = HONOURED[case]
    model, layers = split(name)
    assert_same(whole(model, arguments()), computed_by(layers, model, arguments()))


def test_packed_sequences_do_not_see_each_other():
    model = make("Llama").eval()
    changed = packed()
    changed["input_ids"] = changed["input_ids"].clone()
    changed["input_ids"][0, :4] = 5
    layers = layers_of(model)
    logits = [computed_by(layers, model, arguments).output.logits[0, 4:] for arguments in (packed(), changed)]
    assert torch.equal(*logits)


def test_a_forward_that_is_recomputed_leaves_blocks_what_they_got_first():
    rotary = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    layers = layers_of(make("Llama", rope_parameters=rotary, max_position_embeddings=4))
    batch, begin = micro_batch(0, 0, 0), layers.modules[0]
    short, long = (
        Call(*layers.arguments((), {name: value[:, :length] for name, value in batch.items()})) for length in (6, 10)
    )
    tables = []
    for call in (short, long, short):
        begin(call)
        tables.append(short.blocks[0].named["position_embeddings"][0])
    assert torch.equal(tables[2], tables[0])


REFUSED = {
    "output_hidden_states": (True, "the argument output_hidden_states is on"),
    "output_attentions": (True, "the argument output_attentions is on"),
    "output_router_logits": (True, "output_router_logits is on, but was off in the model's config"),
    **{name: (((),), f"^{name} is given, .* leave it out") for name in ("past_key_values", "cache", "cache_params")},
    "return_dict": (False, "the argument return_dict is False"),
    "inputs_embeds": (torch.zeros(2, LENGTH, 32, requires_grad=True), "inputs_embeds requires gradients"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_a_split_model_cannot_take_is_refused_by_name(name):
    value, sentence = REFUSED[name]
    with pytest.raises(ConfigError, match=sentence):
        split("Mixtral")[1].arguments((), {**micro_batch(0, 0, 0), name: value})


def test_positional_arguments_are_known_by_name():
    ids, mask = (micro_batch(0, 0, 0)[name] for name in ("input_ids", "attention_mask"))
    with pytest.raises(ConfigError, match="^(past_key_values|cache) is given"):
        split("Mixtral")[1].arguments((ids, mask, None, ((),)), {})


HEADS = {
    "AutoModelForSequenceClassification": {"labels": torch.tensor([0, 1])},
    "AutoModelForTokenClassification": {"labels": torch.arange(2 * LENGTH).view(2, LENGTH) % 2},
    "AutoModelForQuestionAnswering": {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 5])},
}


@pytest.mark.parametrize(
    ("head", "name"),
    slow_except(
        [("AutoModelForSequenceClassification", "GPT-2"), ("AutoModelForQuestionAnswering", "Qwen3")],
        list(product(HEADS, ["GPT-2", "Qwen3", "BERT"])),
        several=True,
    ),
)
def test_every_head_computes_as_in_the_whole_model(head, name):
    model = make(name, head)
    batch = micro_batch(0, 0, 0)
    del batch["labels"]
    arguments = {**batch, **HEADS[head]}
    assert_same(whole(model, arguments), in_layers(model, arguments))


def test_what_blocks_get_is_computed_without_drawing_random_numbers():
    model = make("GPT-2", attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1).train()
    layers = layers_of(model)
    call = Call(*layers.arguments((), micro_batch(0, 0, 0)))
    layers.calls.all = [call]
    before = torch.get_rng_state()
    layers.modules[1]._split.needs_of(call)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_rank_of_the_first_layer_calls_the_forward_once_for_hidden_states_and_what_blocks_get():
    """Once it has found, in the first call, that nothing travels besides hidden states."""
    model = make("Llama")
    model.forward = forward = MagicMock(wraps=model.forward)
    forward.__signature__ = signature(forward._mock_wraps)
    layers = layers_of(model)
    first, block, *_ = layers.modules
    for number in range(2):
        call = Call(*layers.arguments((), micro_batch(0, 0, number)))
        layers.calls.all = [call]
        forward.reset_mock()
        block(first(call))
    assert forward.call_count == 1
