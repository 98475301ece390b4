"""By-products of blocks: tensors that they make besides hidden states, and with which the code after the blocks
computes, such as the logits of routers. They travel with the hidden states from their block to the last layer."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.call import Call, Survey
from ds_lgamp.integrations.split.parts import Original
from ds_lgamp.integrations.split.stand_ins import Placeholder
from ds_lgamp.integrations.split.travelling import numbers_like


class Byproducts:
    """The by-products of a model's blocks: members of the tuples that they return, and what the model's recorder finds.

    Args:
        original: the model.
        shown: what a small call of it showed.
    """

    def __init__(self, original: Original, shown: Survey) -> None:
        self.places = shown.byproduct_places
        self._shown, self._model, self._recorder = shown.byproducts, original.model, original.recorder
        self._left: Iterator[Tensor] | None = None
        """What the code after the blocks has not found yet; None where it needs no by-products themselves."""

    def records(self) -> bool:
        """Whether the forward that runs records by-products."""
        return self._recorder.records()

    def recording(self, records: bool) -> AbstractContextManager[list[Tensor]]:
        """Returns a context manager that yields the list of what is recorded of a block inside.

        Args:
            records: whether the forward records anything.
        """
        return self._recorder.recording() if records else nullcontext([])

    def after_block(
        self, index: int, call: Call, carried: Sequence[Tensor], result: Any, recorded: list[Tensor]
    ) -> list[Tensor]:
        """Returns the by-products that travel on after block ``index``.

        Args:
            carried: those that came to it.
            result: what it returned.
            recorded: what was recorded of it.

        Raises ConfigError if that is more or less than in the small call.
        """
        if recorded and len(recorded) != len(self._shown[index]) - len(self.places):
            raise ConfigError(
                f"block {index} of the model left {len(recorded)} tensors to hooks, but another number for the dummy "
                f"inputs; set {BLOCK}.dummy_inputs to arguments such as the script's"
            )
        if self._are_reduced(call):
            return self._recorder.reduced((call.positional, call.named), carried, recorded)
        return [*carried, *(result[1 + place] for place in self.places), *recorded]

    def _are_reduced(self, call: Call) -> bool:
        """Whether the code after the blocks needs less than all by-products of a call. In evaluation, the script may
        read them."""
        return self._model.training and self._recorder.reduces((call.positional, call.named))

    @contextmanager
    def at_end(self, call: Call, carried: Sequence[Tensor] | None) -> Iterator[None]:
        """Lets :meth:`of_block` find inside what was ``carried`` to the end; if None, numbers as in the small call."""
        are_reduced = carried is not None and self._are_reduced(call)
        if carried is None:
            carried = [numbers_like(tensor) for made in self._shown for tensor in made]
        self._left = None if are_reduced else iter(carried)
        try:
            with self._recorder.needing_only((call.positional, call.named), carried) if are_reduced else nullcontext():
                yield
        finally:
            self._left = None

    def of_block(self, index: int) -> dict[int, Tensor]:
        """Returns what the code after the blocks finds of block ``index``, by place. The recorder gets the rest."""
        found = {place: self._next(index) for place in self.places}
        if self.records():
            self._recorder.give([self._next(index) for _ in self._shown[index][len(self.places) :]])
        return found

    def _next(self, index: int) -> Tensor:
        return Placeholder.of(index, 0) if self._left is None else next(self._left)
