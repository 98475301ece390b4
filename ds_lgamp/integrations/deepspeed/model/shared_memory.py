"""Parameters that share memory without being one tensor. A unit gives every parameter memory of its own, so an update
of one would no longer show in the other."""

from collections.abc import Iterable
from itertools import combinations

import torch
from torch import Tensor, nn


def complaint_about_memory(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Returns the sentence that refuses a trained parameter which shares memory with another one of the tensors, or
    whose elements share it; None if there is none.

    Args:
        named: parameters and buffers, by the names that the sentence shall use.
    """
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in named:
        if type(tensor.data) is Tensor and tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta:
            if _trains(tensor) and _repeats(tensor):
                return (
                    f"elements of the parameter {name} share memory, which no optimizer can update; make it from a "
                    "clone() of its values"
                )
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for members in by_storage.values():
        for (name, tensor), (other, second) in combinations(members, 2):
            if tensor is not second and (_trains(tensor) or _trains(second)) and _overlap(tensor, second):
                return (
                    f"{name} and {other} share memory, but are two tensors, of which one would not follow the updates "
                    "of the other; make them one parameter, or clone() one"
                )
    return None


def _trains(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _repeats(tensor: Tensor) -> bool:
    """Whether two elements of ``tensor`` may have one place in memory. True also for some strides that nobody uses."""
    last = 0
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1):
        if stride <= last:
            return True
        last += stride * (size - 1)
    return False


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one storage have bytes in common."""
    ranges = [_range(tensor) for tensor in (first, second)]
    if ranges[0].stop <= ranges[1].start or ranges[1].stop <= ranges[0].start:
        return False
    # Columns of one matrix lie between each other.
    return first.dtype != second.dtype or bool(torch.isin(_places(first), _places(second)).any())


def _range(tensor: Tensor) -> range:
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape))
    size, start = tensor.element_size(), tensor.storage_offset()
    return range(start * size, (start + last + 1) * size)


def _places(tensor: Tensor) -> Tensor:
    """Returns where the elements of ``tensor`` lie in its storage."""
    places = torch.tensor([tensor.storage_offset()])
    for stride, size in zip(tensor.stride(), tensor.shape):
        places = (places[:, None] + stride * torch.arange(size)).flatten()
    return places
