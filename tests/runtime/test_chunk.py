"""The results that a chunk may return, and the buffers that its forwards change."""

from functools import partial

import pytest
import torch
from torch import nn

from ds_lgamp.runtime.chunk import Chunk, as_tuple


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([torch.ones(1)], "a tensor or a tuple of tensors, not list of Tensor"),
        ((torch.ones(1), None), "not tuple of NoneType, Tensor"),
        (torch.ones(1, dtype=torch.complex64), "a chunk returned a complex tensor; return real ones"),
    ],
)
def test_what_a_link_cannot_carry_is_refused(value, words):
    with pytest.raises(TypeError) as refused:
        as_tuple(value)
    assert words in str(refused.value)


class Counting(nn.Module):
    """Counts calls in training mode, either in place or by replacing the buffer."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("constant", torch.ones(1000))
        self.register_buffer("nothing", None)

    def forward(self, inputs):
        if self.training and self.in_place:
            self.calls += 1
        elif self.training:
            self.calls = self.calls + 1
        return inputs * self.constant[0]


def called(chunk):
    """Runs a forward. Returns the names of the buffers read before it, the names of those that it changes, and their
    state before it."""
    before = chunk.read_buffers()
    chunk(torch.ones(1), 0)
    moved = chunk.moved(before)
    return [buffer.name for buffer in before], [buffer.name for buffer in moved], moved


@pytest.mark.parametrize("in_place", [True, False])
def test_only_buffers_that_a_forward_moves_are_copied(in_place):
    layer = Counting(in_place)
    chunk = Chunk([layer])
    for call in range(3):
        before, moved, state = called(chunk)
        assert before == (["calls", "constant", "nothing"] if call == 0 else ["calls"])
        assert moved == ["calls"] and layer.calls == call + 1
    chunk.write_buffers(state)
    assert layer.calls == 2 and layer.state_dict()["calls"] == 2


def test_buffers_of_a_module_behind_a_function_of_it_are_found():
    """As a tied module is called whose specification has a forward_fn."""
    layer = Counting(in_place=True)
    assert called(Chunk([partial(Counting.forward, layer)]))[1] == ["calls"]


@pytest.mark.parametrize("in_place", [True, False])
def test_buffers_that_move_in_training_mode_alone_are_found_when_it_begins(in_place):
    layer = Counting(in_place).eval()
    chunk = Chunk([layer])
    assert [called(chunk)[1] for _ in range(2)] == [[], []]
    layer.train()
    before, moved, state = called(chunk)
    assert before == ["calls", "constant", "nothing"] and moved == ["calls"]
    chunk.write_buffers(state)
    assert layer.calls == 0


def test_a_buffer_that_a_forward_makes_is_taken_away_again():
    layer = Counting(in_place=True)
    chunk = Chunk([layer, lambda inputs: setattr(layer, "nothing", inputs) or inputs])
    *_, state = called(chunk)
    chunk.write_buffers(state)
    assert layer.nothing is None


def test_a_buffer_that_is_replaced_has_moved_whatever_its_value():
    layer = Counting(in_place=True).eval()
    chunk = Chunk([layer, lambda inputs: setattr(layer, "constant", layer.constant.clone()) or inputs])
    assert called(chunk)[1] == ["constant"]


def test_a_chunk_without_buffers_reads_none():
    assert called(Chunk([nn.Linear(1, 1)])) == ([], [], [])
    assert called(Chunk([partial(nn.functional.dropout, p=0.1)])) == ([], [], [])
