"""Arguments for a second micro-batch, beside those with which a model can be called."""

from collections.abc import Iterator
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_lgamp.integrations.split.call import Arguments
from ds_lgamp.integrations.split.travelling import one


def others(arguments: Arguments, largest: int) -> Iterator[Iterator[Arguments]]:
    """Yields arguments that differ from these, first also in the number of rows or in length, then only in values. Of
    each kind, others than the first are for models that do not take that.

    Args:
        largest: a number that may be a token.
    """
    few = min(largest, 1)
    found = [tree_map_only(Tensor, partial(_other, largest=each), arguments) for each in dict.fromkeys([largest, few])]
    yield chain.from_iterable(map(_of_other_shape, found))
    integers = tree_map_only(Tensor, lambda each: each if each.is_floating_point() else _other(each, few), arguments)
    yield iter([*found, integers])


def _of_other_shape(arguments: Arguments) -> Iterator[Arguments]:
    """Yields arguments with twice as many rows, the first time without the last column."""
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.ndim]
    if len({leaf.shape[0] for leaf in tensors}) != 1:
        return
    longer = tree_map_only(Tensor, lambda each: torch.cat([each, each]) if each.ndim else each, arguments)
    lengths = {leaf.shape[-1] for leaf in tensors if leaf.ndim > 1 and not leaf.is_floating_point()}
    if len(lengths) == 1 and max(lengths) > 1:
        yield tree_map_only(Tensor, _shorter, longer)
    yield longer


def _shorter(tensor: Tensor) -> Tensor:
    """Returns a tensor of integers without the last column."""
    return tensor if tensor.is_floating_point() or tensor.ndim < 2 else tensor[..., :-1]


def _other(tensor: Tensor, largest: int) -> Tensor:
    """Returns a tensor of the same shape with other numbers of the same range."""
    if tensor.is_floating_point():
        return one(tensor.detach())
    if tensor.numel() == 0 or tensor.ndim == 0:
        return tensor
    low, high = (int(each) for each in tensor.to(torch.int64).aminmax())
    if low == high == 0:
        # They may be any tokens.
        places = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
        return ((places * 3 + 1) % (largest + 1)).to(tensor.dtype)
    if low == high == 1:
        # They may be a mask, which needs some ones.
        masked = tensor.clone()
        masked[..., -1] = 0
        return masked
    rolled = tensor.flatten().roll(1).view(tensor.shape)
    return rolled if not torch.equal(rolled, tensor) else tensor.flip(-1)
