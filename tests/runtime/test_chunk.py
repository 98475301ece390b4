"""What a chunk may return, and which buffers its forwards move."""

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
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("constant", torch.ones(1000))

    def forward(self, inputs):
        self.calls += 1
        return inputs * self.constant[0]


def test_only_buffers_that_a_forward_moves_are_copied():
    layer = Counting()
    chunk = Chunk([layer])
    for call in range(3):
        before = chunk.read_buffers()
        assert len(before) == (2 if call == 0 else 1)
        chunk(torch.ones(1), 0)
        ((buffer, value),) = chunk.changed(before)
        assert buffer is layer.calls and value == call
    chunk.write_buffers(before)
    assert layer.calls == 2
