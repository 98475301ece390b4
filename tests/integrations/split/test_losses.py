"""Which loss a model has, and what is said where it has none."""

import pytest
import torch
from torch import nn

from ds_lgamp.config import ConfigError
from tests.integrations.split.own_models import Attention, Gpt, TiedGpt, cross_entropy, micro_batch
from tests.integrations.split.splitting import assert_gradients, in_layers, layers_of

BATCH = micro_batch("a GPT", 0)


class ReturningGpt(Gpt):
    """Returns what ``output`` makes of its loss and its logits."""

    def __init__(self, output):
        super().__init__(blocks=2)
        self.output = output

    def forward(self, tokens, labels=None, scale=None):
        logits = self.head(self.through(self.embedding(tokens)))
        loss = None if labels is None else cross_entropy(logits, labels)
        return self.output(loss if scale is None or loss is None else loss * scale, logits)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_loss_of_one_element_keeps_its_shape(shape):
    model = ReturningGpt(lambda loss, _: loss.reshape(shape))
    layers, expected = layers_of(model), model(*BATCH)
    loss = layers.loss_of(in_layers(layers, *BATCH))
    assert loss.shape == shape and torch.equal(loss, expected)
    assert_gradients(model, loss, expected)
    assert layers.training_output(torch.tensor(2.0)).shape == shape


def test_a_number_is_the_loss_also_beside_other_tensors_of_one_element():
    model = ReturningGpt(lambda loss, logits: {"mean": logits.mean().reshape(1), "loss": loss})
    layers = layers_of(model)
    assert torch.equal(layers.loss_of(in_layers(layers, *BATCH)), model(*BATCH)["loss"])


@pytest.mark.parametrize("count", [0, 2])
def test_no_loss_and_several_are_refused(count):
    model = ReturningGpt(lambda loss, logits: [logits.detach(), *[loss.reshape(1)] * count])
    with pytest.raises(ConfigError, match=f"returned {count} numbers with a gradient"):
        layers_of(model)


OPTIONAL = {
    "logits alone": lambda loss, logits: logits if loss is None else loss,
    "a tuple of one": lambda loss, logits: (logits,) if loss is None else (logits, loss),
    "no loss in a tuple": lambda loss, logits: (logits, loss),
    "no loss in a dictionary": lambda loss, logits: {"logits": logits} | ({} if loss is None else {"loss": loss}),
}


@pytest.mark.parametrize("output", OPTIONAL)
def test_a_call_in_training_without_what_the_loss_needs_is_told_so_at_once(output):
    model = ReturningGpt(OPTIONAL[output]).train()
    layers = layers_of(model)
    sentence = (
        "got no 'labels', without which the forward of ReturningGpt returns no loss; .* set ds_lgamp.outputs to 'all'"
    )
    for named in ({}, {"labels": None}, {"scale": 2}):
        with pytest.raises(ConfigError, match=sentence):
            layers.arguments(BATCH[:1], named)
    layers.arguments(BATCH, {}), layers.arguments(BATCH[:1], {"labels": BATCH[1]})


def test_without_training_a_call_needs_no_labels():
    model = ReturningGpt(OPTIONAL["logits alone"])
    layers = layers_of(model)
    with torch.no_grad():
        assert torch.equal(in_layers(layers, BATCH[0]), model(BATCH[0]))
    model.eval()
    layers.arguments(BATCH[:1], {})
    layers_of(model.train(), outputs="all").arguments(BATCH[:1], {})


def test_an_argument_that_the_loss_does_not_need_may_be_left_out():
    model = ReturningGpt(OPTIONAL["logits alone"])
    numbers = {"tokens": [[0] * 4], "labels": [[0] * 4], "scale": 0.5}
    layers = layers_of(model, dummy_inputs=numbers)
    assert torch.equal(in_layers(layers, *BATCH), model(*BATCH))
    with pytest.raises(ConfigError, match="got no 'labels'"):
        layers.arguments(BATCH[:1], {"scale": 0.5})


TERMS = []


class Balancing(Attention):
    """Appends a term of the loss to a list beside the model, of its parameters and its input."""

    of = "both"

    def forward(self, hidden):
        values = {"both": self.out(hidden), "input": hidden, "parameters": self.out.weight}[self.of]
        TERMS.append(values.square().mean())
        return super().forward(hidden)


@pytest.mark.parametrize("of", ["both", "input", "parameters"])
@pytest.mark.parametrize("clears", ["before the blocks", "after them"])
def test_terms_of_the_loss_that_blocks_put_into_a_list_beside_the_model_are_refused_for_that(of, clears):
    class Balanced(TiedGpt):
        def forward(self, idx, targets=None):
            if clears == "before the blocks":
                TERMS.clear()
            loss = super().forward(idx, targets)[1] + sum(TERMS)
            TERMS.clear()
            return loss

    model = Balanced()
    model.transformer["h"] = nn.ModuleList(Balancing(causal=True) for _ in range(2))
    for block in model.transformer["h"]:
        block.of = of
    TERMS.clear()
    with pytest.raises(ConfigError, match="depends on what a block computes, but not through what the block returns"):
        layers_of(model)


def test_terms_of_a_hook_in_a_block_are_refused_for_that():
    model, terms = TiedGpt(), []
    for block in model.transformer["h"]:
        block.mlp.register_forward_hook(lambda _, __, hidden: terms.append(hidden.square().mean()))
    model.register_forward_hook(lambda _, __, output: (output[0], output[1] + sum(terms)))
    with pytest.raises(ConfigError, match="comes by a list, a global variable, a hook or an attribute, which stay"):
        layers_of(model)
