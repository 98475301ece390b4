"""Runs a model's own forward with something else in place of its blocks.

By-products of blocks are tensors that they make besides hidden states, and with which the code after the blocks
computes, such as the logits of routers. They travel with the hidden states from their block to the last layer, where
they take the place of what blocks return.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice, repeat, starmap
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.call import BlockArguments, Call, Returned, SetAttributes, Survey, Use, run_uncompiled
from ds_lgamp.integrations.split.parts import Original, Sides
from ds_lgamp.integrations.split.stand_ins import (
    Placeholder,
    PlaceholderUsed,
    Unknown,
    Visit,
    replacing,
    stand_ins_of,
)
from ds_lgamp.integrations.split.state import Buffers, Place, Snapshot, unchanged_tensors
from ds_lgamp.integrations.split.travelling import numbers_like

SKIPPED = (
    "the forward of the model skipped blocks, or called them in another order than that of their list; let it call "
    "every block in its turn, and set layerdrop to 0 in the model's config"
)


Others = Callable[[int], Sequence[Tensor] | None]
"""Returns what stands for the tensors that a block, by its number, returns besides hidden states."""


class Stop(Exception):
    """The forward has come as far as it should."""


class ForwardWithoutBlocks:
    """The forward of a model, where blocks do not compute."""

    def __init__(self, original: Original, sides: Sides, shown: Survey) -> None:
        model, blocks = original.model, original.blocks
        self._model, self._returned, self._blocks = model, shown.returned, [*blocks.named.values()]
        self.attributes = SetAttributes([*blocks.named.values()])
        self.own_state = OwnState(sides.own_modules(original))
        self._of_layers = {id(module) for module in model.modules()} - {id(each) for each in self.own_state.modules}
        # The forward of its engine calls the engine.
        own_forward = vars(model), "forward", model.forward
        self._stand_ins = [*stand_ins_of(blocks, self.attributes, self._visit_block), own_forward]
        kind = Unknown if shown.use is Use.COMPUTE else Placeholder
        self._placeholders = [
            {
                training: [*starmap(partial(kind.of, index), enumerate(each.tensors))]
                for training, each in returned.items()
            }
            for index, returned in enumerate(shown.returned)
        ]
        """What stands in for tensors that blocks return besides hidden states, up to the last block."""
        # Their code runs several times for every micro-batch.
        self._buffers = Buffers((path, model.get_submodule(path)) for path in blocks.chain)
        self._visit: Callable[[int, Tensor, BlockArguments], Any] = _not_running
        self._others: Others = _not_running
        self.visits = 0
        """How many calls of blocks the forward that runs has made."""

    def run(self, call: Call, visit: Visit, others: Others = lambda _: None) -> Any:
        """Runs the forward for a call. Returns the model's output.

        Args:
            visit: called in place of every block.
            others: returns what stands for the tensors that a block returns besides hidden states; None for
                placeholders.

        Raises ConfigError if the forward does what it may not do several times for a micro-batch.
        """
        with self._visiting(visit, others), self.own_state.counted_once(call):
            try:
                return run_uncompiled(self._model, *call.positional, **call.named)
            except PlaceholderUsed as used:
                raise ConfigError(str(used)) from None

    def run_until_stop(self, call: Call, visit: Visit) -> None:
        """Runs the forward until ``visit`` raises :class:`Stop`."""
        with unchanged_tensors((call.positional, call.named)):
            try:
                self.run(call, visit)
            except Stop:
                return
        raise ConfigError(SKIPPED)

    @contextmanager
    def _visiting(self, visit: Visit, others: Others) -> Iterator[None]:
        """Runs the stand-ins of blocks inside the block, where the model has its own forward."""
        self._visit, self.visits, self._others = visit, 0, others
        # It sees all modules, also modules that a forward makes.
        registration = register_module_module_registration_hook(self._refuse_module)
        try:
            with replacing(self._stand_ins), self._unchanged_buffers():
                yield
        finally:
            registration.remove()
            self._visit = self._others = _not_running

    def _visit_block(self, index: int, hidden: Tensor, arguments: BlockArguments) -> Any:
        """Returns what the forward gets in place of the result of block ``index``."""
        if self.visits < len(self._placeholders) and index != self.visits:
            raise ConfigError(SKIPPED)
        self.visits += 1
        hidden, others = self._visit(index, hidden, arguments), self._others(index)
        trains = self._blocks[index].training
        others = self._placeholders[index][trains] if others is None else others
        return self._returned[index][trains].with_tensors(hidden, others)

    @contextmanager
    def _unchanged_buffers(self) -> Iterator[None]:
        """Raises ConfigError if the code around the blocks changes a buffer inside the block."""
        self._buffers.remember()
        yield
        if (name := self._buffers.changed()) is not None:
            raise ConfigError(
                f"the forward of the model changes its buffer '{name}', but with a {BLOCK} block it runs in parts, "
                "several times for every micro-batch; change the buffer in the script, or in a module outside the "
                "blocks"
            )

    def _refuse_module(self, module: nn.Module, name: str, inner: Any) -> None:
        """Raises ConfigError if the forward gives a module of a layer another one."""
        if id(module) in self._of_layers and module._modules.get(name) is not inner:
            raise ConfigError(
                f"the forward of the model puts another module into the place of '{name}' of a "
                f"{type(module).__name__}, for good; with a {BLOCK} block, call it with arguments with which it does "
                "not, such as longer sequences for BigBird"
            )


class OwnState:
    """The attributes of the modules whose code runs in every part of the forward, such as counters. Each part runs the
    code before the blocks again, so what that sets counts once."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self._after: set[Place] = set()
        """What is set after the blocks. That code runs once for every micro-batch."""
        self._last: Snapshot | None = None
        """As the last part of the forward began."""
        self._end_of_blocks: Snapshot | None = None

    @contextmanager
    def counted_once(self, call: Call) -> Iterator[None]:
        """Lets the attributes have the values inside the block that they had when the forward first ran for ``call`` on
        this rank. Only what that first run has set stays."""
        now = self._last = self._current()
        if call.own_state is None:
            call.own_state = now
            yield
            return
        if call.own_state is not now:
            call.own_state.restore(self._after)
        self._end_of_blocks = None
        try:
            yield
        finally:
            end = self._end_of_blocks
            after: set[Place] = set() if end is None else {(holder, name) for holder, name, _ in end.changed()}
            self._after |= after
            if after or end is not now:
                now.restore(self._after)

    def reached_end_of_blocks(self) -> None:
        """Called before the code after the blocks runs."""
        self._end_of_blocks = self._current()

    def _current(self) -> Snapshot:
        """Returns a snapshot, which is the last one of :meth:`counted_once` if nothing has changed since."""
        return Snapshot(self.modules) if self._last is None or any(self._last.changed()) else self._last


def _not_running(*_: Any) -> NoReturn:
    raise RuntimeError("the stand-in for a block is called outside of a forward")


class Byproducts:
    """The by-products of a model's blocks: tensors that they return beside hidden states, and what the model's recorder
    finds. First those that are recorded travel, then the others."""

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
        if self._recorder.records():
            number = len(self._recorded[index])
            made = repeat(Placeholder.of(index, REDUCED)) if recorded is None else recorded
            self._recorder.give([*islice(made, number)])
        return None if returned is None else [*islice(returned, self._number(index))]


REDUCED = -1
"""The place of placeholders for what is recorded, if only sums have travelled."""


def number_like(tensor: Tensor) -> Tensor:
    """Returns other numbers, or the same integers, because these may choose."""
    return numbers_like(tensor) if tensor.is_floating_point() else tensor.clone()
