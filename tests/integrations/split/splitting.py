"""Splits models of one's own, calls their layers, and compares them with the whole models."""

from typing import Any

import torch
from torch import Tensor, nn

from ds_lgamp.config import LgampConfig
from ds_lgamp.integrations.deepspeed.model.recomputation import layer_sources
from ds_lgamp.integrations.split.call import Call
from ds_lgamp.integrations.split.layers import OwnModelLayers
from tests.integrations.split.own_models import BLOCKS


def layers_of(model: nn.Module, **settings: object) -> OwnModelLayers:
    return OwnModelLayers(model, layer_sources(torch.device("cpu")), LgampConfig(**settings))


def split(name: str, model: nn.Module) -> OwnModelLayers:
    return layers_of(model, **BLOCKS.get(name, {}))


def in_layers(layers: OwnModelLayers, *arguments: Tensor) -> object:
    """Calls the layers of the model one after another."""
    call = Call(*layers.arguments(arguments, {}))
    layers.calls.all = [call]
    first, *blocks, last = layers.modules
    hidden = first(call)
    for block in blocks:
        hidden = block(hidden)
    return last(hidden)


def in_layers_apart(layers: OwnModelLayers, *arguments: Tensor) -> object:
    """Calls the layers of the model one after another, each as if it were the only one on its rank."""

    def alone(layer: nn.Module, hidden: object = None) -> object:
        call = Call(*layers.arguments(arguments, {}))
        layers.calls.all, layers.calls._now.in_chunk = [call], None
        return layer(call if hidden is None else hidden)

    first, *others = layers.modules
    hidden = alone(first)
    for layer in others:
        hidden = alone(layer, hidden)
    return hidden


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_gradients(
    model: nn.Module, loss: Tensor, expected: Tensor, rtol: float = 1e-6, atol: float = 1e-8
) -> dict[str, Tensor]:
    """Checks that both losses have the same gradients. Returns those of ``loss``."""
    wanted, found = gradients_of(model, expected), gradients_of(model, loss)
    for name, gradient in found.items():
        assert (gradient is None) == (wanted[name] is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, wanted[name], rtol=rtol, atol=atol)
    return found


def assert_same(model: nn.Module, *batch: Any, run: Any = in_layers, **settings: object) -> list[tuple[Any, ...]]:
    """Checks that the layers of ``model`` compute the loss and the gradients that it does. Returns what every layer but
    the first got."""
    layers, seen = layers_of(model, **settings), []
    for layer in layers.modules[1:]:
        layer.register_forward_pre_hook(lambda _layer, inputs: seen.append(inputs))
    expected, loss = model(*batch), run(layers, *batch)
    assert torch.equal(loss, expected)
    assert_gradients(model, loss, expected, rtol=1e-5, atol=1e-7)
    return seen
