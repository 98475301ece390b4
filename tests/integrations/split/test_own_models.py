"""Models of one's own, split at their blocks, compute what they compute whole."""

import weakref
from queue import SimpleQueue
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_lgamp.config import ConfigError, LgampConfig
from ds_lgamp.integrations.deepspeed.plain.layers import layers_of as plain_layers_of
from ds_lgamp.integrations.split.call import Call
from ds_lgamp.integrations.split.outputs import NotInTraining
from tests.integrations.split.own_models import (
    IMAGES,
    MODELS,
    VOCABULARY,
    WIDTH,
    Attention,
    PositionsGpt,
    RotaryGpt,
    TiedGpt,
    cross_entropy,
    loss_of,
    make,
    micro_batch,
)
from tests.integrations.split.splitting import OwnModelLayers, assert_gradients, in_layers, layers_of, split


class Split(NamedTuple):
    """A model, split."""

    name: str
    model: nn.Module
    layers: OwnModelLayers


@pytest.fixture(scope="module", params=MODELS)
def each(request):
    """Splits every model once, for all tests of all models."""
    model = make(request.param)
    return Split(request.param, model, split(request.param, model))


def test_blocks_get_what_they_do_where_nothing_before_them_is(each, monkeypatch):
    """As on a rank that has only blocks."""
    name, _, layers = each
    call = Call(*layers.arguments(micro_batch(name, 0)[: 1 if name == "a classifier" else 2], {}))
    first, block = layers.modules[:2]
    for parameter in first.parameters():
        monkeypatch.setattr(parameter, "data", torch.empty(0, dtype=parameter.dtype))
    block._split.needs_of(call)
    blocks = call.blocks or block._split.dry_run_without_parts(call)[0].blocks
    assert len(blocks) == 3 and all(each.positional == () or each.in_tuple for each in blocks)


def test_layers_compute_what_the_model_does(each):
    name, model, layers = each
    batch = micro_batch(name, 0)
    expected = loss_of(name, model, batch)
    loss = loss_of(name, lambda *arguments: in_layers(layers, *arguments), batch)
    assert torch.equal(loss, expected)
    assert_gradients(model, loss, expected)


def test_every_parameter_is_in_a_layer_under_its_own_name(each):
    _, model, layers = each
    found = {key: value for layer in layers.modules for key, value in layer.named_parameters(remove_duplicate=False)}
    assert found.keys() == {key for key, _ in model.named_parameters(remove_duplicate=False)}
    assert all(value is model.get_parameter(key) for key, value in found.items())


def test_layers_compute_in_inference_mode(each):
    name, model, layers = each
    batch = micro_batch(name, 0)
    with torch.inference_mode():
        loss = loss_of(name, lambda *arguments: in_layers(layers, *arguments), batch)
        assert torch.equal(loss, loss_of(name, model, batch))


def test_the_small_forward_leaves_nothing_in_memory():
    # What a hook has put into a list is taken back.
    model, outputs = make("a tied GPT"), SimpleQueue()
    model.register_forward_hook(lambda _module, _arguments, output: outputs.put(weakref.ref(output[0])))
    layers = layers_of(model)
    assert outputs.get()() is None and len(layers.modules) == 5


def test_in_training_the_loss_is_the_only_tensor_of_the_output():
    layers, loss = layers_of(make("a tied GPT")), torch.tensor(1.0)
    logits, told = layers.training_output(loss)
    assert told is loss
    with pytest.raises(NotInTraining, match="has only the loss, not its other tensors, .*; set it to 'all'"):
        logits.argmax(-1)
    with pytest.raises(NotInTraining):
        torch.softmax(logits, -1)


class Twice(TiedGpt):
    """Reads what it computed before the blocks after them, too."""

    def forward(self, idx, targets=None):
        logits, loss = super().forward(idx, targets)
        return logits, loss if loss is None else loss + self.transformer["wpe"].weight.pow(2).mean()


class ReadsTwice(nn.Module):
    """Scales before its blocks and after them, by one parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale).sum()


class NoList(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x):
        return self.one(x).sum()


class Shrinking(ReadsTwice):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 2), nn.Linear(2, 4)])


class WithoutGradients(TiedGpt):
    """Does not train its blocks."""

    def forward(self, idx, targets=None):
        with torch.no_grad():
            return super().forward(idx, targets)


class CheckpointingReentrantly(PositionsGpt):
    def forward(self, tokens, labels):
        hidden = self.embedding(tokens) + self.positions[:, : tokens.shape[1]]
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=True)
        return cross_entropy(self.head(hidden) * self.temperature, labels)


TOKENS = {"x": [[0.5, 1.0, 2.0, 3.0]]}
REFUSED = {
    "a model without blocks": (NoList, {}, "NoList has no list of blocks"),
    "blocks that change the shape": (Shrinking, {"dummy_inputs": TOKENS}, "something else than tensors of the shape t"),
    "blocks that do not train": (WithoutGradients, {}, "blocks 'transformer.h' without gradients, .*; freeze the "),
    "reentrant checkpointing": (CheckpointingReentrantly, {}, "and take reentrant checkpointing out of the forward"),
    "inputs that do not fit": (MODELS["a classifier"], {"outputs": "all"}, r"images \[1, 4\]: .*; set ds_lgamp.dummy_"),
    "inputs without numbers": (
        ReadsTwice,
        {"dummy_inputs": {"x": {"dtype": "int"}}},
        r"dummy_inputs.x is \{'dtype': 'int'\}",
    ),
    "a model without a loss": (MODELS["a classifier"], {"dummy_inputs": IMAGES}, "returned 0 numbers with a gradient"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused(name):
    make, settings, sentence = REFUSED[name]
    with pytest.raises(ConfigError, match=sentence) as refused:
        layers_of(make(), **settings)
    assert "failed with ConfigError" not in str(refused.value), "a refusal is said as it is"


class Scaled(PositionsGpt):
    """Asked for it, it uses before the blocks a parameter that it otherwise uses after them."""

    def forward(self, tokens, labels, early=False):
        hidden = self.embedding(tokens) * (self.temperature if early else 1)
        return cross_entropy(self.head(self.blocks(hidden)) * (1 if early else self.temperature), labels)


def test_a_parameter_that_other_arguments_use_before_the_blocks_is_refused():
    model, batch = Scaled(), micro_batch("a GPT with positions", 0)
    sentence = "'temperature' is used before the model's blocks, .*; set ds_lgamp.dummy_inputs to arguments such as"
    with pytest.raises(ConfigError, match=sentence):
        in_layers(layers_of(model), *batch, True)
    tokens = torch.zeros(1, 4, dtype=torch.int64).tolist()
    layers = layers_of(model, dummy_inputs={"tokens": tokens, "labels": tokens, "early": True})
    assert torch.equal(in_layers(layers, *batch, True), model(*batch, True))


class Optional(nn.Module):
    """Takes pictures, and predicts another thing, if it is asked for."""

    def __init__(self):
        super().__init__()
        self.encoder, self.embedding = nn.Linear(3, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Attention(causal=True) for _ in range(3)))
        self.head, self.other_head = nn.Linear(WIDTH, VOCABULARY), nn.Linear(WIDTH, 1)

    def forward(self, tokens, labels, picture=None, other=None):
        hidden = self.embedding(tokens)
        if picture is not None:
            hidden = hidden + self.encoder(picture)[:, None]
        hidden = self.blocks(hidden)
        loss = cross_entropy(self.head(hidden), labels)
        return loss if other is None else loss + (self.other_head(hidden).mean() - other).square()


def test_what_the_dummy_inputs_do_not_need_belongs_to_the_end_at_which_the_model_has_it():
    model, batch = Optional(), micro_batch("a GPT with positions", 0)
    layers = layers_of(model)
    first, *_, last = layers.modules
    assert any("encoder" in name for name, _ in first.named_parameters())
    assert any("other_head" in name for name, _ in last.named_parameters())
    for others in ((), (torch.ones(2, 3),), (torch.ones(2, 3), torch.tensor(2.0))):
        expected = model(*batch, *others)
        loss = in_layers(layers, *batch, *others)
        assert torch.equal(loss, expected)
        assert_gradients(model, loss, expected)


class Denoising(PositionsGpt):
    """Learns to tell the noise that it adds before the blocks."""

    def forward(self, tokens, labels):
        hidden = self.embedding(tokens)
        noise = torch.randn_like(hidden)
        return (self.blocks(hidden + noise) * self.temperature - noise).pow(2).mean() + self.head(
            hidden.detach()
        ).mean()


class DenoisingInTraining(Denoising):
    def forward(self, tokens, labels):
        if self.training:
            return super().forward(tokens, labels)
        return PositionsGpt.forward(self, tokens, labels)


class Reweighted(PositionsGpt):
    """Counts, for its loss, the tokens whose embeddings are large."""

    def forward(self, tokens, labels):
        hidden = self.embedding(tokens)
        large = (hidden.detach().norm(dim=-1) > 0).sum()
        return cross_entropy(self.head(self.blocks(hidden)), labels) * large


class Dropping(RotaryGpt):
    """Drops, at random, from what its blocks get besides hidden states."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens, labels):
        hidden, rotation = self.embedding(tokens), self.drop(self.rotation[: tokens.shape[1]])
        for layer in self.layers.values():
            hidden = layer(hidden, rotation)
        return cross_entropy(self.head(hidden), labels)


@pytest.mark.parametrize("make", [Denoising, DenoisingInTraining, Reweighted])
def test_an_output_that_depends_on_random_numbers_or_values_from_before_the_blocks_is_refused(make):
    with pytest.raises(
        ConfigError, match="what the model returns depends on random numbers .*; give the engine random"
    ):
        layers_of(make())


class DropsArguments(nn.Module):
    """Compares, after its blocks, with what it has dropped at random of its arguments before them."""

    def __init__(self):
        super().__init__()
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Attention(causal=True) for _ in range(2))

    def forward(self, images):
        hidden = kept = self.drop(images)
        for block in self.blocks:
            hidden = block(hidden)
        return (self.head(hidden) - kept).square().mean()


class DropsPadding(DropsArguments):
    """Embeds the token of its dummy inputs as zeros."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.cat([torch.zeros(1, WIDTH), torch.rand(VOCABULARY - 1, WIDTH)]))

    def forward(self, tokens):
        return super().forward(self.table[tokens])


@pytest.mark.parametrize(
    ("make", "dummy_inputs"), [(DropsArguments, {"images": {"shape": [2, 3, WIDTH]}}), (DropsPadding, None)]
)
def test_random_numbers_that_dummy_inputs_of_zeros_hide_are_refused(make, dummy_inputs):
    with pytest.raises(ConfigError, match="what the model returns depends on random numbers"):
        layers_of(make(), dummy_inputs=dummy_inputs)


def test_blocks_that_get_random_numbers_from_before_them_need_one_pipeline_rank():
    torch.manual_seed(0)
    model, batch = Dropping(), micro_batch("a GPT with rotations", 0)
    layers = layers_of(model)
    torch.manual_seed(1)
    expected = model(*batch)
    torch.manual_seed(1)
    assert torch.equal(in_layers(layers, *batch), expected)
    with pytest.raises(ConfigError, match="what blocks get besides hidden states depends on random numbers"):
        layers_of(Dropping(), pipeline_ranks=2)


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = TiedGpt()
    with pytest.raises(ConfigError, match="parameter transformer.wte.weight is on the meta device and has no values"):
        plain_layers_of(model, (), LgampConfig())


class ManyTables(nn.Module):
    """Has a list before its blocks with more parameters than they have."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(1000, WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(Attention(causal=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, labels):
        hidden = self.tables[0](tokens) + self.tables[1](tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return cross_entropy(self.head(hidden), labels)


def test_a_model_is_split_at_the_list_that_the_block_names():
    model, batch = ManyTables(), micro_batch("a GPT with positions", 0)
    with pytest.raises(ConfigError, match="at its blocks 'tables': .* name another list in ds_lgamp.blocks"):
        layers_of(model)
    layers = layers_of(model, blocks="layers")
    assert len(layers.modules) == 4
    assert torch.equal(in_layers(layers, *batch), model(*batch))


def test_a_list_that_the_model_lacks_is_refused():
    with pytest.raises(
        ConfigError, match="ds_lgamp.blocks is 'h', but the lists of ManyTables are tables, layers; name"
    ):
        layers_of(ManyTables(), blocks="h")


class Balanced(nn.Module):
    """A block with experts: one of its modules keeps a term of the loss, in training only."""

    def __init__(self, initial):
        super().__init__()
        self.attention, self.router = Attention(causal=True), nn.Linear(WIDTH, 2)
        self.router.balance = initial

    def forward(self, hidden):
        choice = self.router(hidden).softmax(-1)
        if self.training:
            self.router.balance = choice.mean((0, 1)).square().sum()
        return self.attention(hidden) * choice[..., :1]


class Experts(PositionsGpt):
    def __init__(self, adds, initial=0.0):
        super().__init__()
        self.adds, self.blocks = adds, nn.Sequential(*(Balanced(initial) for _ in range(3)))

    def forward(self, tokens, labels):
        loss = super().forward(tokens, labels)
        return loss + sum(block.router.balance for block in self.blocks) if self.adds else loss


@pytest.mark.parametrize("initial", [0.0, None])
def test_blocks_may_keep_tensors_in_attributes(initial):
    model, batch = Experts(False, initial), micro_batch("a GPT with positions", 0)
    layers = layers_of(model)
    assert all(block.router.balance == initial for block in model.blocks)
    assert torch.equal(in_layers(layers, *batch), model(*batch))


def test_a_term_that_blocks_keep_in_attributes_is_refused_in_the_loss():
    """On several pipeline ranks it would be an old one."""
    with pytest.raises(ConfigError, match="after the blocks the model reads 'router.balance' of a block"):
        layers_of(Experts(True))


class Doubled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_sequence_with_a_forward_of_its_own_is_not_run_without_it():
    with pytest.raises(ConfigError, match="Doubled has no list of blocks"):
        plain_layers_of(Doubled(nn.Linear(4, 4), nn.MSELoss()), (), LgampConfig())


def test_another_output_than_for_the_dummy_inputs_is_refused():
    layers = layers_of(make("a tied GPT").eval())
    output = in_layers(layers, micro_batch("a tied GPT", 0)[0])
    with pytest.raises(ConfigError, match="something else than for its dummy inputs"):
        layers.loss_of(output)
