"""Blocks that lie in an nn.Sequential between other modules, as an embedding, layers, a norm and a head do."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_lgamp.config import ConfigError
from tests.integrations.split.own_models import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    Attention,
    Function,
    InOneTuple,
    MaskedEmbedding,
    cross_entropy,
    micro_batch,
)
from tests.integrations.split.splitting import (
    assert_gradients,
    assert_same,
    in_layers,
    in_layers_apart,
    layers_of,
)
from tests.slow import examples, slow_except

BATCH = micro_batch("a GPT", 0)


class Block(Attention):
    def __init__(self):
        super().__init__(causal=True)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, hidden):
        return hidden + self.table[: hidden.shape[1]]


def by_loop(layers, value):
    for layer in layers:
        value = layer(value)
    return value


def by_indices(layers, value):
    for index in range(len(layers)):
        value = layers[index](value)
    return value


def by_slices(layers, value):
    for start in range(0, len(layers), 2):
        value = layers[start : start + 2](value)
    return value


def checkpointed(layers, value):
    """Checkpoints two members at a time, as GPT-NeoX does."""
    for start in range(0, len(layers), 2):
        value = checkpoint(partial(by_loop, layers[start : start + 2]), value, use_reentrant=False)
    return value


WAYS = {
    "a loop": by_loop,
    "a call": lambda layers, value: layers(value),
    "indices": by_indices,
    "slices": by_slices,
    "checkpoints": checkpointed,
}


class Wrapper(nn.Module):
    """Holds an nn.Sequential of everything, and computes the loss."""

    def __init__(self, members, way, takes_pair=False):
        super().__init__()
        self.sequential, self.way, self.takes_pair = nn.Sequential(*members), way, takes_pair

    def forward(self, tokens, labels):
        given = (tokens, tokens[..., None] % 5 == 0) if self.takes_pair else tokens
        return cross_entropy(WAYS[self.way](self.sequential, given), labels)


BESIDE = st.lists(st.sampled_from([Positions, lambda: nn.LayerNorm(WIDTH), lambda: Function(torch.tanh)]), max_size=3)


@settings(max_examples=examples(25), deadline=None)
@given(BESIDE, st.integers(2, 4), BESIDE, st.sampled_from([*WAYS]), st.booleans(), st.sampled_from([1, 2]))
def test_a_run_of_blocks_between_other_modules_computes_the_same(before, blocks, after, way, ties, ranks):
    torch.manual_seed(0)
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    if ties:
        head.weight = embedding.weight
    run = [Block() for _ in range(blocks)]
    model = Wrapper([embedding, *(each() for each in before), *run, *(each() for each in after), head], way)
    first, end = 1 + len(before), 1 + len(before) + blocks
    if way == "checkpoints" and end % 2 and not isinstance(model.sequential[end], Positions):
        # Adding positions saves no tensor.
        with pytest.raises(ConfigError, match="checkpoints its blocks 'sequential' together with other code"):
            layers_of(model, pipeline_ranks=ranks)
        return
    layers = layers_of(model, pipeline_ranks=ranks)
    numbers = [int(name) for each in layers.modules[1:-1] for name in each.sequential._modules]
    assert numbers == [*range(first, end)]
    names = {name for module in layers.modules for name, _ in module.named_parameters()}
    assert names == {name for name, _ in model.named_parameters()}
    for run in (in_layers, in_layers_apart):
        expected, loss = model(*BATCH), run(layers, *BATCH)
        assert torch.equal(loss, expected)
        assert_gradients(model, loss, expected, rtol=1e-5, atol=1e-7)


def paired_members():
    torch.manual_seed(0)
    members = [MaskedEmbedding(), Function(lambda pair: (pair[0] * 2, pair[1])), *(InOneTuple() for _ in range(3))]
    return [*members, Function(lambda pair: pair[0]), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("ranks", "run"),
    slow_except(
        [(1, in_layers), (2, in_layers_apart)],
        [(1, in_layers), (2, in_layers), (2, in_layers_apart)],
        several=True,
    ),
)
def test_blocks_may_pass_a_tuple_on(way, ranks, run):
    model = Wrapper(paired_members(), way, takes_pair=True)
    assert_same(model, *BATCH, run=run, pipeline_ranks=ranks, blocks="sequential")


class Logits(Wrapper):
    """Returns no loss. Checkpoints its last block with what follows it."""

    def forward(self, tokens):
        return checkpointed(self.sequential, tokens)


@pytest.mark.parametrize("outputs", ["loss", "all"])
def test_checkpoints_of_a_block_with_what_follows_it_are_refused_whoever_computes_the_loss(outputs):
    members = [nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), Function(torch.tanh), nn.Linear(WIDTH, VOCABULARY)]
    with pytest.raises(ConfigError, match="checkpoints its blocks 'sequential' together with other code"):
        layers_of(Logits(members, "") if outputs == "all" else Wrapper(members, "checkpoints"), outputs=outputs)


class Between(Wrapper):
    """Checkpoints two blocks with what is between them."""

    def forward(self, tokens, labels):
        embedding, *blocks, head = self.sequential
        hidden = checkpoint(
            lambda hidden: blocks[1](torch.tanh(blocks[0](hidden))), embedding(tokens), use_reentrant=False
        )
        return cross_entropy(head(hidden), labels)


def test_checkpoints_of_blocks_with_what_is_between_them_are_refused():
    members = [nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), nn.Linear(WIDTH, VOCABULARY)]
    with pytest.raises(ConfigError, match="checkpoints its blocks 'sequential' together with other code"):
        layers_of(Between(members, ""))


def test_of_several_runs_the_one_with_most_parameters_is_the_blocks():
    torch.manual_seed(0)
    stem, norms = [Positions(), Positions()], [nn.LayerNorm(WIDTH) for _ in range(4)]
    members = [nn.Embedding(VOCABULARY, WIDTH), *stem, Block(), Block(), *norms, nn.Linear(WIDTH, VOCABULARY)]
    layers = layers_of(Wrapper(members, "a loop"))
    assert [type(each).__name__ for each in layers.modules] == ["Beginning", "Block", "Block", "End"]
    assert {name.split(".")[1] for name, _ in layers.modules[0].named_parameters()} == {"0", "1", "2"}


def test_a_sequential_without_a_run_is_no_list():
    members = [nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCABULARY)]
    with pytest.raises(ConfigError, match="Wrapper has no list of blocks"):
        layers_of(Wrapper(members, "a loop"))
    with pytest.raises(ConfigError, match="no list of blocks|the lists of Wrapper are"):
        layers_of(Wrapper(members, "a loop"), blocks="sequential")


class TwoLists(nn.Module):
    """Its embedding is larger than all blocks, and in a sequence with two norms."""

    def __init__(self):
        super().__init__()
        norms = [nn.LayerNorm(WIDTH) for _ in range(2)]
        self.features = nn.Sequential(nn.Embedding(100 * VOCABULARY, WIDTH), *norms)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, labels):
        return cross_entropy(self.head(by_loop(self.blocks, self.features(tokens))), labels)


def test_what_lies_beside_a_run_does_not_count_for_it():
    assert len(layers_of(TwoLists()).modules) == 4
    assert all("blocks" in each._modules for each in layers_of(TwoLists()).modules[1:-1])
    assert_same(TwoLists(), *BATCH, blocks="features")
