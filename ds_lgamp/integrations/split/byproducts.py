"""By-products of blocks: tensors that they make besides hidden states, and with which the code after the blocks
computes, such as the logits of routers. They travel with the hidden states from their block to the last layer."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice, repeat

from torch import Tensor

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.call import Call, Returned, Survey, Use
from ds_lgamp.integrations.split.parts import Original
from ds_lgamp.integrations.split.stand_ins import Placeholder
from ds_lgamp.integrations.split.travelling import numbers_like


class Byproducts:
    """The by-products of a model's blocks: tensors that they return beside hidden states, and what the model's recorder
    finds. First those that are recorded travel, then the others.

    Args:
        original: the model.
        shown: what a small call of it showed.
    """

    def __init__(self, original: Original, shown: Survey) -> None:
        self._returned, self._recorded, self._use = shown.returned, shown.recorded, shown.use
        self._model, self._recorder = original.model, original.recorder
        self._blocks = [*original.blocks.named.values()]
        self._kinds = [{mode: each.kinds for mode, each in modes.items()} for modes in self._returned]
        self._numbers = [{mode: len(each.tensors) for mode, each in modes.items()} for modes in self._returned]
        """How many tensors every block returns besides hidden states, in training or not."""
        self._left: tuple[Iterator[Tensor] | None, Iterator[Tensor] | None] = None, None
        """What the code after the blocks has not found yet of recorded ones, and of the others; None where it needs
        none of them."""

    def records(self) -> bool:
        """Whether the forward that runs records by-products."""
        return self._recorder.records()

    def recording(self, records: bool) -> AbstractContextManager[list[Tensor]]:
        """Yields the list of what is recorded of a block inside, if the forward ``records`` anything."""
        return self._recorder.recording(records)

    def after_block(
        self, index: int, call: Call, carried: Sequence[Tensor], returned: Returned, recorded: list[Tensor]
    ) -> list[Tensor]:
        """Returns the by-products that travel on after block ``index``.

        Args:
            carried: those that came to it.
            returned: what it returned besides hidden states.
            recorded: what was recorded of it.

        Raises ConfigError if that is more or less than in the small call.
        """
        if returned.kinds != self._kinds[index][self._blocks[index].training]:
            raise ConfigError(
                f"block {index} of the model returned other things besides hidden states than for the dummy inputs; "
                f"let it return tensors, not numbers, or set {BLOCK}.dummy_inputs to arguments such as the script's"
            )
        if recorded and len(recorded) != len(self._recorded[index]):
            raise ConfigError(
                f"block {index} of the model left {len(recorded)} tensors to hooks, but another number for the dummy "
                f"inputs; set {BLOCK}.dummy_inputs to arguments such as the script's"
            )
        travels = self._travel(call)
        before, others = self._apart(index, carried) if travels else (carried, ())
        if self._are_reduced(call):
            known = self._recorder.reduced((call.positional, call.named), [*before], recorded)
        else:
            known = [*before, *recorded]
        return [*known, *others, *(returned.tensors if travels else ())]

    def _number(self, index: int) -> int:
        """Returns how many tensors a block returns besides hidden states."""
        return self._numbers[index][self._blocks[index].training]

    def _travel(self, call: Call) -> bool:
        """Whether the tensors travel that blocks return besides hidden states."""
        return self._use is Use.COMPUTE or (self._use is Use.RETURN and call.is_whole)

    def _apart(self, blocks: int, carried: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Returns which of the by-products of the first ``blocks`` were recorded, or made of recorded ones, and which
        were returned."""
        recorded = len(carried) - sum(map(self._number, range(blocks)))
        return carried[:recorded], carried[recorded:]

    def _are_reduced(self, call: Call) -> bool:
        """Whether the code after the blocks needs less than all that is recorded in a call. In evaluation, the script
        may read it."""
        return self._model.training and self._recorder.reduces((call.positional, call.named))

    @contextmanager
    def at_end(self, call: Call, carried: Sequence[Tensor] | None) -> Iterator[None]:
        """Lets :meth:`of_block` find inside what was ``carried`` to the end; if None, numbers as in the small call."""
        are_reduced, travels = carried is not None and self._are_reduced(call), self._travel(call)
        blocks = range(len(self._blocks))
        if carried is None:
            carried = [number_like(tensor) for index in blocks for tensor in self._recorded[index]]
            shown = [modes[block.training] for modes, block in zip(self._returned, self._blocks)] if travels else []
            carried += [number_like(tensor) for each in shown for tensor in each.tensors]
        recorded, returned = self._apart(len(blocks), carried) if travels else (carried, ())
        self._left = None if are_reduced else iter(recorded), iter(returned) if travels else None
        arguments = call.positional, call.named
        try:
            with self._recorder.needing_only(arguments, recorded) if are_reduced else nullcontext():
                yield
        finally:
            self._left = None, None

    def of_block(self, index: int) -> list[Tensor] | None:
        """Returns the tensors that the code after the blocks finds of block ``index`` besides hidden states; None if
        they have not travelled. The recorder gets the rest."""
        recorded, returned = self._left
        if self.records():
            number = len(self._recorded[index])
            made = repeat(Placeholder.of(index, REDUCED)) if recorded is None else recorded
            self._recorder.give([*islice(made, number)])
        return None if returned is None else [*islice(returned, self._number(index))]


REDUCED = -1
"""The place of placeholders for what is recorded, if only sums have travelled."""


def number_like(tensor: Tensor) -> Tensor:
    """Returns other numbers, or the same integers, because these may choose."""
    return numbers_like(tensor) if tensor.is_floating_point() else tensor.clone()
