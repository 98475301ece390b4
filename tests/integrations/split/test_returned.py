"""Blocks may return more than hidden states, in any nesting, and what follows them may compute with it."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.split import comparison
from ds_lgamp.integrations.split.call import Call
from tests.integrations.split.own_models import VOCABULARY, WIDTH, Attention, cross_entropy
from tests.integrations.split.splitting import assert_gradients, in_layers, layers_of
from tests.slow import examples


def without_gradients(block, logits):
    with torch.no_grad():
        return block.router.weight.mean() * logits.sum()


RETURNED = {
    "logits": lambda block, logits: logits,
    "a number": lambda block, logits: logits.logsumexp(-1).square().mean(),
    "a detached number": lambda block, logits: logits.mean().detach(),
    "a number without gradients": without_gradients,
    "choices": lambda block, logits: logits.argmax(-1),
    "counts": lambda block, logits: torch.bincount(logits.argmax(-1).flatten(), minlength=5),
    "a mask": lambda block, logits: logits > 0,
    "nothing": lambda block, logits: None,
    "a constant": lambda block, logits: 0.25,
    "a list": lambda block, logits: [logits, None, logits.mean()],
    "a dictionary": lambda block, logits: {"mean": logits.mean(), "all": (logits,)},
    "half precision": lambda block, logits: logits.bfloat16(),
    "no elements": lambda block, logits: logits[:, :0],
    "as many as are chosen": lambda block, logits: logits[logits.argmax(-1) > 1],
    "something in training": lambda block, logits: logits.mean() if block.training else None,
    "something in evaluation": lambda block, logits: None if block.training else logits,
}
USES = ["none", "after all", "between", "next block", "metric", "if any", "with labels"]


def number_of(value):
    if isinstance(value, list | tuple):
        return sum(map(number_of, value), torch.zeros(()))
    if isinstance(value, dict):
        return number_of([*value.values()])
    if isinstance(value, Tensor):
        return (value.float().square() + value).sum() / 50
    return torch.tensor(value or 0.0)


class Returning(Attention):
    def __init__(self, names):
        super().__init__(causal=True)
        self.names, self.router = names, nn.Linear(WIDTH, 5)

    def forward(self, hidden, given=None):
        hidden = super().forward(hidden) + 0.1 * number_of(given)
        logits = self.router(hidden)
        return hidden, *(RETURNED[name](self, logits) for name in self.names)


class Unlike(Returning):
    """A block of another kind."""

    def __init__(self, names):
        super().__init__(names)
        self.more = nn.Linear(1, 1)


class Model(nn.Module):
    """Its blocks return other things than hidden states, with which it does something, one by one."""

    def __init__(self, uses, blocks):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.uses, self.blocks = uses, nn.ModuleList(blocks)

    def forward(self, tokens, labels=None):
        hidden, total, given, collected, metrics = self.embedding(tokens), torch.zeros(()), None, [], []
        for block in self.blocks:
            hidden, *returned = block(hidden) if given is None else block(hidden, given)
            for use, value in zip(self.uses, returned, strict=True):
                if use == "after all":
                    collected.append(value)
                elif use == "next block":
                    given = value
                elif use == "metric":
                    metrics.append(value)
                elif use == "between" or (use == "if any" and value is not None):
                    total = total + 0.5 + number_of(value)
                elif use == "with labels" and labels is not None:
                    total = total + number_of(value)
        total, logits = total + number_of(collected), self.head(hidden)
        loss = None if labels is None else cross_entropy(logits, labels) + 0.1 * total
        return {"loss": loss, "logits": logits, "total": total.detach(), "metrics": metrics}


@st.composite
def models(draw):
    """Returns the uses of what blocks return, and blocks of one kind or of two."""
    named = draw(st.lists(st.tuples(st.sampled_from([*RETURNED]), st.sampled_from(USES)), min_size=1, max_size=3))
    names, uses = zip(*named)
    others = [draw(st.sampled_from([name, "nothing", "a list"])) for name in names]
    blocks = [Unlike(others) if draw(st.booleans()) else Returning(names) for _ in range(draw(st.integers(2, 4)))]
    # A block gets what the one right before it returned.
    first = uses.index("next block") if "next block" in uses else None
    return Model(["none" if use == "next block" and place != first else use for place, use in enumerate(uses)], blocks)


def batch(number, length):
    generator = torch.Generator().manual_seed(number)
    return [torch.randint(VOCABULARY, (2, length), generator=generator) for _ in range(2)]


def in_turn(layers, batches, is_whole):
    """Calls the layers with several micro-batches, each with all of them before the next one."""
    layers.calls.all = values = [Call(*layers.arguments(tuple(each), {}), is_whole=is_whole) for each in batches]
    for number, layer in enumerate(layers.modules):
        inputs, values = values, []
        for micro_batch, value in enumerate(inputs):
            layers.calls.before_layer(number, micro_batch)
            values.append(layer(value))
    layers.calls.before_layer(0, 0)
    return values


DUMMY = {name: [[1, 2, 3, 4]] for name in ("tokens", "labels")}
BATCHES = [batch(1, 4), batch(2, 7)]


@settings(max_examples=examples(40), deadline=None)
@given(models(), st.sampled_from(["loss", "all"]), st.sampled_from([1, 2]), st.randoms(use_true_random=False))
def test_whatever_blocks_return_reaches_what_computes_with_it(model, outputs, ranks, random):
    torch.manual_seed(random.randrange(1000))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    with pytest.MonkeyPatch.context() as patch:
        # As for a model too large to compare.
        patch.setattr(comparison, "_LARGEST", 0)
        try:
            layers = layers_of(model, outputs=outputs, pipeline_ranks=ranks, dummy_inputs=DUMMY)
        except ConfigError as refusal:
            # A metric may be a second number with a gradient, and nothing tells it from the loss.
            assume("metric" not in model.uses or "numbers with a gradient" not in str(refusal))
            raise
    for given_batch, output in zip(BATCHES, in_turn(layers, BATCHES, outputs == "all")):
        expected = model(*given_batch)
        if outputs == "loss":
            expected, output = expected["loss"], output["loss"]
        torch.testing.assert_close(output, expected)
        losses = [each if outputs == "loss" else each["loss"] for each in (output, expected)]
        assert_gradients(model, *losses, rtol=1e-4, atol=1e-5)
    model.eval()
    with torch.no_grad():
        for given_batch, output in zip(BATCHES, in_turn(layers, BATCHES, True)):
            torch.testing.assert_close(output, model(*given_batch))


def model_of(returned, use, blocks=2):
    RETURNED["another"] = returned
    return Model([use], [Returning(["another"]) for _ in range(blocks)])


def measured(block, logits):
    return logits.mean().item()


class Statistics:
    value = 1.0


REFUSED = {
    "a number of Python": (measured, "block 0 of the model returned other things besides hidden states than for"),
    "an object": (lambda block, logits: Statistics(), "computes with an object that a block returned besides"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_tensor_does_not_travel(name, monkeypatch):
    returned, sentence = REFUSED[name]
    monkeypatch.setattr(comparison, "_LARGEST", 0)
    model = model_of(returned, "if any")
    with pytest.raises(ConfigError, match=sentence):
        in_layers(layers_of(model, dummy_inputs=DUMMY), *batch(1, 5))


class Looking(Model):
    """Looks, between blocks, at what they return."""

    def __init__(self, look):
        super().__init__(["none"], [Returning(["logits"]) for _ in range(3)])
        self.look = look

    def forward(self, tokens, labels=None):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden, logits = block(hidden)
            hidden = self.look(hidden, logits)
        return cross_entropy(self.head(hidden), labels)


LOOKS = {
    "its values": lambda hidden, logits: hidden + 1 if logits.mean() > 0 else hidden,
    "its shape": lambda hidden, logits: hidden[:, : logits.shape[1]],
    "its number": lambda hidden, logits: hidden * float(logits.mean()),
    "it": lambda hidden, logits: hidden * logits.mean(),
}


@pytest.mark.parametrize("name", LOOKS)
def test_hidden_states_between_blocks_may_not_depend_on_what_else_these_return(name, monkeypatch):
    monkeypatch.setattr(comparison, "_LARGEST", 0)
    with pytest.raises(ConfigError, match="between its blocks the forward of the model needs|computes between blocks"):
        layers_of(Looking(LOOKS[name]), dummy_inputs=DUMMY)


@pytest.mark.parametrize("is_whole", [False, True])
def test_what_the_model_only_returns_travels_where_the_script_gets_it(is_whole):
    model = Model(["metric"], [Returning(["logits"]) for _ in range(3)])
    layers, seen = layers_of(model, dummy_inputs=DUMMY), []
    layers.modules[-1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    (output,) = in_turn(layers, BATCHES[:1], is_whole)
    torch.testing.assert_close(output["loss"], model(*BATCHES[0])["loss"])
    assert isinstance(seen[0], Tensor) != is_whole
    if is_whole:
        torch.testing.assert_close(output["metrics"], model(*BATCHES[0])["metrics"])
