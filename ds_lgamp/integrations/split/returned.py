"""What blocks return besides hidden states: tensors, also in lists and dictionaries, and other objects."""

from collections.abc import Sequence
from enum import Enum
from itertools import count
from typing import Any, NamedTuple, NoReturn

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ds_lgamp.config import BLOCK, ConfigError

_CONSTANTS = (type(None), bool, int, float, str)
"""Types of which a value may always be the same. Other values than tensors and these do not travel."""


class NoTensor:
    """Stands in for an object that does not travel. Whatever computes with it raises ConfigError."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"the forward of the model computes with an object that a block returned besides hidden states, but with a "
            f"{BLOCK} block only tensors travel; let the block return a tensor"
        )


def _refuse(*_: Any) -> NoReturn:
    NoTensor.__torch_function__()


for _name in "bool float int index len iter getitem contains add radd sub rsub mul rmul truediv eq ne call".split():
    setattr(NoTensor, f"__{_name}__", _refuse)


class Use(Enum):
    """What the forward of a model does with tensors that blocks return besides hidden states, after all blocks."""

    NONE = "nothing"
    RETURN = "returns them"
    COMPUTE = "computes with them"


class Returned(NamedTuple):
    """What a block returned besides hidden states."""

    leaves: Sequence[Any]
    structure: TreeSpec | None
    """How they are nested; None if the block returned a tensor only."""

    @classmethod
    def of(cls, result: Any) -> tuple[Any, "Returned"]:
        """Returns the hidden states in what a block returned, and what is beside them."""
        if not isinstance(result, tuple) or not result:
            return result, NOTHING
        return result[0], cls(*tree_flatten(result[1:]))

    def detached(self) -> "Returned":
        return self._replace(leaves=[leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves])

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def kinds(self) -> tuple[Any, ...]:
        """What must be the same of two, so that code that gets the one goes on as with the other."""
        return self.structure, *map(_kind, self.leaves)

    def with_tensors(self, hidden: Any, tensors: Sequence[Any]) -> Any:
        """Returns such a result of a block, with others for its ``tensors``."""
        if self.structure is None:
            return hidden
        places = count()
        leaves = [tensors[next(places)] if isinstance(leaf, Tensor) else _without_object(leaf) for leaf in self.leaves]
        return hidden, *tree_unflatten(leaves, self.structure)


NOTHING = Returned((), None)


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Tensor
    return (type(leaf), leaf) if isinstance(leaf, _CONSTANTS) else NoTensor


def _without_object(leaf: Any) -> Any:
    return leaf if isinstance(leaf, _CONSTANTS) else NoTensor()
