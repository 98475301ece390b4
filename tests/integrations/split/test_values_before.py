"""Modules before the blocks may look at values of tensors. Where they are, their results are known; other pipeline
ranks have to imagine them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ds_lgamp.config import ConfigError
from tests.integrations.split.own_models import LENGTH, VOCABULARY, WIDTH, Gpt, cross_entropy
from tests.integrations.split.splitting import assert_gradients, in_layers, in_layers_apart, layers_of
from tests.slow import examples


class Looking(nn.Module):
    """An embedding that then does what each of ``looks`` does with its result and the tokens."""

    def __init__(self, *looks):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(VOCABULARY, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.looks = looks

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for look in self.looks:
            hidden = look(self, hidden, tokens)
        return hidden


class LookingGpt(Gpt):
    def __init__(self, *looks):
        super().__init__(blocks=2)
        self.embedding = Looking(*looks)

    def forward(self, tokens, labels):
        first = self.embedding(tokens)
        hidden = self.through(first)
        # The last layer imagines it, too, and what travels.
        return cross_entropy(self.head(hidden + first), labels[:, : hidden.shape[1]])


def asserts(_, hidden, tokens):
    assert not torch.isnan(hidden).any()
    return hidden


def refuses(_, hidden, tokens):
    if not torch.isfinite(hidden).all():
        raise ValueError("not finite")
    return hidden


def clamps(_, hidden, tokens):
    return hidden.clamp(-1, 1) if hidden.abs().max() > 1 else hidden * 2


def compares(_, hidden, tokens):
    return hidden if torch.equal(hidden, 2 * hidden) or torch.allclose(hidden, -hidden) else hidden + 1


def masks(_, hidden, tokens):
    kept, large = torch.zeros_like(hidden), tokens[:, : hidden.shape[1]] > 3
    kept[large] = hidden[large]
    return kept


def scales(_, hidden, tokens):
    return hidden / hidden.detach().abs().max().item()


def selects(_, hidden, tokens):
    return hidden - hidden[hidden > 0].mean()


def cuts(_, hidden, tokens):
    return hidden if hidden.max() > 0.1 else hidden[:, :-1]


def packs(module, hidden, tokens):
    lengths = (tokens > 3).sum(1).clamp(1, hidden.shape[1])
    packed = pack_padded_sequence(hidden, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(module.rnn(packed)[0], batch_first=True, total_length=hidden.shape[1])[0]


def reads(_, hidden, tokens):
    return hidden * float(hidden.detach().numpy().max())


def distrusts(_, hidden, tokens):
    """Refuses imagined tensors, whatever the answers to its questions."""
    if type(hidden) is not Tensor:
        raise ValueError("no plain tensor")
    return hidden


ANYWHERE = [asserts, refuses, clamps, compares]
"""What other ranks can imagine."""
HERE = [scales, selects, cuts, packs, reads, distrusts]
"""What only the rank of the module can know."""


def batches() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (2, LENGTH), generator=draw) for _ in range(2)]


def assert_same(model: nn.Module, run, **block: object) -> None:
    layers = layers_of(model, **block)
    for tokens in batches():
        expected = model(tokens, tokens)
        loss = run(layers, tokens, tokens)
        assert torch.equal(loss, expected)
        assert_gradients(model, loss, expected, rtol=1e-5, atol=1e-7)


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.sampled_from([*ANYWHERE, *HERE, masks]), min_size=1, max_size=3))
def test_one_rank_knows_what_modules_before_its_blocks_return(looks):
    assert_same(LookingGpt(*looks), in_layers)


@settings(max_examples=examples(10), deadline=None)
@given(st.lists(st.sampled_from(ANYWHERE), min_size=1, max_size=3))
def test_ranks_imagine_what_other_answers_do_not_change(looks):
    assert_same(LookingGpt(*looks), in_layers_apart, pipeline_ranks=2)


@pytest.mark.parametrize("look", HERE)
def test_what_other_ranks_cannot_imagine_is_refused_by_name(look):
    with pytest.raises(ConfigError, match="module 'embedding' before the blocks returns cannot be known on"):
        layers_of(LookingGpt(look), pipeline_ranks=2)


def test_more_questions_than_can_be_tried_are_refused():
    def asks(_, hidden, tokens):
        for place in range(6):
            hidden = hidden + bool(hidden[0, 0, place] > 0)
        return hidden

    with pytest.raises(ConfigError, match="asks more than 5 questions"):
        layers_of(LookingGpt(asks), pipeline_ranks=2)
