"""Compares nested values with tensors."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ds_lgamp.integrations.split.stand_ins import Passed


def is_alike(first: Any, second: Any) -> bool:
    """Whether tensors in both values are equal, but for rounding. Everything else may differ, and what stands in for a
    tensor of another block."""
    pairs = zip(tree_flatten(first)[0], tree_flatten(second)[0], strict=True)
    return all(
        _are_close(one, other) for one, other in pairs if isinstance(one, Tensor) and not isinstance(one, Passed)
    )


def _are_close(one: Tensor, other: Any) -> bool:
    if not isinstance(other, Tensor) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one.float(), other.float(), rtol=1e-3, atol=1e-5, equal_nan=True)
