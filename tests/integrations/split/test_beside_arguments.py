"""State reaches a block by its arguments, or as an attribute that the forward sets on it. By any other way it is
refused, because micro-batches take turns in a program."""

from contextvars import ContextVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.split import comparison
from ds_lgamp.integrations.split.call import Call
from ds_lgamp.integrations.split.state import Snapshot
from tests.integrations.split.own_models import LENGTH, VOCABULARY, WIDTH, cross_entropy
from tests.integrations.split.splitting import layers_of
from tests.slow import examples

GLOBAL: dict[str, object] = {}
CONTEXT: ContextVar[object] = ContextVar("kept", default=None)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.kept, self.tables = nn.Linear(WIDTH, WIDTH), None, {}

    def forward(self, hidden, factor):
        return torch.tanh(self.linear(hidden)) * factor


class Block(nn.Module):
    """A block whose factor comes by one of several ways."""

    def __init__(self, read, model):
        super().__init__()
        self.inner, self.kept, self.read = Inner(), None, read
        self.model = [model]

    def forward(self, hidden):
        factor = self.read(self)
        return hidden + self.inner(hidden, 1.0 if factor is None else factor)


class Model(nn.Module):
    """Computes a factor before its blocks, and hands it to them by ``way``."""

    def __init__(self, factor, way, blocks=4):
        super().__init__()
        self.embedding, self.head, self.gate = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY), Gate()
        self.write, read = way
        self.factor, self.kept = factor, None
        self.blocks = nn.ModuleList(Block(read, self) for _ in range(blocks))

    def forward(self, tokens, labels):
        hidden = self.embedding(tokens)
        factor = self.factor(self, tokens)
        for block in self.blocks:
            self.write(self, block, factor)
            hidden = block(hidden)
        return cross_entropy(self.head(hidden), labels)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, tokens):
        return self.weight * tokens.float().mean()


def on_block(_, block, factor):
    block.kept = factor


def on_part(_, block, factor):
    block.inner.kept = factor


def in_dictionary(_, block, factor):
    block.inner.tables["factor"] = factor


def on_model(model, _, factor):
    model.kept = factor


def in_global(_, __, factor):
    GLOBAL["kept"] = factor


def in_context(_, __, factor):
    CONTEXT.set(factor)


SET = {
    "an attribute": (on_block, lambda block: block.kept),
    "an attribute of a part": (on_part, lambda block: block.inner.kept),
    "an element of a dictionary": (in_dictionary, lambda block: block.inner.tables.get("factor")),
}
"""Ways that lead to a block."""
BESIDE = {
    "an attribute of the model": (on_model, lambda block: block.model[0].kept),
    "a global": (in_global, lambda _: GLOBAL.get("kept")),
    "a context variable": (in_context, lambda _: CONTEXT.get()),
}
"""Ways that pass by it."""
FACTORS = {
    "a tensor": lambda _, tokens: (tokens % 3).float().unsqueeze(-1),
    "a tensor with a gradient": lambda model, tokens: model.gate(tokens),
    "a number": lambda _, tokens: 1 + tokens.float().mean().item(),
    "sometimes nothing": lambda _, tokens: None if tokens[0, 0] % 2 else (tokens % 3).float().unsqueeze(-1),
}


def batches(seed):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (2, LENGTH), generator=draw) for _ in range(3)]


def in_turn(layers, micro_batches, ranks):
    """Computes micro-batches layer by layer, as programs do. Each of the ranks has calls and a model of its own."""
    calls = [[Call(*layers.arguments((each, each), {})) for each in micro_batches] for _ in range(ranks)]
    own = layers._split.own_state.modules
    models = [Snapshot(own) for _ in range(ranks)]
    values = [*calls[0]]
    for number, layer in enumerate(layers.modules):
        layers.calls.all = calls[number % ranks]
        models[number % ranks].restore()
        for micro_batch, value in enumerate(values):
            layers.calls.before_layer(number, micro_batch)
            values[micro_batch] = layer(value)
        models[number % ranks] = Snapshot(own)
    models[0].restore()
    return values


def trained(model, losses):
    model.zero_grad()
    sum(losses).backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return [loss.item() for loss in losses], gradients


@settings(max_examples=examples(25), deadline=None)
@given(
    st.sampled_from([*SET, *BESIDE]),
    st.sampled_from([*FACTORS]),
    st.integers(1, 2),
    st.integers(2, 4),
    st.integers(0, 99),
)
def test_every_micro_batch_has_its_own_state_or_the_model_is_refused(way, factor, ranks, blocks, seed):
    torch.manual_seed(seed)
    GLOBAL.clear()
    CONTEXT.set(None)
    model = Model(FACTORS[factor], {**SET, **BESIDE}[way], blocks)
    try:
        layers = layers_of(model, pipeline_ranks=ranks)
    except ConfigError as error:
        assert way in BESIDE or (factor == "sometimes nothing"), error
        return
    assert way in SET
    losses, gradients = trained(model, [model(each, each) for each in batches(seed)])
    found, others = trained(model, in_turn(layers, batches(seed), ranks))
    assert found == pytest.approx(losses, rel=1e-6)
    assert others.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("way", BESIDE)
@pytest.mark.parametrize("largest", [0, 10**6], ids=["too large to compare", "compared"])
def test_a_tensor_that_passes_by_arguments_is_refused_at_any_size(way, largest, monkeypatch):
    monkeypatch.setattr(comparison, "_LARGEST", largest)
    with pytest.raises(ConfigError, match="with a tensor of shape .1, 4, 1. that the forward of the model made"):
        layers_of(Model(FACTORS["a tensor"], BESIDE[way]))


@pytest.mark.parametrize("way", BESIDE)
def test_a_number_that_passes_by_arguments_is_refused(way):
    with pytest.raises(ConfigError, match="block 0 computes something else once two micro-batches take turns"):
        layers_of(Model(FACTORS["a number"], BESIDE[way]))


def test_constants_of_the_script_are_no_state():
    GLOBAL["kept"] = torch.rand(WIDTH)
    model = Model(lambda *_: None, (lambda *_: None, BESIDE["a global"][1]))
    layers = layers_of(model)
    (tokens, *_) = batches(1)
    assert torch.equal(in_turn(layers, [tokens], 1)[0], model(tokens, tokens))


class Recurrent(nn.Module):
    """A block whose module keeps its parameters in a list, too. It multiplies by one that ``holder`` has."""

    def __init__(self, holder):
        super().__init__()
        self.inner, self.holder = nn.GRU(WIDTH, WIDTH, batch_first=True), [holder or self]
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden):
        return self.inner(hidden)[0] * self.holder[0].scale


@pytest.mark.parametrize("limit", [None, 1], ids=["small", "large"])
def test_a_parameter_of_another_module_that_a_block_reads_is_refused(limit, monkeypatch):
    if limit is not None:
        monkeypatch.setattr(comparison, "_LARGEST", limit)
    model = Model(lambda *_: None, (lambda *_: None, lambda _: None))
    model.blocks = nn.ModuleList(Recurrent(None) for _ in range(3))
    layers_of(model)
    model.blocks[2].holder = [model.blocks[0]]
    with pytest.raises(ConfigError, match="block 2 computes with parameter 'blocks.0.scale', which the model holds"):
        layers_of(model)
