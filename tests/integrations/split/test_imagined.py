"""Shapes of what a module would return, without its parameters."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

from ds_lgamp.integrations.split.imagined import Imagined


class Pieces(nn.Module):
    """Cuts a sequence into pieces, and returns one row for each, as encoders of images of several sizes do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.before = 0

    def forward(self, rows, lengths):
        self.before += 1
        self.calls += 1
        return torch.stack([piece.sum(0) for piece in self.linear(rows).split(lengths.tolist())])


def shape_of(module, *lengths):
    return tuple(module((torch.zeros(sum(lengths), 3),), {"lengths": torch.tensor(lengths)}).shape)


def test_a_shape_may_depend_on_values_of_integers():
    pieces = Imagined(Pieces())
    assert shape_of(pieces, 2, 4) == (2, 5)
    assert shape_of(pieces, 1, 5) == (2, 5)
    assert shape_of(pieces, 2, 2, 2) == (3, 5)


def test_a_shape_is_found_once_for_the_same_values(monkeypatch):
    # A list that forwards name would be given back.
    calls, run = [], Imagined._run
    monkeypatch.setattr(Imagined, "_run", lambda *arguments: calls.append(1) or run(*arguments))
    pieces = Imagined(Pieces())
    shape_of(pieces, 2, 4)
    # The first try shows that shapes of arguments do not suffice.
    assert len(calls) == 2
    shape_of(pieces, 2, 4)
    assert len(calls) == 2
    shape_of(pieces, 4, 2)
    assert len(calls) == 3


def test_values_do_not_count_where_shapes_suffice():
    module = nn.Embedding(7, 5)
    imagined = Imagined(module)
    first = imagined((torch.tensor([[1, 2]]),), {})
    assert tuple(first.shape) == (1, 2, 5)
    assert imagined((torch.tensor([[3, 4]]),), {}) is first


def test_a_module_that_was_cast_returns_the_new_type():
    module, tokens = nn.Embedding(7, 5), torch.tensor([[1, 2]])
    imagined = Imagined(module)
    assert imagined((tokens,), {}).dtype == torch.float32
    module.bfloat16()
    assert imagined((tokens,), {}).dtype == torch.bfloat16


def test_buffers_stay_as_they_are():
    module = Pieces()
    shape_of(Imagined(module), 2, 4)
    assert module.calls == 0 and module.before == 0


class Doubled(nn.Linear):
    """Computes with twice its weight, by a parametrization that lasts for one forward, as peft does for experts."""

    def forward(self, rows):
        register_parametrization(self, "weight", Twice())
        try:
            return super().forward(rows)
        finally:
            remove_parametrizations(self, "weight", leave_parametrized=False)


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_a_forward_may_parametrize_its_parameters():
    module = Doubled(3, 5)
    weight = module.weight
    assert Imagined(module)((torch.zeros(2, 3),), {}).shape == (2, 5)
    assert module.weight is weight and not [*module.buffers()]
    module(torch.zeros(2, 3))


def test_a_shape_that_depends_on_values_of_floats_is_refused_by_torch():
    with pytest.raises(Exception, match="nonzero|dynamic|Dynamic"):
        Imagined(Positive())((torch.ones(3),), {})


class Positive(nn.Module):
    def forward(self, rows):
        return rows[rows > 0]


def test_a_part_with_two_names_keeps_its_parameters():
    module = nn.Module()
    module.first = module.second = nn.Linear(3, 5)
    module.forward = lambda rows: module.second(rows)
    weight = module.first.weight
    assert tuple(Imagined(module)((torch.zeros(2, 3),), {}).shape) == (2, 5)
    assert module.first.weight is module.second.weight is weight
