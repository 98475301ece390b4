"""Ranks that hold other layers agree about what travels, whatever decides which code of a forward runs."""

import pytest
import torch
from torch import nn

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.split.call import Call
from tests.integrations.split.own_models import VOCABULARY, WIDTH, Attention, Gpt, cross_entropy, micro_batch
from tests.integrations.split.splitting import assert_same, in_layers, in_layers_apart, layers_of
from tests.integrations.split.test_travelling import NAME

BATCH = micro_batch(NAME, 0)
DUMMY = {"tokens": [[0] * 4], "labels": [[0] * 4]}


class Adding(Attention):
    """A block that adds another tensor to its hidden states."""

    def forward(self, hidden, added=None):
        return super().forward(hidden if added is None else hidden + added)


class AddingGpt(Gpt):
    def __init__(self):
        super().__init__(Adding)


class Tasks(AddingGpt):
    """Its blocks get the parameter of a task."""

    def __init__(self):
        super().__init__()
        self.tasks = nn.ParameterList(torch.randn(WIDTH) for _ in range(3))

    def forward(self, tokens, labels, task):
        hidden = self.embedding(tokens)
        return cross_entropy(self.head(self.through(hidden, self.tasks[int(task)])), labels)


@pytest.mark.parametrize("number", [int, torch.tensor])
def test_a_number_may_decide_what_travels(number):
    model = Tasks()
    layers = layers_of(model, dummy_inputs={**DUMMY, "task": 0})
    for task in map(number, range(3)):
        assert torch.equal(in_layers_apart(layers, *BATCH, task), model(*BATCH, task))


class ScalingTasks(Tasks):
    """Its blocks get what it computes from the parameter of a task."""

    def forward(self, tokens, labels, task):
        hidden = self.embedding(tokens)
        return cross_entropy(self.head(self.through(hidden, 2 * self.tasks[task])), labels)


def test_a_number_may_decide_of_what_blocks_get_something():
    model = ScalingTasks()
    layers = layers_of(model, dummy_inputs={**DUMMY, "task": 0})
    for task in range(3):
        assert torch.equal(in_layers_apart(layers, *BATCH, task), model(*BATCH, task))


class LongOnes(AddingGpt):
    def forward(self, tokens, labels):
        hidden = first = self.embedding(tokens)
        return cross_entropy(self.head(self.through(hidden, first if tokens.shape[1] > 4 else None)), labels)


def test_a_length_may_decide_what_travels():
    model, short = LongOnes(), [each[:, :4] for each in BATCH]
    layers = layers_of(model, dummy_inputs=DUMMY)
    for batch in (short, BATCH):
        assert torch.equal(in_layers_apart(layers, *batch), model(*batch))


class InEvaluation(AddingGpt):
    def forward(self, tokens, labels):
        hidden = first = self.embedding(tokens)
        return cross_entropy(
            self.head(self.through(hidden, torch.zeros_like(hidden) if self.training else 2 * first)), labels
        )


def test_the_mode_may_decide_what_travels():
    model = InEvaluation()
    layers = layers_of(model)
    for training in (True, False):
        model.train(training)
        assert torch.equal(in_layers_apart(layers, *BATCH), model(*BATCH))


class Encoder(nn.Module):
    """Returns other things in training."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding, self.linear = embedding, nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        memory = self.linear(self.embedding(tokens))
        return (memory, memory.square()) if self.training else memory


class Encoding(AddingGpt):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder(nn.Embedding(VOCABULARY, WIDTH))

    def forward(self, tokens, labels):
        memory, hidden = self.encoder(tokens), self.embedding(labels)
        return cross_entropy(self.head(self.through(hidden, sum(memory) if self.encoder.training else memory)), labels)


def test_a_part_may_return_other_things_in_training():
    """Also for shapes that it has seen in evaluation."""
    model, batch = Encoding(), [each[:1, :4] for each in BATCH]
    layers = layers_of(model, dummy_inputs=DUMMY)
    for training in (True, False):
        model.train(training)
        assert torch.equal(in_layers_apart(layers, *batch), model(*batch))


class Casting(AddingGpt):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens, labels):
        hidden = self.linear(self.embedding(tokens))
        added = torch.full([WIDTH], 1.2345678).to(hidden.dtype)
        return cross_entropy(self.head(self.through(hidden, added)), labels)


def test_blocks_get_the_dtype_of_their_own_call():
    layers = layers_of(Casting())
    call = Call(*layers.arguments(BATCH, {}))
    for enabled, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        with torch.autocast("cpu", torch.bfloat16, enabled):
            run, _ = layers.modules[1]._split.dry_run_without_parts(call)
        assert run.blocks[0].positional[0].dtype is dtype


class SharingModule(AddingGpt):
    """Its encoder has the module that embeds for its blocks, too, and calls it first."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder(self.embedding).eval()

    def forward(self, tokens, labels):
        memory, hidden = self.encoder(tokens), self.embedding(labels)
        first = hidden
        hidden = self.through(hidden, memory * first)
        return cross_entropy(self.head(hidden + first), labels)


def test_two_parts_may_share_a_module():
    assert_same(SharingModule(), *BATCH)


class Chunking(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 2 * WIDTH)

    def forward(self, tokens):
        return self.embedding(tokens).chunk(2, dim=-1)


class Modulating(AddingGpt):
    """Scales and shifts after its blocks."""

    def __init__(self, modulate):
        super().__init__()
        self.chunking, self.modulate = Chunking(), modulate

    def forward(self, tokens, labels):
        hidden, modulation = self.embedding(tokens), self.chunking(labels)
        hidden = self.through(hidden)
        return cross_entropy(self.head(self.modulate(hidden, *modulation)), labels)


@pytest.mark.parametrize(
    "modulate", [lambda hidden, scale, shift: scale * hidden, lambda hidden, scale, shift: scale * hidden + shift]
)
def test_each_of_the_chunks_of_one_tensor_travels(modulate):
    assert_same(Modulating(modulate), *BATCH)


class Distilling(AddingGpt):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)

    def forward(self, tokens, labels):
        with torch.no_grad():
            target = self.teacher(tokens)
        hidden = self.embedding(tokens)
        hidden = self.through(hidden)
        return cross_entropy(self.head(hidden), labels) + (hidden - target).square().mean()


def test_what_a_part_returns_under_no_grad_travels():
    assert_same(Distilling(), *BATCH)


class AddingAfter(AddingGpt):
    def forward(self, tokens, labels, asked):
        hidden = first = self.embedding(tokens)
        hidden = self.through(hidden)
        return cross_entropy(self.head(hidden + first if asked else hidden), labels)


def test_every_kind_of_call_is_looked_at_after_the_blocks():
    layers = layers_of(AddingAfter(), dummy_inputs={**DUMMY, "asked": False})
    in_layers(layers, *BATCH, False)
    with pytest.raises(ConfigError, match="output depends on what 'embedding' returned before them"):
        in_layers(layers, *BATCH, True)


class Differences(AddingGpt):
    """Its blocks may get the difference of what the two blocks before them returned."""

    def forward(self, tokens, labels, asked):
        hidden = before = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            before, hidden = hidden, block(hidden, hidden - before if asked and number > 1 else None)
        return cross_entropy(self.head(hidden), labels)


def test_differences_of_what_blocks_returned_are_refused():
    layers = layers_of(Differences(), dummy_inputs={**DUMMY, "asked": False})
    with pytest.raises(ConfigError, match="a block of the model gets what a block returned that is not the one right"):
        in_layers(layers, *BATCH, True)


class Means(AddingGpt):
    def forward(self, tokens, labels, asked):
        hidden = self.embedding(tokens)
        return cross_entropy(self.head(self.through(hidden, 1 + hidden.mean() if asked else None)), labels)


@torch.no_grad()
def test_blocks_may_get_the_mean_of_many_hidden_states():
    """A mean of random numbers is close to that of others."""
    model, batch = Means(), [each.repeat(20000, 1) for each in BATCH]
    layers = layers_of(model, dummy_inputs={**DUMMY, "asked": False})
    assert torch.allclose(in_layers(layers, *batch, True), model(*batch, True))
