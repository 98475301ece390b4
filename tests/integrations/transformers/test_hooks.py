"""Hooks of a model run around its split forward as around the whole one."""

import torch

from tests.integrations.transformers.by_hand import assert_same, in_layers, whole
from tests.integrations.transformers.models import make, micro_batch


def shift_tokens(_, positional, named):
    return positional, {**named, "input_ids": (named["input_ids"] + 1) % 64}


def triple_loss(_, __, output):
    output.loss = None if output.loss is None else 3 * output.loss
    return output


def test_hooks_of_the_model_change_its_arguments_and_its_output():
    model, batch = make("Llama"), micro_batch(0, 0, 0)
    plain = whole(model, batch)
    model.register_forward_pre_hook(shift_tokens, with_kwargs=True)
    model.register_forward_hook(triple_loss)
    hooked = whole(model, batch)
    assert not torch.isclose(hooked.output.loss, plain.output.loss)
    assert_same(hooked, in_layers(model, batch))


def test_a_compiled_call_of_the_whole_model_is_left_out():
    model, batch, graphs = make("Llama"), micro_batch(0, 0, 0), []
    expected = whole(model, batch)
    model.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    assert_same(expected, in_layers(model, batch))
    assert not graphs
