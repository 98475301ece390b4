"""A backward may have two parts, and a step stays the same to the bit."""

import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ds_lgamp.runtime.graph import on_this_thread
from ds_lgamp.runtime.split_backward import SecondParts, splitting
from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.program import build_rank_program
from testing.ranks import run_on_ranks
from tests.runtime.assembly import build_grid
from tests.runtime.test_kept import assert_same, pairs_of, specs, state_after_steps
from tests.slow import slow_except


def compare(pipeline_ranks, tries):
    """Compares with the step of whole backwards, on this rank. Returns how many second parts it ran."""
    grid, draw, parts = build_grid(pipeline_ranks, 1), random.Random(5), 0
    for spec in specs(pipeline_ranks):
        for recomputes in (True, False):
            spec = replace(spec, recomputes=recomputes, stores_inputs=spec.stores_inputs and recomputes)
            expected = state_after_steps(grid, spec)
            for _ in range(tries):
                whole, kept = frozenset({draw.randrange(2 * spec.chunks)}), pairs_of(spec, draw)
                other = replace(spec, split_backward=draw.randint(1, 5), whole_chunks=whole, kept=kept)
                own = build_rank_program(other, grid.pipeline_rank)
                parts += sum(each.kind is Kind.WEIGHTS_BACKWARD for each in own)
                assert_same(state_after_steps(grid, other), expected, other)
    return parts


@pytest.mark.parametrize(
    ("pipeline_ranks", "tries"), slow_except([(2, 1)], [(2, 1), (2, 10), (3, 5), (4, 3)], several=True)
)
def test_gradients_are_those_of_whole_backwards_to_the_bit(pipeline_ranks, tries):
    """For random limits, with dropout, batch norms, counters, and layers that change their input in place."""
    for parts in run_on_ranks(pipeline_ranks, compare, pipeline_ranks, tries):
        assert parts > 0


WIDTH = 6


class Conv1D(nn.Module):
    """As in transformers: the weight has a row for each column of the input."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, 4)), nn.Parameter(torch.randn(4))

    def forward(self, hidden):
        return torch.addmm(self.bias, hidden.view(-1, WIDTH), self.weight).view(*hidden.shape[:-1], 4)


class Twice(nn.Module):
    """Reads one weight three times."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return self.inner(self.inner(self.inner(hidden).tanh()).tanh())


class Tangled(nn.Module):
    """Reads a weight in a product and elsewhere."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return self.inner(hidden) + self.inner.weight.sum()


class Frozen(nn.Module):
    """An adapter beside a frozen weight."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2, False), nn.Linear(2, WIDTH, False)
        self.base.requires_grad_(False)

    def forward(self, hidden):
        return self.base(hidden) + self.up(self.down(hidden))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), reentrant

    def forward(self, hidden):
        return checkpoint(self.inner, hidden, use_reentrant=self.reentrant)


class Penalty(nn.Module):
    """Adds a gradient that it computes itself, whose graph it keeps."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        result = self.inner(hidden).tanh()
        of_input, of_weight = torch.autograd.grad(result.sum(), (hidden, self.inner.weight), create_graph=True)
        return result + of_input + of_weight.sum()


class Custom(torch.autograd.Function):
    """Builds a graph in its forward, and asks for all its gradients at once in its backward."""

    @staticmethod
    def forward(context, hidden, weight):
        with torch.enable_grad():
            context.inner = hidden.detach().requires_grad_(), weight
            context.result = functional.linear(*context.inner).tanh()
        return context.result.detach()

    @staticmethod
    def backward(context, gradient):
        of_hidden, of_weight = torch.autograd.grad(context.result, context.inner, gradient, allow_unused=True)
        return of_hidden, 3 * of_weight


class Inner(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH, bias=False)

    def forward(self, hidden):
        return Custom.apply(hidden, self.weight)


class Solving(nn.Linear):
    """Asks for a gradient of its own graph while a backward pass goes through it."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, hidden):
        result = super().forward(hidden).tanh()
        again = super().forward(result.detach().requires_grad_())
        result.register_hook(
            lambda gradient: gradient + torch.autograd.grad(again, self.bias, torch.ones_like(again))[0]
        )
        return result


class Remembering(nn.Module):
    """Multiplies a buffer, which the next micro-batch changes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("memory", torch.ones(5, WIDTH))

    def forward(self, hidden):
        return hidden + self.inner(self.memory)


class Learned(nn.Module):
    """Multiplies a parameter, which may be released by the second part."""

    def __init__(self):
        super().__init__()
        self.queries, self.inner = nn.Parameter(torch.randn(5, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.inner(self.queries) + self.inner(self.queries.view(1, 5, WIDTH))


class ByName(nn.Module):
    """Names the operands, in an order of its own."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, 4)), nn.Parameter(torch.randn(4))

    def forward(self, hidden):
        return torch.addmm(mat2=self.weight, mat1=hidden.flatten(0, 1), input=self.bias, beta=0.5)


class Transposed(nn.Module):
    """Products of inputs that are not contiguous, and of four dimensions."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(5, 5)

    def forward(self, hidden):
        mixed = self.inner(hidden.transpose(0, 1)).transpose(0, 1)
        return self.outer(mixed.unflatten(-1, (2, 3)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).flatten(2)


class InPlace(nn.Linear):
    """Changes the result in place, as activations with ``inplace=True`` do."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, hidden):
        return super().forward(hidden).tanh_() + super().forward(hidden.flatten(0, 1)).relu_().view_as(hidden)


class Mapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return torch.func.vmap(self.inner)(hidden)


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(hidden).float()


LAYERS = {
    "linear": (lambda: nn.Linear(WIDTH, 4), 1),
    "without bias": (lambda: nn.Linear(WIDTH, 4, bias=False), 1),
    "Conv1D": (Conv1D, 1),
    "a weight read three times": (Twice, 3),
    "beside a frozen weight": (Frozen, 2),
    "elsewhere, too": (Tangled, 1),
    "of other shapes": (Transposed, 0),
    "parametrized": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 4)), 0),
    "changed in place": (InPlace, 2),
    "mapped": (Mapped, 0),
    "under autocast": (Half, 0),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True), 3),
    "checkpointed": (lambda: Checkpointed(False), 1),
    "checkpointed by a pass of its own": (lambda: Checkpointed(True), 0),
    "a gradient of its own": (Penalty, 1),
    "a graph inside a function": (Inner, 0),
    "a pass inside a pass": (Solving, 1),
    "a buffer": (Remembering, 0),
    "a parameter": (Learned, 0),
    "named operands": (ByName, 0),
}


def gradients(layer, split):
    """Returns the gradients of input and weights of a pass, and of how many products a first part left something
    out."""
    torch.manual_seed(1)
    hidden = torch.randn(3, 5, WIDTH, requires_grad=True)
    parts, left = SecondParts(), 0
    if not split:
        layer(hidden).square().sum().backward()
    else:
        with splitting():
            loss = layer(hidden).square().sum()
        with on_this_thread(), parts.first(1, 0, [loss]):
            loss.backward()
        left = len(parts._waiting[1, 0])
        of_input = hidden.grad.clone()
        parts.run(1, 0)
        assert torch.equal(hidden.grad, of_input)
    assert functional.linear is torch._C._nn.linear and torch.addmm.__name__ == "addmm"
    return [hidden.grad, *(weight.grad for weight in layer.parameters() if weight.requires_grad)], left


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_any_kind_have_the_gradients_of_a_whole_backward(name):
    build, products = LAYERS[name]
    torch.manual_seed(0)
    layer = build()
    expected, _ = gradients(layer, split=False)
    layer.zero_grad()
    found, left = gradients(layer, split=True)
    assert left == products
    for right, gradient in zip(expected, found, strict=True):
        # What reads a weight besides a product adds its gradient first.
        same = torch.allclose if name == "elsewhere, too" else torch.equal
        assert same(gradient, right)


def test_nothing_is_split_where_something_else_has_replaced_what_multiplies(monkeypatch):
    layer = nn.Linear(WIDTH, 4)
    monkeypatch.setattr(functional, "linear", lambda *operands: torch._C._nn.linear(*operands) * 2)
    torch.manual_seed(1)
    hidden = torch.randn(3, WIDTH, requires_grad=True)
    with splitting():
        result = layer(hidden)
    assert torch.equal(result, layer(hidden)) and "SplitProduct" not in result.grad_fn.next_functions[0][0].name()


def test_what_a_second_part_needs_must_stay_as_it_is():
    layer, parts = nn.Linear(WIDTH, 4), SecondParts()
    hidden = torch.randn(3, WIDTH, requires_grad=True).tanh()
    with splitting():
        loss = layer(hidden).sum()
    with on_this_thread(), parts.first(1, 0, [loss]):
        loss.backward()
    with torch.no_grad():
        hidden.mul_(2)
    with pytest.raises(RuntimeError, match="was changed in place after the product's backward"):
        parts.run(1, 0)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_weights_see_whole_gradients_once(kind):
    seen = []
    layer = nn.Linear(WIDTH, 4)
    getattr(layer.weight, kind)(lambda tensor: seen.append(tensor.shape))
    assert gradients(layer, split=True)[1] == 0
    assert seen == [(4, WIDTH)]
