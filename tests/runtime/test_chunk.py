"""The results that a chunk may return."""

import pytest
import torch

from ds_lgamp.runtime.chunk import as_tuple


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
