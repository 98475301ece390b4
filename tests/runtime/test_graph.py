"""What a chunk without recomputation keeps between its forward and backward pass."""

from contextlib import nullcontext

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


class Asks(torch.autograd.Function):
    """Notes in its backward whether autograd may change threads, and fails if it is told to."""

    answers: list[bool] = []

    @staticmethod
    def forward(ctx, inputs, fails):
        ctx.fails = fails
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        Asks.answers.append(torch._C._is_multithreading_enabled())
        if ctx.fails:
            raise ValueError("a layer fails")
        return gradient, None


@pytest.mark.parametrize("fails", [False, True])
def test_a_backward_pass_stays_on_its_thread_and_leaves_the_scripts_own_as_they_are(fails):
    _, inputs = begin_graph(torch.ones(2))
    ends = end_graph(Asks.apply(inputs, fails))
    with pytest.raises(ValueError, match="a layer fails") if fails else nullcontext():
        backpropagate(ends, [torch.ones(2)])
    assert Asks.answers.pop() is False
    assert torch._C._is_multithreading_enabled()
