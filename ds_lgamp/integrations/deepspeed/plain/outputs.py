"""The outputs that ``engine(batch)`` returns. The script's backward passes leave their gradients here."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_lgamp.runtime.graph import begin_graph


class ReturnedOutputs:
    """The outputs that the script got since the last step.

    Args:
        scale: returns by what the engine multiplies gradients whose backward passes the script calls itself.
    """

    def __init__(self, scale: Callable[[], float]) -> None:
        self._scale = scale
        self._is_scaled = False
        self._calls: list[list[Tensor | None]] = []
        """By call: what the graph of each floating-point output begins with; None if it needs no gradient."""

    def give(self, outputs: Any, needs: Sequence[bool]) -> Any:
        """Returns the ``outputs`` of a call, which now require gradients.

        Args:
            needs: which of their floating-point tensors need gradients.
        """
        leaves, structure = tree_flatten(outputs)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        starts: list[Tensor | None] = [None] * len(places)
        for number, (place, needed) in enumerate(zip(places, needs, strict=True)):
            if needed:
                (start,), (leaves[place],) = begin_graph((leaves[place],))
                start.register_hook(self._scaled)
                starts[number] = start
        self._calls.append(starts)
        return tree_unflatten(leaves, structure)

    def _scaled(self, gradient: Tensor) -> Tensor:
        return gradient if self._is_scaled else gradient * self._scale()

    @contextmanager
    def scaled(self) -> Iterator[None]:
        """Inside the block, the script's loss is multiplied already."""
        self._is_scaled = True
        try:
            yield
        finally:
            self._is_scaled = False

    def take(self) -> list[list[Tensor | None]]:
        """Returns the gradients of all calls, and forgets these. A call has a gradient for every floating-point
        output; None where the script gave none."""
        calls, self._calls = self._calls, []
        return [[None if start is None else start.grad for start in starts] for starts in calls]
