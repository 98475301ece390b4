"""What parts before the blocks return travels with hidden states, where blocks or what follows them need it."""

import pytest
import torch
from torch import nn

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.split.call import Call
from tests.integrations.split.own_models import (
    LENGTH,
    WIDTH,
    Gpt,
    MixingGpt,
    PositionsGpt,
    RotaryGpt,
    cross_entropy,
    make,
    micro_batch,
)
from tests.integrations.split.splitting import assert_gradients, assert_same, in_layers, layers_of
from tests.integrations.split.test_own_models import ReadsTwice

NAME = "a GPT that mixes"


def test_only_what_is_needed_travels():
    """Hidden states, the embedding that blocks and head get, two others, and a parameter."""
    layers = assert_same(make(NAME), *micro_batch(NAME, 0))
    assert len(layers) == 4
    for (inputs,) in layers:
        assert sorted(tuple(each.shape) for each in inputs) == [*[(2, LENGTH, WIDTH)] * 4, (3,)]


def test_gradients_of_what_travels_stay_in_the_chunk_whose_blocks_compute_with_it():
    layers = layers_of(make(NAME))
    call = Call(*layers.arguments(micro_batch(NAME, 0), {}))
    layers.calls.all = [call]
    first, block, following, *_ = layers.modules
    chunks = []
    for number, layer in enumerate((block, following), start=1):
        layers.calls.before_layer(number, 0)
        inputs = tuple(each.detach().requires_grad_() for each in (chunks[-1][1] if chunks else first(call)))
        chunks.append((inputs, layer(inputs)))
    for inputs, (hidden, *_) in chunks:
        hidden.sum().backward()
        assert all(each.grad is not None for each in inputs[:2])


def test_finding_what_travels_saves_no_tensors_that_a_recomputation_would_not():
    layers = layers_of(make(NAME))
    layers.calls.all = [Call(*layers.arguments(micro_batch(NAME, 0), {}))]
    saved = []
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each.shape) or each, lambda it: it):
            layers.modules[0](layers.calls.current)
    assert saved[: len(saved) // 2] == saved[len(saved) // 2 :]


class Conditioned(Gpt):
    """Its blocks get what a layer makes of an argument, if there is one."""

    def __init__(self):
        super().__init__()
        # Before the blocks, where an unused part belongs to the first layer.
        self.condition, self.blocks = nn.Linear(1, WIDTH), self._modules.pop("blocks")

    def forward(self, tokens, labels, time=None):
        hidden = self.embedding(tokens)
        rotation = None if time is None else 1 + self.condition(time)[:, None]
        return cross_entropy(self.head(self.through(hidden, rotation)), labels)


def test_something_travels_only_in_calls_that_need_it():
    """The dummy inputs do not."""
    model, batch = Conditioned(), micro_batch(NAME, 0)
    assert {type(inputs[0]) for inputs in assert_same(model, *batch)} == {torch.Tensor}
    assert {len(inputs[0]) for inputs in assert_same(model, *batch, torch.rand(2, 1))} == {2}


class Dropping(Conditioned):
    """Replaces the condition of some samples, or of all."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.rand(WIDTH))

    def forward(self, tokens, labels, time=None, keep=None):
        hidden = self.embedding(tokens)
        rotation = None if time is None else torch.where(keep[:, None], self.condition(time), self.nothing)[:, None]
        return cross_entropy(self.head(self.through(hidden, rotation)), labels)


def test_what_the_first_call_masks_travels_too():
    """Calls of one form need the same, whatever the values of their arguments."""
    model, batch, time = Dropping(), micro_batch(NAME, 0), torch.rand(2, 1)
    layers = layers_of(model)
    for keep in ([False, False], [True, False], [True, True]):
        arguments = *batch, time, torch.tensor(keep)
        assert torch.equal(in_layers(layers, *arguments), model(*arguments)), keep


class ConditionedAfter(Conditioned):
    def forward(self, tokens, labels, time=None):
        hidden = self.embedding(tokens)
        scale = 1.0 if time is None else 1 + self.condition(time)[:, None]
        hidden = self.through(hidden)
        return cross_entropy(self.head(hidden * scale), labels)


def test_what_dummy_inputs_do_not_show_after_the_blocks_is_refused_in_any_call():
    model, batch, time = ConditionedAfter(), micro_batch(NAME, 0), torch.rand(2, 1)
    layers = layers_of(model)
    assert torch.equal(in_layers(layers, *batch), model(*batch))
    with pytest.raises(ConfigError, match="depends on what 'condition' returned before them; set ds_lgamp.dummy_inp"):
        in_layers(layers, *batch, time)
    tokens = [[0] * 4]
    layers = layers_of(model, dummy_inputs={"tokens": tokens, "labels": tokens, "time": [[0.5]]})
    for arguments in (batch, (*batch, time)):
        assert torch.equal(in_layers(layers, *arguments), model(*arguments))


class BeginningWithZeros(ConditionedAfter):
    """Its head begins with zeros, as the last layers of diffusion transformers do."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.head.weight)


def test_layers_that_begin_with_zeros_hide_nothing_that_travels():
    tokens = [[0] * 4]
    dummy = {"tokens": tokens, "labels": tokens, "time": [[0.5]]}
    assert_same(BeginningWithZeros(), *micro_batch(NAME, 0), torch.rand(2, 1), dummy_inputs=dummy)


def test_a_parameter_may_be_read_before_the_blocks_and_after_them():
    assert_same(ReadsTwice(), torch.rand(3, 4), dummy_inputs={"x": {"shape": [1, 4]}})


class Masked(RotaryGpt):
    """Masks by the values of embeddings what its blocks get."""

    def forward(self, tokens, labels):
        hidden = self.embedding(tokens)
        rotation = self.rotation[: tokens.shape[1]] * (hidden[0] > 0)
        for layer in self.layers.values():
            hidden = layer(hidden, rotation)
        return cross_entropy(self.head(hidden), labels)


def test_blocks_may_get_a_mask_of_values_before_them():
    assert_same(Masked(), *micro_batch(NAME, 0), pipeline_ranks=2)


class Translating(Gpt):
    """An encoder, and a decoder whose blocks attend to what it returned."""

    def __init__(self):
        super().__init__(lambda causal: nn.TransformerDecoderLayer(WIDTH, 2, 16, 0.0, batch_first=True))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True), 1)

    def encoded(self, tokens):
        return self.encoder(self.embedding(tokens))

    def forward(self, tokens, labels):
        return cross_entropy(self.head(self.through(self.embedding(labels), self.encoded(tokens))), labels)


def test_a_decoder_attends_to_what_its_encoder_returned():
    assert_same(Translating(), *micro_batch(NAME, 0))


class Positioned(Translating):
    """Adds a parameter of its own to what its encoder gets."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.rand(WIDTH))

    def encoded(self, tokens):
        return self.encoder(self.embedding(tokens) + self.position)


def test_an_encoder_gets_a_parameter_in_the_dtype_that_the_engine_gives_to_the_model():
    model = Positioned()
    layers = layers_of(model)
    model.to(torch.bfloat16)
    assert torch.isfinite(in_layers(layers, *micro_batch(NAME, 0)))


class Padded(Translating):
    """Its encoder does not attend to padding."""

    def forward(self, tokens, labels):
        padding = torch.arange(tokens.shape[1]).expand_as(tokens) > 2
        memory = self.encoder(self.embedding(tokens), src_key_padding_mask=padding)
        hidden = self.embedding(labels)
        return cross_entropy(self.head(self.through(hidden, memory, memory_key_padding_mask=padding)), labels)


def test_an_encoder_of_torch_may_mask_padding():
    """In evaluation, torch makes nested tensors of it."""
    assert_same(Padded().eval(), *micro_batch(NAME, 0))


class Frozen(MixingGpt):
    def __init__(self):
        super().__init__()
        self.embedding.requires_grad_(False)
        self.values.requires_grad_(False)


def test_what_frozen_parts_return_travels_too():
    assert_same(Frozen(), *micro_batch(NAME, 0))


class ReturningFirst(PositionsGpt):
    """Returns what it computed before the blocks, also from a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.positions.requires_grad_(False)

    def forward(self, tokens, labels):
        first = self.embedding(tokens)
        loss = cross_entropy(self.head(self.blocks(first + self.positions[:, : tokens.shape[1]])), labels)
        return loss, first.square().mean(), self.positions.mean(0)


def test_outputs_may_be_what_parts_before_the_blocks_returned():
    model, batch = ReturningFirst(), micro_batch(NAME, 0)
    layers = layers_of(model, outputs="all")
    expected, output = model(*batch), in_layers(layers, *batch)
    assert all(map(torch.equal, output, expected))
    assert_gradients(model, sum(output[:2]), sum(expected[:2]), rtol=1e-5, atol=1e-7)


class Reconstructing(PositionsGpt):
    """Its loss compares with what it embedded, without gradients of it."""

    def forward(self, tokens, labels):
        first = self.embedding(tokens)
        hidden = self.blocks(first + self.positions[:, : tokens.shape[1]])
        return (hidden - first.detach()).square().mean() + cross_entropy(self.head(hidden), labels)


def test_what_is_detached_travels_to_the_loss():
    for inputs in assert_same(Reconstructing(), *micro_batch(NAME, 0)):
        assert len(inputs[0]) == 2


class Skipping(Gpt):
    """Its last block gets what the first one returned."""

    def forward(self, tokens, labels, skips=True):
        first = self.blocks[0](self.embedding(tokens))
        hidden = self.blocks[2](self.blocks[1](first), first if skips else None)
        return cross_entropy(self.head(hidden), labels)


def test_what_blocks_return_does_not_travel():
    model, batch = Skipping(), micro_batch(NAME, 0)
    with pytest.raises(ConfigError, match="blocks get another tensor that depends on parameters, besides hidden"):
        layers_of(model)
    tokens = [[0] * 4]
    layers = layers_of(model, dummy_inputs={"tokens": tokens, "labels": tokens, "skips": False})
    assert torch.equal(in_layers(layers, *batch, False), model(*batch, False))
    with pytest.raises(ConfigError, match="a block of the model gets what a block returned that is not the one right"):
        in_layers(layers, *batch, True)


class DeeplySupervised(PositionsGpt):
    """Adds to its loss one of what an earlier block returned, if it is asked for."""

    def forward(self, tokens, labels, deep=True):
        hidden = first = self.embedding(tokens)
        between = []
        for block in self.blocks:
            hidden = block(hidden)
            between.append(hidden)
        loss = cross_entropy(self.head(hidden + first), labels)
        return loss + cross_entropy(self.head(between[0]), labels) if deep else loss


def test_a_loss_of_what_an_earlier_block_returned_is_refused():
    model, batch, tokens = DeeplySupervised(), micro_batch(NAME, 0), [[0] * 4]
    with pytest.raises(ConfigError, match="after the blocks its forward computes with what an earlier one than the l"):
        layers_of(model)
    layers = layers_of(model, dummy_inputs={"tokens": tokens, "labels": tokens, "deep": False})
    with pytest.raises(ConfigError, match="output depends on what 'block 0' returned"):
        in_layers(layers, *batch, True)


class ChangingInPlace(MixingGpt):
    def forward(self, tokens, labels):
        first = self.embedding(tokens)
        first += 1
        hidden = first
        for block, values in zip(self.blocks, (first, first, first)):
            hidden = block(hidden, first=first, values=values, mix=self.mixes[0])
        return cross_entropy(self.head(hidden), labels)


def test_what_travels_may_not_be_changed_in_place():
    with pytest.raises(ConfigError, match="changes in place what 'embedding' returned, .*; .* compute a new tensor"):
        layers_of(ChangingInPlace())
