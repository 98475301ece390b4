"""Tensors of any layout in memory: transposed ones, such with gaps, and expanded ones, whose elements repeat."""

import torch
from torch import Tensor


def row_of(tensor: Tensor) -> Tensor:
    """Returns the elements of ``tensor`` in one row, in its own memory if it is contiguous."""
    # A view would keep the stride of a dimension of one element, which means nothing, and forbid to see bytes.
    return tensor.contiguous().as_strided([tensor.numel()], [1])


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the bytes of ``tensor`` in one row, in its own memory if it is contiguous."""
    return row_of(tensor).view(torch.uint8)


def write(tensor: Tensor, values: Tensor) -> None:
    """Gives ``tensor`` the ``values``, of its shape. One that is expanded takes each of its elements once."""
    once = without_repetition(tensor)
    tensor[once].copy_(values[once])


def without_repetition(tensor: Tensor) -> tuple[slice, ...]:
    """Returns the index of the elements of ``tensor`` of which an expanded one repeats none."""
    return tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
