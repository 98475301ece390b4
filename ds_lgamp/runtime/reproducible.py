"""What makes layers compute the same in every layout: seeds that depend on what is computed, not on where or when, and
tensors that lie in memory alike wherever a chunk ends."""

from hashlib import blake2b
from typing import Any

import torch

_ALIGNMENT = 64
"""Bytes: that of memory torch has allocated on a CPU, and what MKL asks for where results are to be the same."""


def hashed_seed(*words: int | str) -> int:
    """A seed of 64 bits, which two lists of words share by chance only. torch's generator of the CPU takes the lower 32
    of them."""
    return int.from_bytes(blake2b(repr(words).encode(), digest_size=8).digest(), "little")


def laid_out(value: Any) -> Any:
    """The tensors in ``value`` as they would arrive from another rank, contiguous and aligned, and later their
    gradients: a kernel may round differently where a matrix is transposed or begins elsewhere."""
    if isinstance(value, tuple):
        return tuple(map(laid_out, value))
    if not isinstance(value, torch.Tensor):
        return value
    plain = _plain(value)
    if plain.requires_grad and plain.is_leaf:
        # A hook on a parameter would stay.
        plain = plain.view_as(plain)
    if plain.requires_grad:
        plain.register_hook(_plain)
    return plain


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
