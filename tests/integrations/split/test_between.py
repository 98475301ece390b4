"""What a forward computes between two blocks belongs to the layer of the second one."""

import pytest
import torch
from torch import nn

from ds_lgamp.config import ConfigError
from tests.integrations.split.own_models import WIDTH, Attention, Gpt, PositionsGpt, cross_entropy, micro_batch
from tests.integrations.split.splitting import assert_same, in_layers, layers_of
from tests.integrations.split.test_travelling import NAME


class Between(Gpt):
    """Calls ``between(model, number, hidden, first)`` after every block but the last."""

    def __init__(self, between):
        super().__init__(blocks=4)
        self.between, self.scales, self.norm = between, nn.Parameter(torch.rand(3)), nn.LayerNorm(WIDTH)

    def forward(self, tokens, labels, asked=True):
        hidden = first = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)
            if number < 3 and asked:
                hidden = self.between(self, number, hidden, first)
        return cross_entropy(self.head(hidden), labels)


def scaling(model, number, hidden, first):
    return 2 * hidden if number == 0 else hidden


def adding_the_first(model, number, hidden, first):
    return hidden + model.scales[number] * first


def adding_somewhere(model, number, hidden, first):
    changed = hidden.clone()
    changed[:, 2:] = hidden[:, 2:] + first[:, :-2]
    return changed if number == 1 else hidden


@pytest.mark.parametrize("between", [scaling, adding_the_first, adding_somewhere])
def test_a_forward_may_compute_between_blocks(between):
    assert_same(Between(between), *micro_batch(NAME, 0))


@pytest.mark.parametrize("between", [scaling, adding_the_first])
def test_it_may_do_so_in_some_calls_only(between):
    model, batch, tokens = Between(between), micro_batch(NAME, 0), [[0] * 4]
    layers = layers_of(model, dummy_inputs={"tokens": tokens, "labels": tokens, "asked": False})
    for asked in (False, True):
        assert torch.equal(in_layers(layers, *batch, asked), model(*batch, asked))


def scaling_long_ones(model, number, hidden, first):
    return 2 * hidden if hidden.shape[1] > 4 else hidden


def adding_in_training(model, number, hidden, first):
    return hidden + first if model.training else hidden + 1


@pytest.mark.parametrize("between", [scaling_long_ones, adding_in_training])
def test_shapes_and_the_mode_may_decide_whether_it_computes(between):
    model, (tokens, labels) = Between(between), micro_batch(NAME, 0)
    layers = layers_of(model)
    for length, training in ((3, True), (8, False), (3, False), (8, True)):
        model.train(training)
        batch = tokens[:, :length], labels[:, :length]
        assert torch.equal(in_layers(layers, *batch), model(*batch))


def adding_to_long_ones(model, number, hidden, first):
    return hidden + first if hidden.shape[1] > 4 else hidden + 1


def test_what_travels_only_with_some_shapes_is_refused():
    model, (tokens, labels) = Between(adding_to_long_ones), micro_batch(NAME, 0)
    layers = layers_of(model)
    assert torch.equal(in_layers(layers, tokens[:, :3], labels[:, :3]), model(tokens[:, :3], labels[:, :3]))
    with pytest.raises(ConfigError, match="blocks get what 'embedding' returned .*, but got nothing of it in an ear"):
        in_layers(layers, tokens, labels)


class Summing(PositionsGpt):
    """Its blocks get, besides hidden states, a number from them."""

    def forward(self, tokens, labels):
        hidden = self.embedding(tokens) + self.positions[:, : tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, 1 + hidden.mean())
        return cross_entropy(self.head(hidden) * self.temperature, labels)


def test_blocks_may_get_more_of_the_block_before_them_than_hidden_states():
    assert_same(Summing(), *micro_batch(NAME, 0))


def dropping(model, number, hidden, first):
    return nn.functional.dropout(hidden, 0.5)


def test_random_numbers_between_blocks_are_those_of_a_layer():
    """They are drawn when the layer runs, so again when it is recomputed from the same seed."""
    layers, batch = layers_of(Between(dropping)), micro_batch(NAME, 0)
    losses = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        losses.append(in_layers(layers, *batch))
    assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])


class DroppingAlike(Between):
    """Drops the same elements after every block."""

    def forward(self, tokens, labels):
        kept = nn.functional.dropout(torch.ones(WIDTH), 0.5, self.training)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden) if block is self.blocks[3] else block(hidden) * kept
        return cross_entropy(self.head(hidden), labels)


def test_random_numbers_for_the_code_between_several_blocks_are_refused():
    """Each layer would draw its own."""
    with pytest.raises(ConfigError, match="what blocks get depends on random numbers .* before the blocks"):
        layers_of(DroppingAlike(None))


def in_place(model, number, hidden, first):
    hidden += 1
    return hidden


def norming(model, number, hidden, first):
    return model.norm(hidden)


def embedding_again(model, number, hidden, first):
    return hidden + model.embedding(torch.zeros(1, dtype=torch.int64))


def scaling_by_a_block(model, number, hidden, first):
    return hidden * model.blocks[0].out.bias


def remembering(model, number, hidden, first):
    model.__dict__.setdefault("seen", {})[number] = hidden
    return hidden + model.seen[0]


REFUSED = {
    in_place: "its forward changes hidden states in place between blocks",
    norming: "its module 'norm' runs between blocks",
    embedding_again: "its module 'embedding' runs before the blocks and again between them",
    scaling_by_a_block: "its forward computes between blocks with parameters, or with what an earlier block returned",
    remembering: "its forward computes between blocks with parameters, or with what an earlier block returned",
}


@pytest.mark.parametrize("between", REFUSED)
def test_what_belongs_to_no_layer_is_refused_between_blocks(between):
    with pytest.raises(ConfigError, match=REFUSED[between]):
        layers_of(Between(between))


LATER = {
    in_place: "the forward of the model changes hidden states in place between its blocks; .* compute a new tensor",
    remembering: "a block of the model gets what a block returned that is not the one right",
}


@pytest.mark.parametrize("between", LATER)
def test_it_is_refused_too_where_only_later_calls_do_it(between):
    model, batch, tokens = Between(between), micro_batch(NAME, 0), [[0] * 4]
    layers = layers_of(model, dummy_inputs={"tokens": tokens, "labels": tokens, "asked": False})
    with pytest.raises(ConfigError, match=LATER[between]):
        in_layers(layers, *batch, True)


class Sharing(Attention):
    """A block that keeps its hidden states in a dictionary for later ones, or reads them there."""

    def forward(self, hidden, shared, stores=False):
        hidden = super().forward(hidden)
        if stores:
            shared["first"] = hidden
        return hidden + shared.get("first", 0.0)


class SharingGpt(PositionsGpt):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Sharing(causal=True) for _ in range(3))

    def forward(self, tokens, labels):
        hidden, shared = self.embedding(tokens), {}
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, shared, stores=number == 1)
        return cross_entropy(self.head(hidden) * self.temperature, labels)


def test_what_blocks_hand_on_in_a_dictionary_is_refused():
    with pytest.raises(ConfigError, match="block 1 of the model changes a list or dictionary that it gets, .* return"):
        in_layers(layers_of(SharingGpt()), *micro_batch(NAME, 0))
