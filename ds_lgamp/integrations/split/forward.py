"""A model's own forward, split at its blocks.

The forward itself runs, with stand-ins for some of its modules. So masks, position ids, rotary tables and the loss are
the model's own, whatever its architecture. A stand-in for a block remembers what the block gets, and returns hidden
states. A stand-in for a module before the blocks, such as the embedding, returns zeros of the right shape.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import ExitStack, nullcontext
from copy import copy
from functools import partial
from itertools import starmap
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.call import Autocast, BatchCalls, BlockArguments, Call, DryRun, Needs, Returned, Survey
from ds_lgamp.integrations.split.outputs import (
    LossGraph,
    NotComputed,
    NotReturned,
    Reduced,
    deferring,
    heads_in,
    lacking_outputs,
    without,
)
from ds_lgamp.integrations.split.parts import Attribute, Original, Part, Result, Sides, place_of
from ds_lgamp.integrations.split.stand_ins import (
    NONE,
    AbsentModule,
    AbsentTensor,
    Leaves,
    PartResults,
    PartsBefore,
    Placeholder,
    Results,
    replacing,
    zeros_like,
)
from ds_lgamp.integrations.split.state import holds_the_same, unchanged_tensors, version_of
from ds_lgamp.integrations.split.travelling import EARLIER, Fill, Travelling, uses
from ds_lgamp.integrations.split.without_blocks import REDUCED, SKIPPED, Byproducts, ForwardWithoutBlocks, Stop
from ds_lgamp.runtime.logits import Logits

_IN_PLACE = (
    f"the forward of the model changes hidden states in place between its blocks; with a {BLOCK} block, compute a new "
    "tensor there"
)


class SplitForward:
    """The three parts of a model's forward: up to the first block, what blocks get, and from the last block on. The
    model's parameters may be on other ranks.

    Args:
        loss_in: returns the loss in an output, if nothing else there has gradients.
    """

    def __init__(self, original: Original, shown: Survey, loss_in: Callable[[Any], Any] | None) -> None:
        model, blocks = original.model, original.blocks
        self.original, self.loss_in = original, loss_in
        self.blocks = list(blocks.named.values())
        self.sides = sides = Sides.of(model, shown.before, shown.after, shown.reads_after)
        self._byproducts = Byproducts(original, shown)
        self._returns_more = any(each.tensors for returned in shown.returned for each in returned.values())
        """Whether blocks return tensors besides hidden states."""
        self._forward = ForwardWithoutBlocks(original, sides, shown)
        self.attributes, self.own_state = self._forward.attributes, self._forward.own_state
        self._watched: set[Any] = set()
        """Of which calls the attributes of all blocks have been watched."""
        self.parts_before = PartsBefore(model, sides.before, self._refuse_again)
        self.travelling = Travelling((shown.travels_to_loss, shown.travels_to_output), self.dry_run_without_parts)
        self._absent_after = [(*place_of(model, path), self._absent(path, part)) for path, part in sides.after.items()]
        self._tensor_attributes = [
            (module, attribute.name, AbsentTensor.of(partial(_refuse_attribute, attribute)))
            for attribute in shown.tensor_attributes
            for module in _modules_at(attribute.path, self.blocks)
        ]
        self._loss_graph = LossGraph(model, sides.of_last_layer.values())
        self._heads = [*heads_in(sides.after)]
        self._lacking: dict[Any, frozenset[int]] = {}
        """Which outputs the last layer cannot compute, by kind of call."""

    def begin(self, call: Call) -> tuple[Tensor, list[Tensor]]:
        """Returns the hidden states that enter the first block, and what travels with them."""
        run, results = self.dry_run(call)
        needs = self._remember(call, run, results.tensors)
        for result in uses(run, results.tensors).difference(needs.travels):
            raise ConfigError(
                f"blocks get what '{result.path}' returned besides hidden states, but got nothing of it in an earlier "
                f"call with such arguments; with a {BLOCK} block, let an argument say which code the forward runs"
            )
        return run.hidden, [results.take(result) for result in needs.travels]

    def needs_of(self, call: Call) -> Needs:
        """Returns what the layers of a call need, also where no part is. Draws no random numbers."""
        if call.needs is None or (call.blocks is None and not call.needs.travels):
            with torch.no_grad():
                return self._remember(call, *self.dry_run_without_parts(call))
        return call.needs

    def _remember(self, call: Call, run: DryRun, results: Results) -> Needs:
        """Lets ``call`` remember what its layers need, unless it does already."""
        if call.needs is None:
            call.needs = self.travelling.of(call, run, results, self.original.model.training)
        if call.blocks is None and not call.needs.travels:
            call.blocks = run.blocks
        return call.needs

    def given(self, call: Call, travels: Sequence[Tensor]) -> Results:
        """Returns which results are what ``travels``."""
        return dict(zip(self.needs_of(call).travels, travels, strict=True))

    def run_block(
        self, index: int, calls: BatchCalls, hidden: Tensor, others: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs block ``index`` for the current call, with the ``hidden`` states after the block before it and what its
        layer gets besides them. Returns the same for the next layer."""
        needs = self.needs_of(calls.current)
        places = needs.places[index]
        outputs, others = dict(zip(places, others)), others[len(places) :]
        travels, carried = others[: len(needs.travels)], others[len(needs.travels) :]
        hidden, arguments = self._input(index, calls, hidden, travels)
        if outputs:
            arguments = tree_map_only(Placeholder, lambda stand_in: outputs[stand_in.place], arguments)
        assert arguments.autocast is not None, "found with the arguments"
        given = [(each, copy(each)) for each in arguments.values if isinstance(each, MutableSequence | MutableMapping)]
        self.attributes.set(index, arguments.attributes)
        with arguments.autocast.entered(), self.original.recorder.recording(arguments.records) as recorded:
            result = self.blocks[index](*arguments.after(hidden), **arguments.named)
        if not all(starmap(holds_the_same, given)):
            raise ConfigError(
                f"block {index} of the model changes a list or dictionary that it gets, which blocks on other ranks "
                f"lack, and which would change twice where it is recomputed; with a {BLOCK} block, let it return what "
                "it adds, or write the model as a PipelineModule"
            )
        following = needs.places[index + 1] if index + 1 < len(self.blocks) else ()
        hidden, returned = Returned.of(result)
        carried = self._byproducts.after_block(index, calls.current, carried, returned, recorded)
        return hidden, [*map(returned.tensors.__getitem__, following), *travels, *carried]

    def _input(
        self, index: int, calls: BatchCalls, hidden: Tensor, travels: Sequence[Tensor]
    ) -> tuple[Tensor, BlockArguments]:
        """Returns what block ``index`` gets, from the hidden states after the block before it and what ``travels``."""
        call = calls.current
        if index in self.needs_of(call).between:
            return self._enter(index, call, hidden, self.given(call, travels))
        if travels:
            given = self.given(call, travels)
            return hidden, calls.in_chunk(travels, lambda: self.dry_run_without_parts(call, given)[0].blocks)[index]
        assert call.blocks is not None, "remembered with what the call needs"
        return hidden, call.blocks[index]

    def _enter(
        self, index: int, call: Call, returned: Tensor, given: Mapping[Result, Tensor]
    ) -> tuple[Tensor, BlockArguments]:
        """Runs the forward from what the block before ``index`` has ``returned`` up to this block. Returns what it
        gets. Random numbers that are drawn on the way belong to the layer."""
        entered: list[tuple[Tensor, BlockArguments]] = []

        def visit(number: int, hidden: Tensor, arguments: BlockArguments) -> Tensor:
            if number == index:
                entered.append((hidden, self._complete(index, hidden, arguments)))
                raise Stop
            return returned if number == index - 1 else hidden

        with replacing(self._absent_after), self.parts_before.absent(call.shapes, given):
            self._forward.run_until_stop(call, visit)
        return entered[0]

    def dry_run(self, call: Call) -> tuple[DryRun, PartResults]:
        """Runs the forward up to the last block, where the parts before the blocks are. Returns what they return, too.
        The call remembers the shapes of that: later runs need not imagine them."""
        with replacing(self._absent_after), self.parts_before.present() as results:
            run = self._dry_run(call)
        call.shapes = results.shapes
        return run, results

    def dry_run_without_parts(
        self, call: Call, given: Mapping[Result, Tensor] = NONE, fill: Fill | None = None
    ) -> tuple[DryRun, Results]:
        """Runs the forward up to the last block, where no part is. Returns what parts before the blocks return, too,
        which is ``given`` or zeros. Draws no random numbers."""
        absent = self.parts_before.absent(call.shapes, given)
        with self.original.undisturbed(), replacing(self._absent_after), absent as results:
            return self._dry_run(call, fill), results

    def _dry_run(self, call: Call, fill: Fill | None = None) -> DryRun:
        """Runs the forward up to the last block. No block computes: after it are the same hidden states, or what
        ``fill`` makes of them."""
        blocks: list[BlockArguments] = []
        entries: dict[int, Tensor] = {}
        places: list[tuple[int, ...]] = []
        first = last = None
        version = 0

        def visit(index: int, hidden: Tensor, arguments: BlockArguments) -> Tensor:
            nonlocal first, last, version
            if index != len(blocks):
                raise ConfigError(SKIPPED)
            if last is None:
                first = hidden
            elif version_of(last) != version:
                raise ConfigError(_IN_PLACE)
            elif hidden is not last:
                entries[index] = hidden
            blocks.append(self._complete(index, hidden, arguments))
            places.append(_places(index, blocks[-1]) if self._returns_more else ())
            if index == len(self.blocks) - 1:
                raise Stop
            if fill is not None:
                last = fill(index, hidden)
            elif last is None:
                # What enters later blocks depends on parts before them only where it gets their results itself.
                last = hidden.detach()
            version = version_of(last)
            return last

        kind = self.original.model.training, call.signature
        with nullcontext() if kind in self._watched else self.attributes.all_watched():
            self._forward.run_until_stop(call, visit)
        self._watched.add(kind)
        assert first is not None, "no block is skipped"
        return DryRun(first, blocks, entries, tuple(places))

    def _complete(self, index: int, hidden: Tensor, arguments: BlockArguments) -> BlockArguments:
        """Adds to the arguments of a block the autocast and the attributes that hold now."""
        return arguments._replace(
            autocast=Autocast.on(hidden.device.type),
            attributes=self.attributes.of(index),
            records=self.original.recorder.records(),
        )

    def finish(self, call: Call, hidden: Tensor, others: Sequence[Tensor] = ()) -> Any:
        """Returns the model's output, from the hidden states that the last block returned, and the ``others`` that
        travel with them."""
        number = len(self.needs_of(call).travels) if others else 0
        travels, carried = others[:number], others[number:]
        given = self.given(call, travels) if travels else NONE
        checks = call.checks_graph(call.signature not in self._loss_graph.checked) and torch.is_grad_enabled()
        # Before the forward, which may change them in place.
        inputs = [get_gradient_edge(each).node for each in (hidden, *others) if each.requires_grad] if checks else []
        leaves = self.parts_before.no_leaves() if checks else None
        only_loss = self.loss_in is not None and not call.is_whole and torch.is_grad_enabled()
        loss_chunk = self.original.settings.loss_chunk if only_loss else 0
        heads = [each for head in self._heads if loss_chunk for each in deferring(head, loss_chunk)]
        with self.parts_before.absent(call.shapes, given, leaves), replacing(heads):
            output = self.output(call, lambda: hidden, leaves, carried)
        if only_loss:
            output = tree_map_only(Logits, lambda _: NotReturned(), output)
        if leaves is not None:
            roots = output if self.loss_in is None else self.loss_in(output)
            self._loss_graph.check(call.signature, roots, inputs, leaves)
        if not call.is_whole or torch.is_grad_enabled():
            return output
        kind = call.signature, call.needs
        if kind not in self._lacking:
            run = partial(self._output_again, call, hidden, carried, given)
            self._lacking[kind] = lacking_outputs(tree_leaves(output), self.parts_before.no_leaves(), run)
        return without(output, self._lacking[kind]) if self._lacking[kind] else output

    @torch.inference_mode(False)
    def _output_again(
        self,
        call: Call,
        hidden: Tensor,
        carried: Sequence[Tensor],
        travels: Mapping[Result, Tensor],
        given: Mapping[Result, Tensor],
        leaves: Leaves | None,
    ) -> tuple[Any, Results]:
        """Returns the model's output once more, and all results: the ``given`` ones, and zeros for the rest. With
        ``leaves``, what is absent depends on them."""
        values = call.positional, call.named, hidden, [*carried], {**given, **travels}
        positional, named, hidden, carried, known = tree_map_only(Tensor, Tensor.clone, values)
        with self.original.undisturbed(), self.parts_before.absent(call.shapes, known, leaves) as results:
            return self.output(call.with_arguments(positional, named), lambda: hidden, leaves, carried), results

    def output(
        self,
        call: Call,
        returned: Callable[[], Tensor],
        leaves: Leaves | None = None,
        carried: Sequence[Tensor] | None = None,
    ) -> Any:
        """Returns the model's output.

        Args:
            returned: returns the hidden states after the last block.
            leaves: if given, what depends on hidden states after other blocks depends on a leaf that is entered here.
            carried: the by-products of blocks; by default such numbers as those of the small call.
        """
        last = len(self.blocks) - 1

        def visit(index: int, hidden: Tensor, _: BlockArguments) -> Tensor:
            if self._forward.visits > len(self.blocks):
                raise ConfigError(_again(f"block {index}"))
            if index == last:
                self.own_state.reached_end_of_blocks()
                return returned()
            return hidden if leaves is None else zeros_like(hidden, leaves.setdefault(f"block {index}", []))

        # In training also where the block has never run.
        sets = self.original.model.training
        attributes = ((vars(module), name, absent) for module, name, absent in self._tensor_attributes)
        absent = [each for each in attributes if sets or each[1] in each[0]]
        with ExitStack() as stack:
            stack.enter_context(replacing(absent))
            stack.enter_context(unchanged_tensors((call.positional, call.named)))
            stack.enter_context(self._byproducts.at_end(call, carried))
            output = self._forward.run(call, visit, self._byproducts.of_block)
        return tree_map_only(Placeholder, _not_here, output) if carried or self._returns_more else output

    def _absent(self, path: str, part: Part) -> AbsentModule | AbsentTensor:
        refuse = partial(self._refuse_absent, path)
        return AbsentTensor.of(refuse) if isinstance(part, nn.Parameter) else AbsentModule(part, refuse)

    def _refuse_absent(self, path: str) -> NoReturn:
        """Raises ConfigError, because a part that runs after the blocks was used too early."""
        if self._forward.visits:
            raise ConfigError(SKIPPED)
        raise ConfigError(
            f"with these arguments '{path}' is used before the model's blocks, but not with the dummy inputs; "
            f"set {BLOCK}.dummy_inputs to arguments such as the script's"
        )

    def _refuse_again(self, path: str) -> None:
        """Raises ConfigError if a module that runs before the blocks is called after one."""
        if self._forward.visits:
            raise ConfigError(_again(f"'{path}'"))


def _modules_at(path: str, blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yields the module that each of the blocks has under this name. Blocks of another kind may have none."""
    for block in blocks:
        module = dict(block.named_modules()).get(path)
        if module is not None:
            yield module


def _not_here(placeholder: Placeholder) -> NotReturned:
    return Reduced() if placeholder.place == REDUCED else NotComputed()


def _places(index: int, arguments: BlockArguments) -> tuple[int, ...]:
    """Returns at which places the block before ``index`` returns tensors that are in ``arguments``. Raises ConfigError
    if another block returns some."""
    found = [leaf for leaf in tree_leaves([*arguments.values]) if isinstance(leaf, Placeholder)]
    if any(leaf.block != index - 1 for leaf in found):
        raise ConfigError(EARLIER)
    return tuple(sorted({leaf.place for leaf in found}))


def _refuse_attribute(attribute: Attribute) -> NoReturn:
    raise ConfigError(
        f"after the blocks the model reads '{'.'.join(filter(None, attribute))}' of a block, which is set where the "
        f"block runs; with a {BLOCK} block, leave it out of the loss, or write the model as a PipelineModule"
    )


def _again(what: str) -> str:
    return (
        f"with these arguments the model calls {what} again after its blocks; with a {BLOCK} block, call the blocks "
        f"once, and what precedes them only before them; else set {BLOCK}.dummy_inputs to arguments such as the "
        "script's, or write the model as a PipelineModule"
    )
