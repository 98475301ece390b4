"""The micro-batches that a script has given to the engine since its last step."""

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.transformers.call import Arguments


class Kept:
    """Keeps micro-batches until the batch is complete, by reference. So the script must leave their tensors alone."""

    def __init__(self) -> None:
        self.calls: list[Arguments] = []
        self._versions: list[list[tuple[Tensor, int]]] = []
        """Of each call, its tensors, and how often each had been changed."""

    def add(self, call: Arguments) -> None:
        tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor) and not leaf.is_inference()]
        self.calls.append(call)
        # A view counts the changes of all of the tensor that it is a part of.
        self._versions.append([(tensor, tensor._version) for tensor in tensors if not tensor._is_view()])

    def clear(self) -> None:
        self.calls.clear()
        self._versions.clear()

    def check(self) -> None:
        """Raises ConfigError if a tensor was changed since it was given."""
        for number, tensors in enumerate(self._versions):
            if any(tensor._version != version for tensor, version in tensors):
                raise ConfigError(
                    f"micro-batch {number} of {len(self.calls)} was changed after engine(...) got it, but a {BLOCK} "
                    "block computes all micro-batches when the last one is there; give the engine new tensors"
                )
