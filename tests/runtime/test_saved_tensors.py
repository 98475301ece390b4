"""The first forward drops what autograd saves. Recomputation restores it and computes no more than needed."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ds_lgamp.runtime.graph import end_graph
from ds_lgamp.runtime.measure import PeakMemory
from ds_lgamp.runtime.recompute import SavedTensors

WIDTH, TOKENS = 8, 1000


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


class Checkpointed(nn.Module):
    """Recomputes a part of itself."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, inputs):
        return checkpoint(self.inside, inputs, use_reentrant=False)


class Catching(nn.Linear):
    """Catches its own errors and goes on."""

    def forward(self, inputs):
        try:
            return super().forward(inputs)
        except Exception:
            return inputs.tanh()


def build(last=nn.Linear):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Checkpointed(), nn.GELU(), last(WIDTH, WIDTH))


def forward(layers, inputs):
    saved = SavedTensors()
    with saved.dropped():
        return saved, layers(inputs)


def example():
    return torch.linspace(-1, 1, TOKENS * WIDTH).view(TOKENS, WIDTH).requires_grad_()


@pytest.mark.parametrize("completely", [False, True])
@pytest.mark.parametrize("last", [nn.Linear, Catching])
def test_gradients_are_those_of_a_graph_that_keeps_everything(last, completely):
    layers, inputs = build(last), example()
    layers(inputs).sum().backward()
    expected = [inputs.grad, *(parameter.grad for parameter in layers.parameters())]
    layers.zero_grad()
    again = example()
    saved, result = forward(layers, again)
    saved.restore(partial(layers, example()), completely)
    result.sum().backward()
    found = [again.grad, *(parameter.grad for parameter in layers.parameters())]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(("completely", "products"), [(False, 1), (True, 2)])
def test_what_follows_the_last_saved_tensor_is_not_computed_again(completely, products):
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    saved, result = forward(layers, example())
    with Operations() as operations:
        saved.restore(partial(layers, example()), completely)
    assert operations.names.count("addmm") == products


@pytest.mark.parametrize("bias", [True, False])
def test_a_last_product_with_frozen_weights_is_not_computed_again(bias):
    layers = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias).requires_grad_(False))
    saved, result = forward(layers, example())
    with Operations() as operations:
        saved.restore(partial(layers, example()), completely=False)
    assert operations.names.count("addmm") + operations.names.count("mm") == 0


def test_a_difference_inside_torchscript_is_told_all_the_same():
    """TorchScript makes another error of every one that leaves it."""
    layers = torch.jit.script(nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    saved, _ = forward(layers, example()[:5])
    with pytest.raises(RuntimeError, match="a chunk saved .*5, 8.* and .*1000, 8.* when it was recomputed"):
        saved.restore(partial(layers, example()), completely=False)


@pytest.mark.parametrize(("completely", "times"), [(False, 1), (True, 2)])
def test_a_forward_that_saves_nothing_is_not_computed_again(completely, times):

    def double(inputs):
        calls.append(inputs)
        return inputs * 2

    calls = []
    saved, result = forward(double, example())
    saved.restore(partial(double, example()), completely)
    assert len(calls) == times
    result.sum().backward()


def test_a_first_forward_holds_nothing_and_a_backward_frees_as_it_goes():
    layers, inputs = build(), example()
    held = []
    with PeakMemory([inputs, *layers.parameters()]) as memory:
        before = memory.live()
        saved, result = forward(layers, inputs)
        assert memory.live() - before == result.nbytes
        loss = result.sum()
        saved.restore(partial(layers, inputs.detach().requires_grad_()), completely=False)
        restored = memory.live() - before
        inputs.register_hook(lambda gradient: held.append(memory.live() - before))
        loss.backward()
    # Held beside the result: the results of the tanh and of the checkpoint, and the input and the result of GELU.
    assert restored == pytest.approx(result.nbytes * (1 + 3), rel=0.01)
    # The gradients of a linear layer's result and input.
    assert held == [pytest.approx(result.nbytes * (1 + 1), rel=0.05)]


@pytest.mark.parametrize(
    ("layers", "completely", "difference"),
    [
        (nn.Tanh(), False, "{count} tensors in its forward and 1 when"),
        (
            nn.Sequential(nn.Tanh(), build()),
            True,
            r"\(torch.Size\(\[8, 8\]\), torch.float32\) in its forward and .*1000, .*when",
        ),
        (nn.Sequential(build(), nn.Tanh()), True, "{count} tensors in its forward and {more} when"),
    ],
)
def test_a_forward_that_saves_others_the_second_time_is_refused(layers, completely, difference):
    saved, result = forward(build(), example())
    count = len(saved._slots)  # Versions of torch differ in it.
    difference = difference.format(count=count, more=count + 1)
    with pytest.raises(RuntimeError, match=f"a chunk saved {difference} .* set ds_lgamp.recompute to 'none'"):
        saved.restore(partial(layers, example()), completely)


def test_gradients_inside_a_forward_are_refused():
    def layers(inputs):
        return torch.autograd.grad(inputs.exp().sum(), inputs)

    with pytest.raises(RuntimeError, match="gradients were asked for before the backward pass of a chunk"):
        forward(layers, example())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda tensor: tensor.mul_(2), "was changed in place after it was saved"),
        (
            lambda tensor: tensor.untyped_storage().resize_(0),
            "memory of a tensor .* was freed when the chunk was recomp",
        ),
    ],
)
def test_a_restored_tensor_that_is_no_longer_what_it_was_is_refused(change, complaint):
    def layers(inputs):
        results.append(inputs.exp())
        return results[-1] * 2

    results = []
    saved, result = forward(layers, example())
    saved.restore(partial(layers, example()), completely=True)
    with torch.no_grad():
        change(results[-1])
    with pytest.raises(RuntimeError, match=complaint):
        result.sum().backward()


class Doubling(torch.autograd.Function):
    """Saves its input, doubled."""

    @staticmethod
    def forward(context, inputs):
        context.save_for_backward(inputs * 2)
        return inputs**2

    @staticmethod
    def backward(context, gradient):
        (factor,) = context.saved_tensors
        return gradient * factor


def test_a_graph_that_ends_with_a_function_of_python_lives_without_its_result():
    inputs = example()
    saved, result = forward(Doubling.apply, inputs)
    ends = end_graph(result)
    del result
    saved.restore(partial(Doubling.apply, example()), completely=False)
    torch.autograd.backward(ends, [torch.ones(TOKENS, WIDTH)])
    assert torch.equal(inputs.grad, 2 * inputs)
