"""Sums of router logits travel to the last layer where the loss needs no more."""

from types import MethodType

import pytest
import torch
import transformers
from transformers.models.mixtral import modeling_mixtral

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.split import comparison
from tests.integrations.transformers.by_hand import assert_same, computed_by, layers_of, whole
from tests.integrations.transformers.models import BALANCED, LENGTH, make, micro_batch

BATCH = micro_batch(0, 0, 0)
MASK = BATCH["attention_mask"]
MASKS = {
    "none": None,
    "numbers": MASK,
    "booleans": MASK.bool(),
    "fractions": MASK.float(),
    "padding on the left": MASK.flip(1),
    "no tokens of a sequence": MASK * torch.tensor([[0], [1]]),
}


def by_mixtrals_loss(self, input_ids, attention_mask=None, labels=None, fused=False, **named):
    """As trl's forward, which calls Mixtral's loss for a model of any kind."""
    if not fused:
        return type(self).forward(self, input_ids, attention_mask, labels=labels, **named)
    output = self.model(input_ids, attention_mask, output_router_logits=True, **named)
    loss = self.lm_head(output.last_hidden_state).square().mean()
    experts, chosen = self.num_experts, self.num_experts_per_tok
    balance = modeling_mixtral.load_balancing_loss_func(output.router_logits, experts, chosen, attention_mask)
    return {"loss": loss + 0.5 * balance, "aux_loss": balance}


def compared(model, layers, batch):
    """Compares the loss of balance and the gradients with the whole model's. Returns what the last layer got beside
    hidden states."""
    expected, found = whole(model, batch), []
    hook = layers.modules[-1].register_forward_pre_hook(lambda _, inputs: found.extend(inputs[0][1:]))
    got = computed_by(layers, model, batch)
    hook.remove()
    torch.testing.assert_close(got.output["aux_loss"], expected.output["aux_loss"], rtol=1e-6, atol=0)
    for key, gradient in expected.gradients.items():
        torch.testing.assert_close(got.gradients[key], gradient, rtol=1e-4, atol=1e-7)
    return found


@pytest.fixture(scope="module", params=BALANCED)
def balanced(request):
    """Splits every model once, for all masks."""
    model = make(request.param)
    return model, layers_of(model, pipeline_ranks=2, outputs="all")


@pytest.mark.parametrize("mask", MASKS)
def test_two_vectors_of_experts_travel_for_any_mask_of_tokens(balanced, mask):
    model, layers = balanced
    found = compared(model, layers, {**BATCH, "attention_mask": MASKS[mask]})
    experts = layers.modules[-1]._split.original.model.num_experts
    assert [tuple(each.shape) for each in found] == [(experts,), (experts + 1,)]
    sent = sum(each.nbytes for each in found), sum(each.nbytes for each in found if each.requires_grad)
    assert sent == layers.sums


@pytest.mark.parametrize("name", BALANCED)
def test_a_forward_of_the_script_may_call_mixtrals_loss(name, monkeypatch):
    monkeypatch.setattr(comparison, "_LARGEST", 0)
    model = make(name)
    model.forward = MethodType(by_mixtrals_loss, model)
    batch = {**BATCH, "fused": True}
    found = compared(model, layers_of(model, pipeline_ranks=2, outputs="all"), batch)
    assert len(found) == 2


def test_without_the_argument_nothing_travels():
    model, batch = make("Mixtral with balance"), {**BATCH, "output_router_logits": False}
    layers = layers_of(model, pipeline_ranks=2, outputs="all")
    found = []
    layers.modules[-1].register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    assert_same(whole(model, batch), computed_by(layers, model, batch))
    assert found[0].shape == (2, LENGTH, model.config.hidden_size)


def by_some_routers(self, input_ids, attention_mask=None, labels=None, first=None, **named):
    """Balances the experts of the ``first`` routers alone."""
    output = self.model(input_ids, attention_mask, output_router_logits=True, **named)
    balance = modeling_mixtral.load_balancing_loss_func(
        output.router_logits[:first], self.num_experts, self.num_experts_per_tok, attention_mask
    )
    return {"loss": self.lm_head(output.last_hidden_state).square().mean() + 0.5 * balance, "aux_loss": balance}


def test_a_loss_by_the_routers_of_some_blocks_is_refused(monkeypatch):
    monkeypatch.setattr(comparison, "_LARGEST", 0)
    model = make("Mixtral with balance")
    model.forward = MethodType(by_some_routers, model)
    compared(model, layers_of(model, pipeline_ranks=2, outputs="all"), BATCH)
    with pytest.raises(ConfigError, match="or by the routers of some blocks alone"):
        computed_by(layers_of(model, outputs="all"), model, {**BATCH, "first": 1})


def small(kind, **others):
    """Makes an expert model with an encoder before its blocks."""
    sizes = {"vocab_size": 64, "d_model": 16, "num_experts": 4, "expert_capacity": 8, "router_jitter_noise": 0.0}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, **others)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config).train()


def nllb(**others):
    dropouts = {name: 0.0 for name in ("dropout", "attention_dropout", "activation_dropout")}
    ends = {
        f"{end}_{name}": value
        for end in ("encoder", "decoder")
        for name, value in dict(layers=2, attention_heads=2, ffn_dim=32, sparse_step=1, layerdrop=0.0).items()
    }
    return small("NllbMoe", moe_token_dropout=0.0, pad_token_id=1, **dropouts, **ends, **others)


def test_an_encoder_and_a_decoder_have_a_balance_each():
    model = nllb(output_router_logits=True)
    draw = torch.Generator().manual_seed(1)
    batch = {name: torch.randint(3, 64, (2, 8), generator=draw) for name in ("input_ids", "labels")}
    shapes = {name: {"shape": [1, 5], "dtype": "int64"} for name in ("input_ids", "labels")}
    layers = layers_of(model, outputs="all", dummy_inputs=shapes)
    for padding in ({}, {"attention_mask": torch.tensor([[1] * 8, [1] * 6 + [0] * 2])}):
        expected, got = whole(model, batch | padding), computed_by(layers, model, batch | padding)
        assert_same(expected, got)
        for name in ("encoder_aux_loss", "decoder_aux_loss"):
            torch.testing.assert_close(got.output[name], expected.output[name], rtol=1e-6, atol=0)
        assert expected.output["encoder_aux_loss"] != expected.output["decoder_aux_loss"]


def test_a_router_may_register_its_own_classifier_again():
    model = small(
        "SwitchTransformers", d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
    )
    tokens = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    assert_same(whole(model, batch), computed_by(layers_of(model), model, batch))
