"""A chunk needs the same memory with fake tensors as with real ones, to the byte."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.memory import bytes_of_block
from benchmarks.model import Block, ModelSize, loss_function, micro_batch
from ds_lgamp.integrations.deepspeed.explain.activations import Way, chunk_bytes
from ds_lgamp.runtime.chunk import differentiable


class WithMask(nn.Module):
    """Takes hidden states with a mask of integers, and hands on both."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.register_buffer("scale", torch.ones(16))
        self.dropout = nn.Dropout(0.5)

    def forward(self, given):
        hidden, mask = given
        return self.dropout(torch.tanh(self.inner(hidden) * self.scale)) * mask.unsqueeze(-1), mask


def token_layers():
    return nn.Sequential(nn.Embedding(50, 16), nn.ReLU(inplace=True), nn.LayerNorm(16))


def half_frozen():
    layers = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    layers[0].requires_grad_(False)
    return layers


CHUNKS = {
    "tokens": (token_layers, lambda: torch.zeros(2, 5, dtype=torch.long), True),
    "tuples": (WithMask, lambda: (torch.zeros(2, 5, 16), torch.ones(2, 5, dtype=torch.long)), False),
    "frozen": (half_frozen, lambda: torch.zeros(2, 5, 16), False),
}


def measured(build, inputs, is_first, recompute, split=False):
    layers, given = build(), inputs()
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    with torch.no_grad():
        # Clones the inputs, because a layer that works in place must not change them.
        result = layers(tuple(member.clone() for member in given) if isinstance(given, tuple) else given.clone())
    gradients = [torch.ones_like(member) for member in differentiable(result)]
    weights = list(layers.parameters())
    existing = [*weights, *layers.buffers(), *(weight.grad for weight in weights if weight.grad is not None)]
    return chunk_bytes(layers, given, gradients, existing, 4 * 2 * 5 * 16, is_first, Way(recompute, split))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("name", CHUNKS)
def test_fake_tensors_take_as_much_as_real_ones(name, recompute, split):
    build, inputs, is_first = CHUNKS[name]
    real = measured(build, inputs, is_first, recompute, split)
    with FakeTensorMode():
        fake = measured(build, inputs, is_first, recompute, split)
    assert fake == real
    # Only products with a weight that trains have second parts. Tokens meet none.
    assert (real.waiting > 0) == (split and name != "tokens") and real.second_part * (not split) == 0
    assert real.forward > 0 and real.backward > 0 and (real.saved > 0) == (not recompute)


@pytest.mark.parametrize(
    ("is_first", "is_last", "recompute"),
    [(True, False, True), (False, False, True), (False, False, False), (False, True, False)],
)
def test_a_fake_transformer_block_takes_what_the_benchmark_measures(is_first, is_last, recompute):
    """The formula with the benchmark's measurement equals the memory of whole training steps on real ranks."""
    size = ModelSize(8, 64, 32, 2)
    expected = bytes_of_block(size, is_first, is_last, recompute)
    block = Block(0, size)
    hidden, labels = micro_batch(size, 0, 0)
    with FakeTensorMode():
        for module in block.modules():
            for name, parameter in module._parameters.items():
                module._parameters[name] = fake = nn.Parameter(torch.empty(parameter.shape))
                fake.grad = torch.empty(parameter.shape)
        hidden, labels = torch.empty(hidden.shape), torch.empty(labels.shape)
        gradient = torch.ones(()) if is_last else torch.ones_like(hidden)
        weights = list(block.parameters())
        existing = [labels, *weights, *(weight.grad for weight in weights)]

        def compute(inputs):
            return loss_function(block(inputs), labels) if is_last else block(inputs)

        result_bytes = 0 if is_last else hidden.nbytes
        fake = chunk_bytes(compute, hidden, [gradient], existing, result_bytes, is_first, Way(recompute))
    assert fake == expected


def test_a_result_that_autograd_keeps_is_told_apart_from_what_else_it_keeps():
    """The linear layer keeps its input and tanh keeps its result, 160 numbers each. The leaf of the graph has one
    number."""
    kept = measured(lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh()), lambda: torch.zeros(2, 5, 16), False, False)
    assert (kept.saved, kept.keeps_result) == (644, True)
    kept = measured(lambda: nn.Sequential(nn.Tanh(), nn.Linear(16, 16)), lambda: torch.zeros(2, 5, 16), False, False)
    assert (kept.saved, kept.keeps_result) == (644, False)
