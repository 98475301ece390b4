"""What a forward of one's own does around its blocks holds in the layers of the split model."""

import copy
from dataclasses import dataclass

import peft
import pytest
import torch
from torch import nn

from ds_lgamp.config import ConfigError
from tests.integrations.split.own_models import (
    LENGTH,
    MODELS,
    VOCABULARY,
    WIDTH,
    Attention,
    PositionsGpt,
    TiedGpt,
    cross_entropy,
    micro_batch,
)
from tests.integrations.split.splitting import assert_gradients, gradients_of, in_layers, layers_of


class Autocasting(TiedGpt):
    """Computes in bf16 by an autocast of its own."""

    def forward(self, idx, targets=None):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(idx, targets)


def test_blocks_run_in_the_autocast_that_the_forward_enters_around_them():
    torch.manual_seed(0)
    model, batch = Autocasting(), micro_batch("a tied GPT", 0)
    expected = model(*batch)[1]
    loss = in_layers(layers_of(model), *batch)[1]
    assert torch.equal(loss, expected)
    assert_gradients(model, loss, expected, rtol=1e-2, atol=1e-4)


def test_without_its_own_autocast_the_forward_keeps_the_one_around_the_layers():
    model, batch = MODELS["a tied GPT"](), micro_batch("a tied GPT", 0)
    layers = layers_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(in_layers(layers, *batch)[1], model(*batch)[1])


class FrozenBelowHead(TiedGpt):
    """Trains its head alone."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, idx, targets=None):
        hidden = self.transformer["wte"](idx)
        with torch.no_grad():
            for block in self.transformer["h"]:
                hidden = block(hidden)
        logits = self.head(hidden)
        return logits, None if targets is None else cross_entropy(logits, targets)


def test_frozen_blocks_may_be_called_without_gradients():
    torch.manual_seed(0)
    model, batch = FrozenBelowHead(), micro_batch("a tied GPT", 0)
    expected = model(*batch)[1]
    loss = in_layers(layers_of(model), *batch)[1]
    assert torch.equal(loss, expected)
    wanted, found = gradients_of(model, expected), gradients_of(model, loss)
    assert torch.equal(found["head.weight"], wanted["head.weight"]) and found["transformer.h.0.out.weight"] is None


class InPlace(PositionsGpt):
    """Changes in place what a frozen embedding and what the last block returned."""

    def __init__(self):
        super().__init__()
        self.embedding.requires_grad_(False)

    def forward(self, tokens, labels):
        hidden = self.embedding(tokens)
        hidden += self.positions
        hidden = self.blocks(hidden)
        hidden *= self.temperature
        return cross_entropy(self.head(hidden), labels)


def test_the_forward_may_change_results_in_place_before_the_blocks_and_after_them():
    torch.manual_seed(0)
    model, batch = InPlace(), micro_batch("a GPT with positions", 0)
    layers = layers_of(model, dummy_inputs={name: [[0] * LENGTH] for name in ("tokens", "labels")})
    expected, loss = model(*batch), in_layers(layers, *batch)
    assert torch.equal(loss, expected)
    wanted, found = gradients_of(model, expected), gradients_of(model, loss)
    for name in ("positions", "temperature", "blocks.0.out.weight"):
        torch.testing.assert_close(found[name], wanted[name])


class Centering(nn.Module):
    """Subtracts a running mean, which it keeps as a new tensor in training, and scales."""

    def __init__(self, scale: bool):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("updates", torch.tensor(0))
        self.scale = nn.Parameter(torch.ones(WIDTH)) if scale else 1.0

    def forward(self, hidden):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * hidden.detach().mean((0, 1))
            self.updates += 1
        return (hidden - self.mean) * self.scale


class Centered(TiedGpt):
    def __init__(self, before: nn.Module, after: nn.Module):
        super().__init__()
        self.before, self.after = before, after

    def forward(self, idx, targets=None):
        hidden = self.before(self.transformer["wte"](idx))
        for block in self.transformer["h"]:
            hidden = block(hidden)
        logits = self.head(self.after(hidden))
        return logits, None if targets is None else cross_entropy(logits, targets)


@pytest.mark.parametrize("scale", [True, False])
def test_modules_change_their_buffers_once_per_micro_batch_before_the_blocks_and_after_them(scale):
    torch.manual_seed(0)
    model = Centered(Centering(scale), Centering(scale))
    split = copy.deepcopy(model)
    layers = layers_of(split)
    for number in range(3):
        batch = micro_batch("a tied GPT", number)
        assert torch.equal(in_layers(layers, *batch)[1], model(*batch)[1])
        # As a rank without what is before the blocks does.
        layers.modules[1]._split.dry_run_without_parts(layers.calls.all[0])
    for name, buffer in model.named_buffers():
        assert torch.equal(split.get_buffer(name), buffer)


class LossInTraining(TiedGpt):
    """Returns a loss in training only."""

    def forward(self, idx, targets=None):
        logits, loss = super().forward(idx, targets)
        return (logits, loss) if self.training else logits


def test_the_model_may_return_its_loss_in_training_only():
    torch.manual_seed(0)
    model, batch = LossInTraining().eval(), micro_batch("a tied GPT", 0)
    layers = layers_of(model)
    assert not model.training
    model.train()
    output = in_layers(layers, *batch)
    assert torch.equal(layers.loss_of(output), model(*batch)[1])


def test_hooks_of_blocks_run_with_the_blocks():
    torch.manual_seed(0)
    model, batch = TiedGpt(), micro_batch("a tied GPT", 0)
    first, second, _ = model.transformer["h"]
    first.register_forward_hook(lambda _module, _arguments, output: 2 * output)
    second.register_forward_pre_hook(lambda _module, arguments: (arguments[0] + 1,))
    layers = layers_of(model)
    assert torch.equal(in_layers(layers, *batch)[1], model(*batch)[1])


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None


class ReturnsDataclass(TiedGpt):
    def forward(self, idx, targets=None):
        return {"output": Output(*super().forward(idx, targets))}


def test_the_model_may_return_its_loss_in_a_dataclass():
    torch.manual_seed(0)
    model, batch = ReturnsDataclass(), micro_batch("a tied GPT", 0)
    layers = layers_of(model)
    loss = layers.loss_of(in_layers(layers, *batch))
    assert torch.equal(loss, model(*batch)["output"].loss)
    assert layers.training_output(loss)["output"].loss is loss


def test_a_model_that_peft_has_wrapped_gets_the_dummy_inputs_of_its_own():
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["qkv", "out"], init_lora_weights=False, modules_to_save=["norm"])
    model, batch = peft.get_peft_model(TiedGpt(), config), micro_batch("a tied GPT", 0)
    expected, loss = model(*batch)[1], in_layers(layers_of(model), *batch)[1]
    assert torch.equal(loss, expected)
    found = assert_gradients(model, loss, expected)
    assert sum(each is not None for each in found.values()) == 14


class Codebooks(nn.Module):
    """Adds the embeddings of a list, each moved by a parameter of another, and has a list of heads."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(VOCABULARY, WIDTH) for _ in range(2))
        self.shifts = nn.ParameterList(torch.randn(WIDTH) for _ in range(2))
        self.blocks = nn.ModuleList(Attention(causal=True) for _ in range(3))
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, VOCABULARY) for name in "ab"})

    def forward(self, idx, targets=None):
        hidden = sum(embed(idx) + shift for embed, shift in zip(self.embeddings, self.shifts))
        for block in self.blocks:
            hidden = block(hidden)
        logits = sum(head(hidden) for head in self.heads.values())
        return logits, None if targets is None else cross_entropy(logits, targets)


def test_modules_and_parameters_before_the_blocks_and_after_them_may_lie_in_lists():
    torch.manual_seed(0)
    model, batch = Codebooks(), micro_batch("a tied GPT", 0)
    layers = layers_of(model)
    first, *_, last = layers.modules
    assert [name for name, _ in first.named_parameters()] == [
        *(f"embeddings.{number}.weight" for number in range(2)),
        *(f"shifts.{number}" for number in range(2)),
    ]
    expected, loss = model(*batch)[1], in_layers(layers, *batch)[1]
    assert torch.equal(loss, expected)
    assert_gradients(model, loss, expected)


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_tensor_of_the_script_that_the_forward_changes_in_place_is_refused(where):
    model = PositionsGpt()

    def forward(tokens, labels):
        hidden = model.embedding(tokens.add_(1).remainder_(VOCABULARY) if where == "before" else tokens)
        hidden = model.blocks(hidden)
        return cross_entropy(model.head(hidden), labels.add_(1).remainder_(VOCABULARY) if where == "after" else labels)

    model.forward = forward
    with pytest.raises(ConfigError, match="changes in place a tensor that it gets, but .* several times for every mi"):
        layers_of(model)
