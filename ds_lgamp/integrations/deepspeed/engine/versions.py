"""Notices that a script changes tensors that it has already given as parts of micro-batches."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


class Versions:
    """How often the tensors of micro-batches had been changed when they were given."""

    def __init__(self) -> None:
        self._given: list[list[tuple[Tensor, int]]] = []

    def add(self, micro_batch: Any) -> None:
        """Notes the tensors of the next micro-batch. Leaves out views, which count the changes of all of the tensor
        that they are a part of."""
        tensors = [leaf for leaf in tree_leaves(micro_batch) if isinstance(leaf, Tensor) and not leaf.is_inference()]
        self._given.append([(tensor, tensor._version) for tensor in tensors if not tensor._is_view()])

    def changed(self) -> int | None:
        """Returns the number of the first micro-batch that was changed since it was noted; None if none was."""
        for number, tensors in enumerate(self._given):
            if any(tensor._version != version for tensor, version in tensors):
                return number
        return None

    def clear(self) -> None:
        self._given.clear()
