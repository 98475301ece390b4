"""Blocks of several kinds, in lists of lists, and in another order than that of their list."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.split.call import Call
from ds_lgamp.integrations.split.parts import find_blocks
from tests.integrations.split.own_models import WIDTH, Gpt, cross_entropy, micro_batch
from tests.integrations.split.splitting import assert_gradients, in_layers, in_layers_apart, layers_of
from tests.slow import examples

BATCH = micro_batch("a GPT", 0)


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + torch.tanh(self.linear(hidden))


class Recurrent(Mixing):
    """Keeps a state in a module that other blocks lack."""

    def __init__(self):
        super().__init__()
        self.memory = nn.Module()
        self.memory.gate = nn.Linear(WIDTH, WIDTH)
        self.memory.state = None

    def forward(self, hidden):
        self.memory.state = self.memory.gate(hidden[:, -1])
        return super().forward(hidden * self.memory.state[:, None])


class Scaled(Mixing):
    """Takes a factor, which the forward gives to blocks of this class."""

    def forward(self, hidden, factor=1.0):
        return super().forward(factor * hidden)


KINDS = [Mixing, Recurrent, Scaled]


class Model(Gpt):
    def __init__(self, blocks, walk):
        super().__init__()
        self.blocks, self.walk = blocks, walk

    def forward(self, tokens, labels):
        hidden = self.embedding(tokens)
        for block in self.walk(self.blocks):
            hidden = block(hidden, 0.5) if isinstance(block, Scaled) else block(hidden)
        return cross_entropy(self.head(hidden), labels)


def assert_same(model):
    layers = layers_of(model)
    for run in (in_layers, in_layers_apart):
        expected, loss = model(*BATCH), run(layers, *BATCH)
        assert torch.equal(loss, expected)
        assert_gradients(model, loss, expected)


def leaves(container):
    """Walks through lists in lists, and dictionaries in lists."""
    for each in container.values() if isinstance(container, nn.ModuleDict) else container:
        if isinstance(each, nn.ModuleList | nn.ModuleDict):
            yield from leaves(each)
        else:
            yield each


NESTED = st.recursive(
    st.sampled_from(KINDS), lambda inner: st.lists(inner, min_size=1, max_size=3).map(tuple), max_leaves=6
).filter(lambda drawn: isinstance(drawn, tuple))


def made(drawn):
    """Makes what was drawn: a block, or a list or dictionary of such."""
    if not isinstance(drawn, tuple):
        return drawn()
    modules = [made(each) for each in drawn]
    return nn.ModuleDict(zip("ab", modules)) if len(modules) == 2 else nn.ModuleList(modules)


@settings(max_examples=examples(25), deadline=None)
@given(NESTED)
def test_blocks_of_any_kinds_in_any_lists_compute_what_they_do_in_the_model(drawn):
    torch.manual_seed(0)
    assert_same(Model(nn.ModuleList([made(drawn)]), leaves))


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_blocks_in_another_order_than_that_of_their_list_are_refused(order):
    torch.manual_seed(0)
    model = Model(nn.ModuleList(Mixing() for _ in range(4)), lambda blocks: [blocks[number] for number in order])
    if order == [0, 1, 2, 3]:
        return assert_same(model)
    with pytest.raises(ConfigError, match="its forward calls them in another order than that of the list, or one"):
        layers_of(model)


def test_an_order_that_changes_later_is_refused():
    model = Model(nn.ModuleList(Mixing() for _ in range(3)), list)
    layers = layers_of(model)
    for order in ([0, 2], [0, 2, 1], [1, 0, 2], [0, 0, 2]):
        model.walk = lambda blocks, order=order: [blocks[number] for number in order]
        with pytest.raises(ConfigError, match="skipped blocks, or called them in another order"):
            in_layers(layers, *BATCH)


@pytest.mark.parametrize("walk", [lambda pairs: [each for pair in pairs for each in pair], lambda pairs: [pairs[0][1]]])
def test_a_forward_that_takes_blocks_apart_is_refused_with_a_fix(walk):
    model = Model(nn.ModuleList(nn.Sequential(Mixing(), Mixing()) for _ in range(2)), walk)
    with pytest.raises(ConfigError, match="takes modules out of a Sequential .*; with .* let it be an nn.ModuleList"):
        layers_of(model)


def test_a_forward_may_ask_a_block_for_its_length_and_for_its_truth():
    def walk(blocks):
        return [block for block in blocks if block and len(block) == 2]

    assert_same(Model(nn.ModuleList(nn.Sequential(Mixing(), Mixing()) for _ in range(2)), walk))


class Keeping(Mixing):
    """Keeps a term of the loss in an attribute."""

    def forward(self, hidden):
        self.term = self.linear(hidden).square().mean()
        return super().forward(hidden)


class Collecting(Model):
    def forward(self, tokens, labels):
        loss = super().forward(tokens, labels)
        return loss + sum(getattr(block, "term", 0.0) for block in self.blocks)


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(st.sampled_from([Mixing, Scaled, Keeping]), min_size=2, max_size=4), st.booleans())
def test_terms_that_blocks_of_any_kind_keep_are_refused_also_where_these_never_run(kinds, runs):
    model = Collecting(nn.ModuleList(kind() for kind in kinds), list)
    if Keeping not in kinds:
        return assert_same(model)
    with pytest.raises(ConfigError, match="reads 'term' of a block|depends on what a block computes, but not through"):
        layers = layers_of(model)
        if runs:
            in_layers(layers, *BATCH)
        layers.calls.all = [Call(*layers.arguments(BATCH, {}))]
        layers.modules[-1](torch.randn(*BATCH[0].shape, WIDTH))


def test_a_model_may_have_an_attribute_inside():
    model = Gpt()
    path = find_blocks(model, None).path
    model.inside = nn.Linear(WIDTH, WIDTH)
    assert find_blocks(model, None).path == path
