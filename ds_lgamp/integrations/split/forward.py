"""A model's own forward, split at its blocks.

The forward itself runs, with stand-ins for some of its modules. So masks, position ids, rotary tables and the loss are
those of the model, whatever its architecture. A stand-in for a block notes what the block gets, and passes the hidden
states on. A stand-in for a module ahead of the blocks, such as the embedding, returns zeros of the right shape.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial
from itertools import starmap
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.ahead import NONE, Ahead, Results, Seen, zeros_like
from ds_lgamp.integrations.split.attributes import SetAttributes
from ds_lgamp.integrations.split.autocast import Autocast
from ds_lgamp.integrations.split.blocks import Blocks
from ds_lgamp.integrations.split.buffers import ContainingBuffers, unchanged_tensors, version_of
from ds_lgamp.integrations.split.call import BlockArguments, Call, Calls, Needs, Noted, run_uncompiled
from ds_lgamp.integrations.split.lacking import LackingOutputs
from ds_lgamp.integrations.split.loss_graph import LossGraph
from ds_lgamp.integrations.split.own_state import OwnState
from ds_lgamp.integrations.split.parts import Attribute, Part, Result, Sides, own_modules, place_of
from ds_lgamp.integrations.split.snapshot import holds_the_same
from ds_lgamp.integrations.split.stand_ins import (
    Absent,
    AbsentTensor,
    Passed,
    Touched,
    Visited,
    replacing,
    with_forward,
)
from ds_lgamp.integrations.split.survey import Survey
from ds_lgamp.integrations.split.travelling import EARLIER, Fill, Travelling, uses
from ds_lgamp.runtime.recompute import RandomSource, undisturbed

Visit = Callable[[int, Tensor, BlockArguments], Tensor]
"""Called in place of a block, with its number, the hidden states and the other arguments. Returns hidden states."""


_SKIPPED = (
    "the forward of the model skipped blocks, or called them in another order than that of their list; let it call "
    "every block in its turn, and set layerdrop to 0 in the model's config"
)


_IN_PLACE = (
    f"the forward of the model changes hidden states in place between its blocks; with a {BLOCK} block, compute a new "
    "tensor there"
)


_TOUCHES = (
    "with these arguments the forward of the model computes with what a block returned beside hidden states; with a "
    f"{BLOCK} block, leave that out, or write the model as a PipelineModule"
)


class _Reached(Exception):
    """The forward has come as far as it should."""


class SplitForward:
    """The three parts of a model's forward: up to the first block, what blocks get, and from the last block on.

    Args:
        model: its parameters may be on other ranks.
        blocks: its blocks.
        sides: its other parts.
        shown: what a small call of the model showed.
        random_sources: generators that the model may draw from.
        loss_in: returns the loss in an output, if nothing else there has gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks,
        sides: Sides,
        shown: Survey,
        random_sources: Sequence[RandomSource],
        loss_in: Callable[[Any], Any] | None,
    ) -> None:
        self._model, self._forward = model, model.forward
        self._blocks = list(blocks.named.values())
        self._returned, self._random_sources = shown.returned, random_sources
        self._beside = [
            [Passed.of(index, place) if is_tensor else None for place, is_tensor in enumerate(shown.beside)]
            for index in range(len(self._blocks))
        ]
        """What stands in for tensors that blocks return beside hidden states, up to the last block."""
        self._returns_others = any(shown.beside)
        self.attributes, self._looked = SetAttributes(self._blocks), set[Any]()
        self.own_state = OwnState(own_modules(model, blocks, sides))
        self._of_layers = {id(module) for module in model.modules()} - {id(each) for each in self.own_state.modules}
        self._stand_ins = [
            (*place_of(blocks.container, name), Visited(block, index, self.attributes, self._visit_block))
            for index, (name, block) in enumerate(blocks.named.items())
        ]
        self.ahead = Ahead(model, sides.ahead, self._refuse_behind)
        self.travelling = Travelling((shown.travels_behind, shown.travels_to_output), self.note_absent)
        self._behind = [(*place_of(model, path), self._absent(path, part)) for path, part in sides.behind.items()]
        self._kept = [
            (module, kept.name, AbsentTensor.of(partial(_refuse_kept, kept)))
            for kept in shown.kept
            for module in _modules_at(kept.path, self._blocks)
        ]
        self._buffers, self.loss_in = ContainingBuffers(model, blocks), loss_in
        self._loss_graph, self._lacking = LossGraph(model, sides.held_behind.values()), LackingOutputs()
        self._visit: Visit = _not_running
        self._visited = 0
        """How many calls of blocks the forward that runs has made."""
        self._passes_others = False

    def begin(self, call: Call) -> tuple[Tensor, list[Tensor]]:
        """Returns the hidden states that enter the first block, and what travels with them."""
        noted, seen = self.note_present(call)
        needs = self._keep(call, noted, seen.results)
        missed = uses(noted, seen.results).difference(needs.travels)
        for result in missed:
            raise ConfigError(
                f"blocks get what '{result.path}' returned beside hidden states, but got nothing of it in an earlier "
                f"call with such arguments; with a {BLOCK} block, let an argument say which code the forward runs"
            )
        return noted.hidden, [seen.take(result) for result in needs.travels]

    def needs_of(self, call: Call) -> Needs:
        """Returns what the layers of a call need, also where no part is. Draws no random numbers."""
        if call.needs is None or (call.blocks is None and not call.needs.travels):
            with torch.no_grad():
                return self._keep(call, *self.note_absent(call))
        return call.needs

    def _keep(self, call: Call, noted: Noted, results: Results) -> Needs:
        """Keeps with ``call`` what its layers need, unless something is there already."""
        if call.needs is None:
            call.needs = self.travelling.of(call, noted, results, self._model.training)
        if call.blocks is None and not call.needs.travels:
            call.blocks = noted.blocks
        return call.needs

    def given(self, call: Call, travels: Sequence[Tensor]) -> Results:
        """Returns which results are what ``travels``."""
        return dict(zip(self.needs_of(call).travels, travels, strict=True))

    def run_block(
        self, index: int, calls: Calls, hidden: Tensor, others: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs block ``index`` for the current call. Returns the hidden states behind it, and what the next layer gets
        beside them.

        Args:
            hidden: the hidden states behind the block before it.
            others: what this layer gets beside them.
        """
        needs = self.needs_of(calls.current)
        places = needs.passes[index]
        passed, travels = dict(zip(places, others)), others[len(places) :]
        hidden, arguments = self._input(index, calls, hidden, travels)
        if passed:
            arguments = tree_map_only(Passed, lambda stand_in: passed[stand_in.place], arguments)
        assert arguments.autocast is not None, "noted with the arguments"
        given = [(each, copy(each)) for each in arguments.values if isinstance(each, MutableSequence | MutableMapping)]
        self.attributes.set(index, arguments.attributes)
        with arguments.autocast.entered():
            result = self._blocks[index](hidden, *arguments.positional, **arguments.named)
        if not all(starmap(holds_the_same, given)):
            raise ConfigError(
                f"block {index} of the model changes a list or dictionary that it gets, which blocks on other ranks "
                f"lack, and which would change twice where it is recomputed; with a {BLOCK} block, let it return what "
                "it adds, or write the model as a PipelineModule"
            )
        following = needs.passes[index + 1] if index + 1 < len(self._blocks) else ()
        if (len(result) if isinstance(result, tuple) else 0) != self._returned or not all(
            isinstance(result[1 + place], Tensor) for place in following
        ):
            raise ConfigError(
                f"block {index} of the model returned other things than block 0; remove the {BLOCK} block"
            )
        return result[0] if self._returned else result, [*(result[1 + place] for place in following), *travels]

    def _input(
        self, index: int, calls: Calls, hidden: Tensor, travels: Sequence[Tensor]
    ) -> tuple[Tensor, BlockArguments]:
        """Returns what block ``index`` gets, from the hidden states behind the block before it and what ``travels``."""
        call = calls.current
        if index in self.needs_of(call).between:
            return self._enter(index, call, hidden, self.given(call, travels))
        if travels:
            given = self.given(call, travels)
            return hidden, calls.in_chunk(travels, lambda: self.note_absent(call, given)[0].blocks)[index]
        assert call.blocks is not None, "kept with what the call needs"
        return hidden, call.blocks[index]

    def _enter(
        self, index: int, call: Call, returned: Tensor, given: Mapping[Result, Tensor]
    ) -> tuple[Tensor, BlockArguments]:
        """Runs the forward from what the block before ``index`` has ``returned`` up to this block. Returns what it
        gets. Random numbers that are drawn on the way belong to the layer."""
        entered: list[tuple[Tensor, BlockArguments]] = []

        def visit(number: int, hidden: Tensor, arguments: BlockArguments) -> Tensor:
            if number == index:
                entered.append((hidden, arguments._replace(autocast=Autocast.on(hidden.device.type))))
                raise _Reached
            return returned if number == index - 1 else hidden

        with replacing(self._behind), self.ahead.absent(call.returned, given):
            self._run_until_reached(call, visit)
        return entered[0]

    def note_present(self, call: Call) -> tuple[Noted, Seen]:
        """Runs the forward up to the last block, where the parts ahead of the blocks are. Returns what they return,
        too, and notes that with the call: later runs need not imagine it."""
        with replacing(self._behind), self.ahead.seen() as seen:
            noted = self._note(call)
        call.returned = seen.returned
        return noted, seen

    def note_absent(
        self, call: Call, given: Mapping[Result, Tensor] = NONE, fill: Fill | None = None
    ) -> tuple[Noted, Results]:
        """Runs the forward up to the last block, where no part is. Returns what parts ahead of the blocks return, too,
        which is ``given`` or zeros. Draws no random numbers."""
        absent = self.ahead.absent(call.returned, given)
        with undisturbed(self._random_sources), replacing(self._behind), absent as results:
            return self._note(call, fill), results

    def _note(self, call: Call, fill: Fill | None = None) -> Noted:
        """Runs the forward up to the last block. No block computes: behind it are the same hidden states, or what
        ``fill`` makes of them."""
        blocks: list[BlockArguments] = []
        entered: dict[int, Tensor] = {}
        passes: list[tuple[int, ...]] = []
        first = passed = None
        version = 0

        def note(index: int, hidden: Tensor, arguments: BlockArguments) -> Tensor:
            nonlocal first, passed, version
            if index != len(blocks):
                raise ConfigError(_SKIPPED)
            if passed is None:
                first = hidden
            elif version_of(passed) != version:
                raise ConfigError(_IN_PLACE)
            elif hidden is not passed:
                entered[index] = hidden
            blocks.append(arguments._replace(autocast=Autocast.on(hidden.device.type)))
            passes.append(_places(index, arguments) if self._returns_others else ())
            if index == len(self._blocks) - 1:
                raise _Reached
            if fill is not None:
                passed = fill(index, hidden)
            elif passed is None:
                # What enters later blocks depends on parts ahead of them only where it gets their results itself.
                passed = hidden.detach()
            version = version_of(passed)
            return passed

        kind = self._model.training, call.signature
        with nullcontext() if kind in self._looked else self.attributes.looking():
            self._run_until_reached(call, note)
        self._looked.add(kind)
        assert first is not None, "no block is skipped"
        return Noted(first, blocks, entered, tuple(passes))

    def finish(self, call: Call, hidden: Tensor, travels: Sequence[Tensor] = ()) -> Any:
        """Returns the model's output, from the hidden states that the last block returned, and what ``travels`` with
        them."""
        given = self.given(call, travels) if travels else NONE
        looks = call.looks_at_uses(call.signature not in self._loss_graph.checked) and torch.is_grad_enabled()
        # Ahead of the forward, which may change them in place.
        inputs = [get_gradient_edge(each).node for each in (hidden, *travels) if each.requires_grad] if looks else []
        leaves = self.ahead.no_leaves() if looks else None
        with self.ahead.absent(call.returned, given, leaves):
            output = self.output(call, lambda: hidden, leaves)
        if leaves is not None:
            roots = output if self.loss_in is None else self.loss_in(output)
            self._loss_graph.check(call.signature, roots, inputs, leaves)
        if not call.is_whole or torch.is_grad_enabled():
            return output
        run = partial(self._output_again, call, hidden, given)
        return self._lacking.left_out(call, output, self.ahead.no_leaves(), run)

    @torch.inference_mode(False)
    def _output_again(
        self,
        call: Call,
        hidden: Tensor,
        travels: Mapping[Result, Tensor],
        given: Mapping[Result, Tensor],
        leaves: dict[str, list[Tensor]] | None,
    ) -> tuple[Any, Results]:
        """Returns the model's output once more, and all results, with those that are ``given`` instead of zeros. With
        ``leaves``, what is absent depends on them."""
        copies = tree_map_only(Tensor, Tensor.clone, (call.positional, call.named, hidden, {**given, **travels}))
        positional, named, hidden, known = copies
        with undisturbed(self._random_sources), self.ahead.absent(call.returned, known, leaves) as results:
            return self.output(call.with_arguments(positional, named), lambda: hidden, leaves), results

    def output(self, call: Call, returned: Callable[[], Tensor], leaves: dict[str, list[Tensor]] | None = None) -> Any:
        """Returns the model's output, from the hidden states that are ``returned`` for the last block. With ``leaves``,
        what depends on those behind other blocks depends on a leaf that is entered there."""
        last = len(self._blocks) - 1

        def replace(index: int, passed: Tensor, _: BlockArguments) -> Tensor:
            if self._visited > len(self._blocks):
                raise ConfigError(_again(f"block {index}"))
            if index == last:
                self.own_state.reached_end_of_blocks()
                return returned()
            return passed if leaves is None else zeros_like(passed, leaves.setdefault(f"block {index}", []))

        # In training also where the block has never run.
        sets = self._model.training
        kept = [(vars(module), name, absent) for module, name, absent in self._kept if sets or name in vars(module)]
        arguments = call.positional, call.named
        once, visiting = self.own_state.counted_once(call), self._visiting(replace, passes_others=False)
        with once, visiting, replacing(kept), unchanged_tensors(arguments):
            return run_uncompiled(self._model, *call.positional, **call.named)

    def _absent(self, path: str, part: Part) -> Absent | AbsentTensor:
        refuse = partial(self._refuse_absent, path)
        return AbsentTensor.of(refuse) if isinstance(part, nn.Parameter) else Absent(part, refuse)

    def _visit_block(self, index: int, hidden: Tensor, arguments: BlockArguments) -> Any:
        """Returns what the forward gets in place of the result of block ``index``."""
        if self._visited < len(self._blocks) and index != self._visited:
            raise ConfigError(_SKIPPED)
        self._visited += 1
        passed = self._visit(index, hidden, arguments)
        beside = self._beside[index] if self._passes_others else [None] * (self._returned - 1)
        return (passed, *beside) if self._returned else passed

    def _run_until_reached(self, call: Call, visit: Visit) -> None:
        with unchanged_tensors((call.positional, call.named)):
            try:
                with self.own_state.counted_once(call), self._visiting(visit):
                    run_uncompiled(self._model, *call.positional, **call.named)
            except _Reached:
                return
            except Touched:
                raise ConfigError(_TOUCHES) from None
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
    def _visiting(self, visit: Visit, passes_others: bool = True) -> Iterator[None]:
        """Runs the stand-ins of blocks inside the block, where the model has its own forward: that of its engine calls
        the engine. With ``passes_others`` they return tensors beside hidden states where blocks do."""
        self._visit, self._visited, self._passes_others = visit, 0, passes_others
        # It sees all modules, also those that a forward makes.
        registration = register_module_module_registration_hook(self._refuse_module)
        try:
            with replacing(self._stand_ins), with_forward(self._model, self._forward), self._buffers.unchanged():
                yield
        finally:
            registration.remove()
            self._visit = _not_running

    def _refuse_module(self, module: nn.Module, name: str, _: Any) -> None:
        """Raises ConfigError if the forward gives a module of a layer another one."""
        if id(module) in self._of_layers:
            raise ConfigError(
                f"the forward of the model puts another module into the place of '{name}' of a "
                f"{type(module).__name__}, for good; with a {BLOCK} block, call it with arguments with which it does "
                "not, such as longer sequences for BigBird"
            )


def _modules_at(path: str, blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yields the module that each of the blocks has under this name. Some of several kinds may have none."""
    for block in blocks:
        module = dict(block.named_modules()).get(path)
        if module is not None:
            yield module


def _places(index: int, arguments: BlockArguments) -> tuple[int, ...]:
    """Returns at which places the block before ``index`` returns tensors that are in ``arguments``. Raises ConfigError
    if another block returns some."""
    passed = [leaf for leaf in tree_leaves([*arguments.values]) if isinstance(leaf, Passed)]
    if any(leaf.block != index - 1 for leaf in passed):
        raise ConfigError(EARLIER)
    return tuple(sorted({leaf.place for leaf in passed}))


def _not_running(index: int, hidden: Tensor, arguments: BlockArguments) -> Tensor:
    raise RuntimeError("the stand-in for a block is called outside of a forward")


def _refuse_kept(kept: Attribute) -> NoReturn:
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
