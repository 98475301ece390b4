"""A model's own forward, split at its blocks.

The forward itself runs, with stand-ins for some of its modules. So masks, position ids, rotary tables and the loss are
those of the model, whatever its architecture. A stand-in for a block notes what the block gets, and passes the hidden
states on. A stand-in for a module ahead of the blocks, such as the embedding, returns zeros of the right shape.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.alike import is_alike
from ds_lgamp.integrations.split.autocast import Autocast
from ds_lgamp.integrations.split.blocks import Blocks
from ds_lgamp.integrations.split.buffers import ContainingBuffers, version_of
from ds_lgamp.integrations.split.call import BlockArguments, Call, run_uncompiled
from ds_lgamp.integrations.split.kept import Kept
from ds_lgamp.integrations.split.loss_graph import LossGraph
from ds_lgamp.integrations.split.parts import Part, place_of
from ds_lgamp.integrations.split.stand_ins import (
    Absent,
    AbsentTensor,
    Visited,
    ZeroParameter,
    Zeros,
    replacing,
    with_forward,
)
from ds_lgamp.integrations.split.survey import Survey
from ds_lgamp.runtime.random_state import RandomSource, undisturbed

Visit = Callable[[int, Tensor, BlockArguments], Tensor]
"""Called in place of a block, with its number, the hidden states and the other arguments. Returns hidden states."""


_SKIPPED = "the forward of the model skipped blocks; set layerdrop to 0 in the model's config"


_BETWEEN = (
    f"with these arguments the forward of the model computes between its blocks; with a {BLOCK} block, let it pass on "
    "what each block returns, or write the model as a PipelineModule"
)


_DEPENDS = (
    "depends on random numbers that its forward draws ahead of the blocks, or on values of modules there, but with a "
    f"{BLOCK} block that code runs several times; give the engine random numbers as arguments, and compute masks from "
    "arguments"
)


class _Reached(Exception):
    """The forward has come as far as it should."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class SplitForward:
    """The three parts of a model's forward: up to the first block, what blocks get, and from the last block on.

    Args:
        model: its parameters may be on other ranks.
        blocks: its blocks.
        ahead: the parts that are used ahead of the blocks, by their names in the model.
        behind: all other parts, by their names in the model.
        held: those of them that the last layer holds.
        shown: what a small call of the model showed.
        random_sources: generators that the model may draw from.
        loss_in: returns the loss in an output, if nothing else there has gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks,
        ahead: Mapping[str, Part],
        behind: Mapping[str, Part],
        held: Mapping[str, Part],
        shown: Survey,
        random_sources: Sequence[RandomSource],
        loss_in: Callable[[Any], Any] | None,
    ) -> None:
        self._model, self._forward = model, model.forward
        self._blocks = list(blocks.named.values())
        self._returned, self._random_sources = shown.returned, random_sources
        self._stand_ins = [
            (blocks.container._modules, name, Visited(block, partial(self._visit_block, index)))
            for index, (name, block) in enumerate(blocks.named.items())
        ]
        self._zeros = {path: self._zeros_for(path, part) for path, part in ahead.items()}
        self._behind = [(*place_of(model, path), self._absent(path, part)) for path, part in behind.items()]
        self._kept = [
            (block.get_submodule(kept.path), kept.name, AbsentTensor.of(partial(_refuse_kept, kept)))
            for block in self._blocks
            for kept in shown.kept
        ]
        self._buffers, self._loss_in = ContainingBuffers(model, blocks), loss_in
        self._loss_graph = LossGraph(model, held.values())
        self._visit: Visit = _not_running
        self._visited = 0
        """How many calls of blocks the forward that runs has made."""

    def begin(self, call: Call) -> Tensor:
        """Returns the hidden states that enter the first block. Tells ``call`` what every block gets beside them."""
        noted, stop = self._noting()
        with self._visiting(stop), replacing(self._behind):
            hidden = self._until_reached(call)
        call.tell_blocks(noted)
        return hidden

    def block_arguments(self, call: Call) -> list[BlockArguments]:
        """Returns what every block gets beside the hidden states. Draws no random numbers."""
        noted, stop = self._noting()
        stand_ins = [*self._ahead(), *self._behind]
        with undisturbed(self._random_sources), torch.no_grad(), self._visiting(stop), replacing(stand_ins):
            self._until_reached(call)
        return noted

    def _noting(self) -> tuple[list[BlockArguments], Visit]:
        """Returns a list of what every block gets beside the hidden states, and the visits that fill it."""
        noted: list[BlockArguments] = []
        first: tuple[Tensor, int] | None = None

        def note(index: int, hidden: Tensor, arguments: BlockArguments) -> Tensor:
            nonlocal first
            first = first or (hidden, version_of(hidden))
            if hidden is not first[0] or version_of(hidden) != first[1]:
                raise ConfigError(_BETWEEN)
            noted.append(arguments._replace(autocast=Autocast.on(hidden.device.type)))
            if index == len(self._blocks) - 1:
                raise _Reached(hidden)
            return hidden

        return noted, note

    def finish(self, call: Call, hidden: Tensor) -> Any:
        """Returns the model's output, from the hidden states that the last block returned."""
        made_by, looks = hidden.grad_fn, call.looks_at_uses(not self._loss_graph.checked)
        with self._noting_uses(looks) as zeros, replacing(self._ahead()):
            output = self._output(call, lambda: hidden)
        if looks:
            self._loss_graph.check(output if self._loss_in is None else self._loss_in(output), made_by, zeros)
        return output

    def _output(self, call: Call, returned: Callable[[], Tensor]) -> Any:
        """Returns the model's output, from the hidden states that are ``returned`` for the last block."""
        last = len(self._blocks) - 1

        def replace(index: int, passed: Tensor, _: BlockArguments) -> Tensor:
            if self._visited > len(self._blocks):
                raise ConfigError(_again(f"block {index}"))
            return returned() if index == last else passed

        kept = [(vars(module), name, absent) for module, name, absent in self._kept if name in vars(module)]
        with self._visiting(replace), replacing(kept):
            return run_uncompiled(self._model, *call.positional, **call.named)

    @torch.no_grad()
    def check_parts(self, call: Call, on_other_ranks: bool) -> None:
        """Runs the parts of the forward again without the modules ahead of the blocks, and with other random numbers
        there. Raises ConfigError if that makes a difference beside the hidden states that enter the first block.

        Args:
            call: for which all parameters are here but those of blocks.
            on_other_ranks: whether ranks without these modules compute what blocks get.
        """

        def returned() -> Tensor:
            # Behind the blocks, numbers are drawn once.
            self._seed(0)
            return hidden.clone()

        with undisturbed(self._random_sources):
            self._seed(1)
            hidden = self.begin(call)
            output = self._output(call, returned)
            self._seed(2)
            told = [call.block_arguments(index, self.block_arguments) for index in range(len(self._blocks))]
            if on_other_ranks and not is_alike(told, self.block_arguments(call)):
                raise ConfigError(f"what blocks get beside hidden states {_DEPENDS}")
            with replacing(self._ahead()):
                if not is_alike(output, self._output(call, returned)):
                    raise ConfigError(f"what the model returns {_DEPENDS}")

    def _seed(self, number: int) -> None:
        for source in self._random_sources:
            source.seed(number)

    def _zeros_for(self, path: str, part: Part) -> Zeros | ZeroParameter:
        return (
            ZeroParameter(part) if isinstance(part, nn.Parameter) else Zeros(part, partial(self._refuse_behind, path))
        )

    def _absent(self, path: str, part: Part) -> Absent | AbsentTensor:
        refuse = partial(self._refuse_absent, path)
        return AbsentTensor.of(refuse) if isinstance(part, nn.Parameter) else Absent(part, refuse)

    def _ahead(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Returns the stand-ins for what is used ahead of the blocks, and their places."""
        return [
            (*place_of(self._model, path), each.zeros() if isinstance(each, ZeroParameter) else each)
            for path, each in self._zeros.items()
        ]

    @contextmanager
    def _noting_uses(self, notes: bool) -> Iterator[dict[str, list[Tensor]]]:
        """Yields, by the names of the parts ahead of the blocks, lists of leaves on which their zeros depend inside the
        block. They stay empty unless it ``notes`` them."""
        zeros: dict[str, list[Tensor]] = {path: [] for path in self._zeros}
        for path, stand_in in self._zeros.items():
            stand_in.leaves = zeros[path] if notes else None
        try:
            yield zeros
        finally:
            for stand_in in self._zeros.values():
                stand_in.leaves = None

    def run_block(self, index: int, hidden: Tensor, arguments: BlockArguments) -> Tensor:
        """Returns the hidden states after block ``index``."""
        assert arguments.autocast is not None, "noted with the arguments"
        with arguments.autocast.entered():
            result = self._blocks[index](hidden, *arguments.positional, **arguments.named)
        if (len(result) if isinstance(result, tuple) else 0) != self._returned:
            raise ConfigError(
                f"block {index} of the model returned other things than block 0; remove the {BLOCK} block"
            )
        return result[0] if self._returned else result

    def _visit_block(self, index: int, hidden: Tensor, arguments: BlockArguments) -> Any:
        """Returns what the forward gets in place of the result of block ``index``."""
        self._visited += 1
        passed = self._visit(index, hidden, arguments)
        return (passed, *[None] * (self._returned - 1)) if self._returned else passed

    def _until_reached(self, call: Call) -> Tensor:
        try:
            run_uncompiled(self._model, *call.positional, **call.named)
        except _Reached as reached:
            return reached.hidden
        raise ConfigError(_SKIPPED)

    def _refuse_absent(self, path: str) -> NoReturn:
        """Raises ConfigError, because a module that works behind the blocks was called too early."""
        if self._visited:
            raise ConfigError(_SKIPPED)
        raise ConfigError(
            f"with these arguments '{path}' is used ahead of the model's blocks, but not with the dummy inputs; "
            f"set {BLOCK}.dummy_inputs to arguments such as the script's"
        )

    def _refuse_behind(self, path: str) -> None:
        """Raises ConfigError if a module that works ahead of the blocks is called after one."""
        if self._visited:
            raise ConfigError(_again(f"'{path}'"))

    @contextmanager
    def _visiting(self, visit: Visit) -> Iterator[None]:
        """Runs the stand-ins of blocks inside the block, where the model has its own forward: that of its engine calls
        the engine."""
        self._visit, self._visited = visit, 0
        try:
            with replacing(self._stand_ins), with_forward(self._model, self._forward), self._buffers.unchanged():
                yield
        finally:
            self._visit = _not_running


def _not_running(index: int, hidden: Tensor, arguments: BlockArguments) -> Tensor:
    raise RuntimeError("the stand-in for a block is called outside of a forward")


def _refuse_kept(kept: Kept) -> NoReturn:
    raise ConfigError(
        f"behind the blocks the model reads '{'.'.join(filter(None, kept))}' of a block, which is set where the block "
        f"runs; with a {BLOCK} block, leave it out of the loss, or write the model as a PipelineModule"
    )


def _again(what: str) -> str:
    return (
        f"with these arguments the model calls {what} again after its blocks; with a {BLOCK} block, call the blocks "
        f"once, and what precedes them only ahead of them; else set {BLOCK}.dummy_inputs to arguments such as the "
        "script's, or write the model as a PipelineModule"
    )
