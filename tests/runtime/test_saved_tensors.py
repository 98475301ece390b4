"""What autograd saves is dropped in the first forward and computed again, no further than needed."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ds_lgamp.runtime.measure import PeakMemory
from ds_lgamp.runtime.saved_tensors import SavedTensors

WIDTH, TOKENS = 8, 1000


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


class Checkpointed(nn.Module):
    """Recomputes a part by itself."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, inputs):
        return checkpoint(self.inside, inputs, use_reentrant=False)


class Catching(nn.Linear):
    """Goes on without what fails."""

    def forward(self, inputs):
        try:
            return super().forward(inputs)
        except Exception:
            return inputs


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


def test_nothing_is_computed_again_for_a_graph_that_saved_nothing():
    def double(inputs):
        calls.append(inputs)
        return inputs * 2

    calls = []
    saved, result = forward(double, example())
    saved.restore(partial(double, example()), completely=False)
    assert len(calls) == 1
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
    # Beside the result: what the tanh gives and the checkpoint gets, what GELU gets and what it gives.
    assert restored == pytest.approx(result.nbytes * (1 + 3), rel=0.01)
    # The gradients of a linear layer's result and input.
    assert held == [pytest.approx(result.nbytes * (1 + 1), rel=0.05)]


def test_a_forward_that_saves_less_the_second_time_is_refused():
    layers = build()
    saved, result = forward(layers, example())
    with pytest.raises(
        RuntimeError, match="saved 7 tensors in its forward and 1 when .* set ds_lgamp.recompute to 'no"
    ):
        saved.restore(partial(nn.Tanh(), example()), completely=False)


def test_a_restored_tensor_that_was_changed_is_refused():
    def layers(inputs):
        results.append(inputs.exp())
        return results[-1] * 2

    results = []
    saved, result = forward(layers, example())
    saved.restore(partial(layers, example()), completely=True)
    with torch.no_grad():
        results[-1].mul_(2)
    with pytest.raises(RuntimeError, match="was changed in place after it was saved"):
        result.sum().backward()
