"""The outputs that ``engine(batch)`` returns. The script's backward passes leave their gradients here."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Variable
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_lgamp.config import ConfigError
from ds_lgamp.runtime.graph import begin_graph


class ReturnedOutputs:
    """The outputs that the script got since the last step.

    Args:
        factor: returns by what a gradient is multiplied if the script calls ``loss.backward()`` itself. May raise.
    """

    def __init__(self, factor: Callable[[], float]) -> None:
        self._factor = factor
        self._has_factor = False
        """Whether the loss of the backward pass that runs is multiplied already."""
        self._starts: list[list[Tensor | None]] = []
        """By call: with what the graph of each floating-point output begins; None if it needs no gradient."""
        self._step = 0

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
                start.register_hook(partial(self._arriving, self._step))
                starts[number] = start
        self._starts.append(starts)
        # A backward pass that has failed does not end.
        self._has_factor = False
        return tree_unflatten(leaves, structure)

    def _arriving(self, step: int, gradient: Tensor) -> Tensor:
        if step != self._step:
            raise ConfigError(
                "a gradient of an output of engine(...) arrives after its engine.step(); call engine.backward ahead of "
                "that, and detach outputs for whatever follows"
            )
        return gradient if self._has_factor else gradient * self._factor()

    def with_factor(self, loss: Tensor) -> Tensor:
        """Returns a ``loss`` that is multiplied already, whose backward passes leave gradients as they are."""
        loss.register_hook(self._begins)
        return loss

    def _begins(self, _gradient: Tensor) -> None:
        self._has_factor = True
        Variable._execution_engine.queue_callback(self._ends)

    def _ends(self) -> None:
        self._has_factor = False

    def __len__(self) -> int:
        """The number of calls."""
        return len(self._starts)

    @property
    def gradients(self) -> Iterator[bool]:
        """Whether each call has a gradient of an output."""
        return (any(start is not None and start.grad is not None for start in starts) for starts in self._starts)

    def take(self) -> list[list[Tensor | None]]:
        """Returns the gradients of all calls, and forgets them. A call has one for every floating-point output, None
        where the script gave none."""
        calls, self._starts = self._starts, []
        self._step += 1
        return [[None if start is None else _taken(start) for start in starts] for starts in calls]


def _taken(start: Tensor) -> Tensor | None:
    # A loss that the script keeps must not keep the gradient.
    gradient, start.grad = start.grad, None
    return gradient
