"""Sums of router logits travel to the last layer where the loss needs no more."""

from types import MethodType

import pytest
import torch
from transformers.models.mixtral import modeling_mixtral

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


def compared(model, batch):
    """Compares the loss of balance and the gradients with the whole model's. Returns the layers, and what the last one
    got beside hidden states."""
    expected, layers = whole(model, batch), layers_of(model, pipeline_ranks=2, outputs="all")
    found = []
    layers.modules[-1].register_forward_pre_hook(lambda _, inputs: found.extend(inputs[0][1:]))
    got = computed_by(layers, model, batch)
    torch.testing.assert_close(got.output["aux_loss"], expected.output["aux_loss"], rtol=1e-6, atol=0)
    for key, gradient in expected.gradients.items():
        torch.testing.assert_close(got.gradients[key], gradient, rtol=1e-4, atol=1e-7)
    return layers, found


@pytest.mark.parametrize("name", BALANCED)
@pytest.mark.parametrize("mask", MASKS)
def test_two_vectors_of_experts_travel_for_any_mask_of_tokens(name, mask):
    model, batch = make(name), {**BATCH, "attention_mask": MASKS[mask]}
    layers, found = compared(model, batch)
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
    _, found = compared(model, batch)
    assert len(found) == 2


def test_without_the_argument_nothing_travels():
    model, batch = make("Mixtral with balance"), {**BATCH, "output_router_logits": False}
    layers = layers_of(model, pipeline_ranks=2, outputs="all")
    found = []
    layers.modules[-1].register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    assert_same(whole(model, batch), computed_by(layers, model, batch))
    assert found[0].shape == (2, LENGTH, model.config.hidden_size)
