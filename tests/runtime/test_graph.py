"""What a chunk without recomputation keeps between its forward and backward pass."""

import pytest
import torch

from ds_lgamp.runtime.graph import backpropagate, begin_graph, end_graph
from ds_lgamp.runtime.measure import PeakMemory

ELEMENTS = 4096


@pytest.mark.parametrize(
    ("layer", "saves_its_input"),
    [(lambda inputs: inputs + 1, False), (lambda inputs: inputs**2, True)],
    ids=["add", "square"],
)
def test_a_graph_holds_its_input_only_if_a_layer_saves_it(layer, saves_its_input):
    with PeakMemory([]) as memory:
        inputs = torch.ones(ELEMENTS)
        nbytes = inputs.nbytes
        leaf, inputs = begin_graph(inputs)
        ends = end_graph(layer(inputs))
        del inputs
        assert memory.live() == pytest.approx(nbytes * saves_its_input, abs=64)
        backpropagate(ends, [torch.ones(ELEMENTS)])
    assert torch.equal(leaf.grad, torch.full((ELEMENTS,), 2.0 if saves_its_input else 1.0))


def test_an_input_may_be_changed_in_place():
    leaf, inputs = begin_graph(torch.full((2,), 3.0))
    backpropagate(end_graph(inputs.mul_(5)), [torch.ones(2)])
    assert torch.equal(leaf.grad, torch.full((2,), 5.0))


def test_members_that_have_no_gradient_pass():
    mask = torch.ones(2, dtype=torch.bool)
    (leaf, _), (inputs, passed) = begin_graph((torch.ones(2), mask))
    assert passed is mask
    backpropagate(end_graph((inputs * passed, mask)), [torch.ones(2)])
    assert torch.equal(leaf.grad, torch.ones(2))
