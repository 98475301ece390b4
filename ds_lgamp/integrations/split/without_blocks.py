"""Runs a model's own forward with something else in place of its blocks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import starmap
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.attributes import OwnState, SetAttributes
from ds_lgamp.integrations.split.call import BlockArguments, Call, Survey, Use, run_uncompiled
from ds_lgamp.integrations.split.parts import Original, Sides, place_of
from ds_lgamp.integrations.split.stand_ins import (
    BlockStandIn,
    Placeholder,
    PlaceholderUsed,
    Unknown,
    Visit,
    replacing,
)
from ds_lgamp.integrations.split.state import Buffers, unchanged_tensors

SKIPPED = (
    "the forward of the model skipped blocks, or called them in another order than that of their list; let it call "
    "every block in its turn, and set layerdrop to 0 in the model's config"
)


Others = Callable[[int], Sequence[Tensor] | None]
"""Returns what stands for the tensors that a block, by its number, returns besides hidden states."""


def _no_others(_: int) -> None:
    return None


class Stop(Exception):
    """The forward has come as far as it should."""


class ForwardWithoutBlocks:
    """The forward of a model, where blocks do not compute.

    Args:
        original: the model.
        sides: its other parts.
        shown: what a small call of the model showed.
    """

    def __init__(self, original: Original, sides: Sides, shown: Survey) -> None:
        model, blocks = original.model, original.blocks
        self._model, self._returned, self._blocks = model, shown.returned, [*blocks.named.values()]
        self.attributes = SetAttributes([*blocks.named.values()])
        self.own_state = OwnState(sides.own_modules(original))
        self._of_layers = {id(module) for module in model.modules()} - {id(each) for each in self.own_state.modules}
        self._stand_ins: list[tuple[dict[str, Any], str, Any]] = [
            (*place_of(blocks.container, name), BlockStandIn(block, index, self.attributes, self._visit_block))
            for index, (name, block) in enumerate(blocks.named.items())
        ]
        # The forward of its engine calls the engine.
        self._stand_ins.append((vars(model), "forward", model.forward))
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

    def run(self, call: Call, visit: Visit, others: Others = _no_others) -> Any:
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


def _not_running(*_: Any) -> NoReturn:
    raise RuntimeError("the stand-in for a block is called outside of a forward")
