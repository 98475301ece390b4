"""Makes layers compute the same in every layout.

Seeds depend on what is computed, not on where or when. Tensors have the same memory layout wherever a chunk ends.
"""

from hashlib import blake2b
from typing import Any

import torch

_ALIGNMENT = 64
"""In bytes. torch aligns memory on a CPU to this, and MKL asks for it where results must be reproducible."""


def hashed_seed(*words: int | str) -> int:
    """Returns a seed of 64 bits. Different lists of words share a seed only by chance.

    torch's generator of the CPU takes the lower 32 bits.
    """
    return int.from_bytes(blake2b(repr(words).encode(), digest_size=8).digest(), "little")


def laid_out(value: Any) -> Any:
    """Returns ``value`` with all its tensors contiguous and aligned, as if another rank had sent them.

    Their gradients get the same layout in the backward pass. A kernel may round differently if a matrix is transposed
    or begins elsewhere. Tensors inside tuples are included; other values are returned as they are.
    """
    if isinstance(value, tuple):
        return tuple(map(laid_out, value))
    if not isinstance(value, torch.Tensor):
        return value
    plain = _plain(value)
    if plain.requires_grad and plain.is_leaf:
        # A hook on a parameter would outlive the forward.
        plain = plain.view_as(plain)
    if plain.requires_grad:
        plain.register_hook(_plain)
    return plain


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
