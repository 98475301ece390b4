"""A model's own forward, split at its blocks.

The forward itself runs, with stand-ins for some of its modules. So masks, position ids, rotary tables and the loss are
those of the model, whatever its architecture. A stand-in for a block notes what the block gets, and passes the hidden
states on. A stand-in for a module ahead of the blocks, such as the embedding, returns zeros of the right shape.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.ahead import NONE, Ahead, Results, Seen, zeros_like
from ds_lgamp.integrations.split.alike import is_alike
from ds_lgamp.integrations.split.autocast import Autocast
from ds_lgamp.integrations.split.blocks import Blocks
from ds_lgamp.integrations.split.buffers import ContainingBuffers, version_of
from ds_lgamp.integrations.split.call import BlockArguments, Call, run_uncompiled
from ds_lgamp.integrations.split.imagined import is_imagined
from ds_lgamp.integrations.split.kept import Kept
from ds_lgamp.integrations.split.loss_graph import LossGraph
from ds_lgamp.integrations.split.parts import Part, Result, place_of
from ds_lgamp.integrations.split.stand_ins import Absent, AbsentTensor, Visited, replacing, with_forward
from ds_lgamp.integrations.split.survey import Survey
from ds_lgamp.integrations.split.travelling import Fill, Travelling, one, other
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


class Noted(NamedTuple):
    """What a forward up to the last block shows."""

    hidden: Tensor
    """The hidden states that enter the last block: of all blocks, if none computes."""
    blocks: list[BlockArguments]
    """What every block gets beside them."""


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
        self._ahead = Ahead(model, ahead, self._refuse_behind)
        self._travelling = Travelling(shown.travels_behind, self._note_blocks)
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

    def begin(self, call: Call) -> tuple[Tensor, list[Tensor]]:
        """Returns the hidden states that enter the first block, and what travels with them. Tells ``call`` what every
        block gets beside them, unless that depends on what travels."""
        noted, seen = self._note_present(call)
        travels = [seen.take(result) for result in self._travelling.of(call, seen)]
        if not travels:
            call.tell_blocks(noted.blocks)
        return noted.hidden, travels

    def block_arguments(self, call: Call, travels: Sequence[Tensor] = ()) -> list[BlockArguments]:
        """Returns what every block gets beside the hidden states, by what ``travels`` with them. Draws no random
        numbers."""
        if not travels:
            with torch.no_grad():
                return self._note_absent(call, NONE)[0].blocks
        return self._note_absent(call, self._given(call, travels))[0].blocks

    def _given(self, call: Call, travels: Sequence[Tensor]) -> dict[Result, Tensor]:
        """Returns which results are what ``travels``."""
        if call.travelling is None:
            with torch.no_grad():
                call.travelling = self._travelling.of(call, self._note_absent(call, NONE)[1])
        return dict(zip(call.travelling, travels, strict=True))

    def _note_present(self, call: Call) -> tuple[Noted, Seen]:
        """Runs the forward up to the last block, where the parts ahead of the blocks are. Returns what they return,
        too."""
        with replacing(self._behind), self._ahead.seen() as seen:
            return self._note(call), seen

    def _note_absent(
        self, call: Call, given: Mapping[Result, Tensor], fill: Fill | None = None
    ) -> tuple[Noted, Results]:
        """Runs the forward up to the last block, where no part is. Returns what parts ahead of the blocks return, too,
        which is ``given`` or zeros."""
        absent = self._ahead.absent(given)
        with undisturbed(self._random_sources), replacing(self._behind), absent as results:
            return self._note(call, fill), results

    def _note_blocks(self, *given: Any) -> tuple[list[BlockArguments], Results]:
        noted, results = self._note_absent(*given)
        return noted.blocks, results

    def _note(self, call: Call, fill: Fill | None = None) -> Noted:
        """Runs the forward up to the last block. No block computes: the next one gets the same hidden states, or what
        ``fill`` makes of them."""
        noted: list[BlockArguments] = []
        passed: tuple[Tensor, int] | None = None

        def note(index: int, hidden: Tensor, arguments: BlockArguments) -> Tensor:
            nonlocal passed
            if passed is not None and (hidden is not passed[0] or version_of(hidden) != passed[1]):
                raise ConfigError(_BETWEEN)
            noted.append(arguments._replace(autocast=Autocast.on(hidden.device.type)))
            if index == len(self._blocks) - 1:
                raise _Reached(hidden)
            if fill is not None:
                hidden = fill(hidden)
            passed = hidden, version_of(hidden)
            return hidden

        with self._visiting(note):
            return Noted(self._until_reached(call), noted)

    def finish(self, call: Call, hidden: Tensor, travels: Sequence[Tensor] = ()) -> Any:
        """Returns the model's output, from the hidden states that the last block returned, and what ``travels`` with
        them."""
        given = self._given(call, travels) if travels else NONE
        looks = call.looks_at_uses(not self._loss_graph.checked) and torch.is_grad_enabled()
        # Ahead of the forward, which may change them in place.
        inputs = [get_gradient_edge(each).node for each in (hidden, *travels) if each.requires_grad] if looks else []
        leaves = self._ahead.no_leaves() if looks else None
        with self._ahead.absent(given, leaves):
            output = self._output(call, lambda: hidden, leaves)
        if leaves is not None:
            self._loss_graph.check(output if self._loss_in is None else self._loss_in(output), inputs, leaves)
        return output

    def _output(self, call: Call, returned: Callable[[], Tensor], leaves: dict[str, list[Tensor]] | None = None) -> Any:
        """Returns the model's output, from the hidden states that are ``returned`` for the last block. With ``leaves``,
        what depends on those behind other blocks depends on a leaf that is entered there."""
        last = len(self._blocks) - 1

        def replace(index: int, passed: Tensor, _: BlockArguments) -> Tensor:
            if self._visited > len(self._blocks):
                raise ConfigError(_again(f"block {index}"))
            if index == last:
                return returned()
            return passed if leaves is None else zeros_like(passed, leaves.setdefault(f"block {index}", []))

        kept = [(vars(module), name, absent) for module, name, absent in self._kept if name in vars(module)]
        with self._visiting(replace), replacing(kept):
            return run_uncompiled(self._model, *call.positional, **call.named)

    @torch.no_grad()
    def check_travels(self, call: Call, shown: Survey) -> None:
        """Raises ConfigError if the forward gets what travels otherwise than from the parts that return it, such as
        from a hook: where other numbers travel, nothing else comes out.

        Args:
            call: for which all parameters are here but those of blocks.
            shown: what was shown by such a call.
        """
        noted, zeros = self._note_absent(call, NONE)
        hidden = one(noted.hidden)
        given = {result: one(tensor) for result, tensor in zeros.items()}
        missed = shown.travels_to_blocks.difference(self._travelling.of(call, zeros))

        def output(given: Mapping[Result, Tensor]) -> Any:
            with undisturbed(self._random_sources), self._ahead.absent(given):
                return self._output(call, lambda: hidden.clone())

        if shown.travels_behind:
            expected = output(given)
            missed |= {
                result
                for result in shown.travels_behind
                # A hook of a part may have kept what the part would return.
                if is_imagined(expected) or is_alike(expected, output({**given, result: other(given[result])}))
            }
        for result in missed:
            raise ConfigError(
                f"the forward of the model uses what '{result.path}' returned beside hidden states, but gets it from a "
                f"hook or an attribute; with a {BLOCK} block, pass it on in the forward, or write the model as a "
                "PipelineModule"
            )

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
            noted, seen = self._note_present(call)
            hidden = noted.hidden
            travels = [seen.take(result) for result in self._travelling.of(call, seen)]
            output = self._output(call, returned)
            self._seed(2)
            if (on_other_ranks or travels) and not is_alike(noted.blocks, self.block_arguments(call, travels)):
                raise ConfigError(f"what blocks get beside hidden states {_DEPENDS}")
            with self._ahead.absent(self._given(call, travels)):
                if not is_alike(output, self._output(call, returned)):
                    raise ConfigError(f"what the model returns {_DEPENDS}")

    def _seed(self, number: int) -> None:
        for source in self._random_sources:
            source.seed(number)

    def _absent(self, path: str, part: Part) -> Absent | AbsentTensor:
        refuse = partial(self._refuse_absent, path)
        return AbsentTensor.of(refuse) if isinstance(part, nn.Parameter) else Absent(part, refuse)

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
