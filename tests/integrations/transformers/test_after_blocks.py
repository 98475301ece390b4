"""What a forward computes after the blocks only when it gets labels: it is the model's, or refused."""

from functools import wraps
from types import SimpleNamespace

import peft
import pytest
import torch

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.split import outputs
from ds_lgamp.integrations.split.call import Call
from ds_lgamp.integrations.transformers.models import ForwardSettings
from tests.integrations.transformers.by_hand import assert_same, in_layers, layers_of, whole
from tests.integrations.transformers.models import make, micro_batch


def with_term(model, term):
    """Adds ``term(output, input_ids)`` to the loss that the model's forward returns."""
    stock = model.forward

    @wraps(stock)
    def forward(input_ids=None, labels=None, **others):
        output = stock(input_ids=input_ids, labels=labels, **others)
        if labels is not None:
            output.loss = output.loss + term(output, input_ids)
        return output

    model.forward = forward
    return model


def embedding_the_labels(model):
    return with_term(model, lambda _, ids: model.model.embed_tokens(ids).pow(2).mean())


def embedding_the_labels_without_gradients(model):
    def term(output, ids):
        with torch.no_grad():
            wanted = model.model.embed_tokens(ids)
        return (output.logits[..., : wanted.shape[-1]] - wanted).pow(2).mean()

    return with_term(model, term)


def passing_the_blocks_twice(model):
    stock, seen = model.forward, torch.zeros(2, 10, 32)
    return with_term(model, lambda *_: stock(inputs_embeds=seen, use_cache=False).logits.mean())


def using_the_embedding_again(model):
    """Only with labels, so that no survey sees it."""
    stock = model.forward

    @wraps(stock)
    def forward(input_ids=None, labels=None, **others):
        embedded = model.model.embed_tokens(input_ids)
        output = stock(inputs_embeds=embedded, labels=labels, **others)
        if labels is not None:
            output.loss = output.loss + (embedded * output.logits[..., : embedded.shape[-1]]).mean()
        return output

    model.forward = forward
    return model


def penalising(names):
    """Returns what penalises the parameters that ``names`` are in the names of."""

    def change(model):
        named = model.named_parameters
        return with_term(model, lambda *_: sum(each.pow(2).sum() for name, each in named() if names in name))

    return change


REFUSED = {
    "a penalty of all parameters": (penalising(""), "the model's output depends on parameter 'model.*'"),
    "a penalty of the embedding": (penalising("embed_tokens"), "depends on parameter 'model.embed_tokens.weight'"),
    "a penalty of a block": (penalising("layers.1.mlp.up"), "depends on parameter 'model.layers.1.mlp.up_proj.weight'"),
    "the embedding of labels": (embedding_the_labels, "calls 'model.embed_tokens' again after its blocks"),
    "the same without gradients": (embedding_the_labels_without_gradients, "calls 'model.embed_tokens' again"),
    "what the embedding returned": (using_the_embedding_again, "depends on what 'model.embed_tokens' returned before"),
    "a second pass": (passing_the_blocks_twice, "calls block 0 again after its blocks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_needs_more_than_the_last_layer_is_refused(case):
    change, sentence = REFUSED[case]
    with pytest.raises(ConfigError, match=sentence):
        in_layers(change(make("Llama")), micro_batch(0, 0, 0))


def test_a_penalty_of_adapters_in_blocks_is_refused():
    config = peft.AdaLoraConfig(target_modules=["q_proj"], init_r=4, target_r=2, total_step=60, tinit=10, tfinal=20)
    config.task_type = "CAUSAL_LM"
    with pytest.raises(
        ConfigError, match="depends on parameter 'base_model.model.model.layers.3.self_attn.q_proj.lora_B"
    ):
        in_layers(peft.get_peft_model(make("Llama"), config), micro_batch(0, 0, 0))


@pytest.mark.parametrize(("name", "penalised"), [("Llama", "lm_head"), ("GPT-2", "wte")])
def test_a_penalty_of_the_last_layer_is_the_models(name, penalised):
    model, batch = penalising(penalised)(make(name)), micro_batch(0, 0, 0)
    assert_same(whole(model, batch), in_layers(model, batch))


def test_a_penalty_of_frozen_parameters_is_the_models():
    model = make("Llama")
    model.model.embed_tokens.requires_grad_(False)
    model, batch = penalising("embed_tokens")(model), micro_batch(0, 0, 0)
    assert_same(whole(model, batch), in_layers(model, batch))


def test_the_graph_of_the_loss_is_looked_at_once(monkeypatch):
    looks, stock = [], outputs.walk
    monkeypatch.setattr(outputs, "walk", lambda *given: looks.append(torch.is_grad_enabled()) or stock(*given))
    layers = layers_of(make("Llama"))
    layers.calls.all = [Call(*layers.arguments((), micro_batch(0, 0, number))) for number in range(3)]
    for number, grad in enumerate((False, True, True)):
        layers.calls._now.number = number
        with torch.set_grad_enabled(grad):
            layers.modules[-1](torch.zeros(2, 10, 32))
    assert looks == [True]


def test_the_loss_of_the_first_batch_saves_the_same_tensors_when_it_is_recomputed():
    layers = layers_of(make("GPT-2", embd_pdrop=0.5))
    layers.calls.all = [Call(*layers.arguments((), micro_batch(0, 0, 0)))]
    saved = []
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: saved.append(tensor.shape) or tensor, lambda it: it
        ):
            layers.modules[-1](torch.zeros(2, 10, 32, requires_grad=True))
    assert saved[: len(saved) // 2] == saved[len(saved) // 2 :]


def test_what_precedes_the_blocks_may_be_changed_in_place():
    model, batch = make("Llama"), micro_batch(0, 0, 0)
    stock = model.forward

    @wraps(stock)
    def forward(input_ids=None, **others):
        embedded = model.model.embed_tokens(input_ids)
        embedded *= 2
        return stock(inputs_embeds=embedded, **others)

    model.forward = forward
    assert_same(whole(model, batch), in_layers(model, batch))
    layers = layers_of(model)
    layers.calls.all = [Call(*layers.arguments((), batch))]
    # On a rank without the embedding, a block asks the forward what it gets.
    assert layers.modules[1](torch.zeros(2, 10, 32)).shape == (2, 10, 32)


def counting_in_place(model):
    model.calls += 1


def counting_anew(model):
    model.calls = model.calls + 1


@pytest.mark.parametrize("count", [counting_in_place, counting_anew])
def test_a_buffer_that_the_code_around_the_blocks_changes_is_refused(count):
    model = make("Llama").train()
    model.model.register_buffer("calls", torch.zeros(()))
    stock = model.model.forward

    @wraps(stock)
    def forward(*positional, **named):
        if model.training:
            count(model.model)
        return stock(*positional, **named)

    model.model.forward = forward
    with pytest.raises(ConfigError, match=r"the forward of the model changes its buffer 'model\.calls'"):
        in_layers(model, micro_batch(0, 0, 0))


def test_a_buffer_that_the_forward_reads_is_the_models():
    model, batch = make("Llama"), micro_batch(0, 0, 0)
    model.register_buffer("scale", torch.tensor(3.0))
    model = with_term(model, lambda output, _: model.scale * output.logits.mean())
    assert_same(whole(model, batch), in_layers(model, batch))


def test_plain_settings_of_the_forward_are_told():
    config = SimpleNamespace(problem_type=None, num_labels=2, id2label={}, _seen=0)
    settings = ForwardSettings(config)
    config.problem_type, config.added, config.id2label, config._seen = "regression", 1.5, {0: "a"}, 1
    assert settings.changed() == {"problem_type": "regression", "added": 1.5}


def test_a_tuple_is_refused_because_nothing_in_it_is_called_a_loss():
    with pytest.raises(ConfigError, match="the model returned a tuple, .* return a ModelOutput or a dictionary"):
        layers_of(make("Llama")).loss_of((torch.zeros(()), torch.zeros(1)))
