"""Computes a model in one process, whole and layer by layer."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ds_lgamp.config import LgampConfig
from ds_lgamp.integrations.deepspeed.model.recomputation import layer_sources
from ds_lgamp.integrations.split.call import Call
from ds_lgamp.integrations.transformers.models import ModelLayers, without_cache


class Computed(NamedTuple):
    """What a forward and a backward computed."""

    output: Any
    gradients: dict[str, Tensor]


def layers_of(model: Any, **settings: Any) -> ModelLayers:
    return ModelLayers(model, layer_sources(torch.device("cpu")), LgampConfig(**settings))


def whole(model: Any, arguments: Mapping[str, Any]) -> Computed:
    """Calls the model, without a cache of keys and values, which changes the order of some sums."""
    torch.manual_seed(1)
    return computed(model, model(**{**arguments, **without_cache(model)}))


def in_layers(model: Any, arguments: Mapping[str, Any], **settings: Any) -> Computed:
    """Calls the layers of the model one after another, with ``settings`` of the block."""
    return computed_by(layers_of(model, **settings), model, arguments)


def computed_by(layers: ModelLayers, model: Any, arguments: Mapping[str, Any]) -> Computed:
    """Calls the ``layers`` of the model one after another."""
    torch.manual_seed(1)
    return computed(model, _run(layers, Call(*layers.arguments((), arguments))))


@torch.no_grad()
def evaluated(layers: ModelLayers, arguments: Mapping[str, Any]) -> Any:
    """Calls the ``layers`` of the model one after another as an evaluation does. Returns the output."""
    torch.manual_seed(1)
    return _run(layers, Call(*layers.arguments((), arguments), is_whole=True))


def _run(layers: ModelLayers, call: Call) -> Any:
    layers.calls.all = [call]
    first, *others = layers.modules
    hidden = first(call)
    for layer in others:
        hidden = layer(hidden)
    return hidden


def computed(model: Any, output: Any) -> Computed:
    """Computes the gradients of the loss; those of the squared hidden states if there is no loss."""
    loss = output["loss"] if "loss" in output else output[0].float().pow(2).mean()
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return Computed(output, gradients)


def assert_equal(first: Any, second: Any) -> None:
    """Checks that all tensors in two outputs are equal, but for rounding."""
    for pair in zip(tree_leaves(first), tree_leaves(second), strict=True):
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-6)


def assert_same(first: Computed, second: Computed) -> None:
    """Checks that outputs are equal to the bit, and gradients but for the order of sums."""
    for name in {"loss", "logits", "last_hidden_state"} & first.output.keys():
        torch.testing.assert_close(second.output[name], first.output[name], rtol=0, atol=0)
    assert second.gradients.keys() == first.gradients.keys()
    for name, gradient in first.gradients.items():
        assert (second.gradients[name] - gradient).norm() <= 2e-6 * gradient.norm() + 1e-11, name
