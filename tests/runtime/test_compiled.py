"""Layers that torch.compile makes code of: equal ones share it, and shapes and weights do not replace it."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from ds_lgamp.runtime.compiled import Compiler

LAYERS, WIDTH = 12, 6


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.inner = number, nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        return inputs + torch.tanh(self.inner(inputs))


class Numbered(Block):
    def forward(self, inputs):
        return super().forward(inputs) * (1 + self.number)


def graphs_of(kind, sizes, **options):
    """Returns how many graphs have been compiled after a pass through equal layers of each size of a batch."""
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    layers, compiler, numbers = (
        [kind(number) for number in range(LAYERS)],
        Compiler({"backend": "eager", **options}),
        [],
    )
    assert [compiler(layer) for layer in layers] == layers
    for rows, columns in sizes:
        # The first layer gets what the others do.
        hidden = wanted = torch.randn(rows, columns, WIDTH, requires_grad=True)
        for layer in layers:
            gather_elsewhere(layer)
            hidden, wanted = layer(hidden), layer.forward(wanted)
        torch.testing.assert_close(hidden, wanted)
        numbers.append(counters["stats"]["unique_graphs"])
    return numbers


def gather_elsewhere(layer):
    """Gives weights other memory, as a gather after a release does."""
    for parameter in layer.parameters():
        full, parameter.data = parameter.data.clone(), torch.empty(0)
        parameter.data = full


def test_equal_layers_share_code_for_the_first_shape_and_for_all_others():
    assert graphs_of(Block, ((4, 3), (4, 3), (2, 3), (2, 5), (4, 3), (5, 7))) == [1, 1, 2, 2, 2, 2]


def test_the_options_may_leave_all_shapes_to_torch():
    sizes = (4, 2), (3, 2), (2, 2)
    assert graphs_of(Block, sizes, dynamic=False) == [1, 2, 3]
    assert graphs_of(Block, sizes, dynamic=True) == [1, 1, 1]


def test_layers_that_compute_with_numbers_of_their_own_have_code_each():
    assert graphs_of(Numbered, ((4, 3), (4, 3))) == [LAYERS, LAYERS]


def test_a_length_that_is_also_a_width_needs_no_code_of_its_own():
    assert graphs_of(Block, ((4, 3), (4, WIDTH), (2, 3), (5, 7))) == [1, 2, 2, 2]


def test_options_that_torch_lacks_are_refused_before_a_layer_runs():
    with pytest.raises(Exception, match="inductro"):
        Compiler({"backend": "inductro"})


def test_a_layer_with_a_hook_shares_no_code_with_those_without():
    torch.compiler.reset()
    layers, compiler = [Block(number) for number in range(3)], Compiler({"backend": "eager"})
    layers[1].inner.register_forward_hook(lambda module, given, result: 2 * result)
    inputs = torch.randn(2, WIDTH)
    wanted = [layer(inputs) for layer in layers]
    torch.testing.assert_close([compiler(layer)(inputs) for layer in layers], wanted)
