"""Finds out, by one small forward of the model, which of its modules run before the blocks and which after them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.call import Arguments, BlockArguments, SetAttributes, Survey, Use, run_uncompiled
from ds_lgamp.integrations.split.imagined import in_words, shapes_in
from ds_lgamp.integrations.split.outputs import NotReturned, register_dataclasses
from ds_lgamp.integrations.split.parts import Original, Result, kind_of, parameters_of, parts_of
from ds_lgamp.integrations.split.stand_ins import Placeholder, PlaceholderUsed, replacing, stand_ins_of, watch_calls
from ds_lgamp.integrations.split.state import Buffers
from ds_lgamp.integrations.split.travelling import Uses, numbers_like, reached
from ds_lgamp.integrations.split.trials import BlockTrials


def survey(original: Original, dummy: Arguments) -> Survey:
    """Runs the model's forward on ``dummy`` arguments, with the first block of every kind only, and returns what it
    showed. Raises ConfigError if the model cannot be split at its blocks."""
    device = next(original.model.parameters()).device
    dummy = tree_map_only(Tensor, lambda tensor: tensor.to(device), dummy)
    try:
        return _walked(_Walk(original), dummy)
    except PlaceholderUsed:
        # Blocks return what others need, or what the code after them does.
        return _walked(_Walk(original, Use.COMPUTE), dummy)


def _walked(walk: "_Walk", dummy: Arguments) -> Survey:
    """Runs the forward, and returns what it showed."""
    original, (positional, named) = walk.original, dummy
    model = original.model
    walk.check_parameters()
    with original.undisturbed(), walk.watching():
        try:
            output = run_uncompiled(model, *positional, **named)
            register_dataclasses(output)
            output = walk.check_output(output)
        except (ConfigError, PlaceholderUsed):
            raise
        except Exception as error:
            raise ConfigError(
                f"{type(model).__name__} cannot be split at its blocks '{original.blocks.path}': its forward failed "
                f"with {type(error).__name__} on the dummy inputs {in_words(dummy)}: {error}; set "
                f"{BLOCK}.dummy_inputs to arguments that it takes, or {BLOCK}.model to the model inside that has the "
                "blocks, unless these change the shape of hidden states, which no split model may"
            ) from error
    return walk.result(dummy, output)


class _Walk:
    """Watches one forward. Knows the ``use`` that code after the blocks makes of what they return besides hidden
    states."""

    def __init__(self, original: Original, use: Use = Use.NONE) -> None:
        model, blocks = original.model, original.blocks
        self.original, self._model, self._use = original, model, use
        self._blocks = [*blocks.named.values()]
        self._parts = dict(parts_of(model, blocks))
        self._owners: dict[int, list[str]] = {}
        """The parts that have a parameter, by its id."""
        for path, part in self._parts.items():
            for parameter in parameters_of([part]):
                self._owners.setdefault(id(parameter), []).append(path)
        self._trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        self._before: list[str] = []
        """The parts that ran before the blocks."""
        self._results: list[tuple[Result, Tensor]] = []
        """What they returned, and parameters of no module that were read there."""
        self._calls: Counter[str] = Counter()
        """How often each part has been called."""
        self._shapes_before: dict[tuple[str, int], Any] = {}
        self._travels_to_blocks: set[Result] = set()
        self._travels_to_loss: set[Result] = set()
        self._travels_to_output: set[Result] = set()
        self._running: str | None = None
        """The part that runs."""
        self._without_parameters = {
            path: part
            for path, part in self._parts.items()
            if isinstance(part, nn.Module) and next(part.parameters(), None) is None
        }
        self._buffers = {path: Buffers(part.named_modules()) for path, part in self._without_parameters.items()}
        self._changing: set[str] = set()
        """The parts without parameters that change their buffers. Other such parts need no layer."""
        self._anywhere: set[str] = set()
        """The changing parts that need no layer either, because blocks get what they return."""
        self._read_before: list[str] = []
        """Modules of which parameters were read before the blocks, but not by the module itself."""
        self._reads_after = False
        self._used_after: set[str] = set()
        self._ran_last: str | None = None
        """The part among them that was called last."""
        self._visits = 0
        self._in_turn = True
        """Whether the forward has called each block after the one before it in the list."""
        self._returned: list[Tensor] = []
        """On these leaves depends what depends on the hidden states after a block."""
        self._hidden: Any = None
        """The hidden states that the last block has returned."""
        self._has_returned = False
        """Whether the forward has."""
        self._between: list[tuple[Tensor, Tensor]] = []
        """The hidden states that enter a block, and what the block before it returned, where that is something else."""
        self._version = 0
        """How often they had been changed in place by then."""
        self._attributes = SetAttributes(self._blocks)
        self._trials = BlockTrials(original.recorder)
        self._made: list[Sequence[Tensor]] = []
        """What the forward got for the tensors that each returned besides hidden states."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        with torch.enable_grad(), ExitStack() as stack:
            for buffers in self._buffers.values():
                stack.enter_context(buffers.restored())
            training = [each for part in self._without_parameters.values() for each in part.modules()]
            stack.enter_context(self.original.evaluating(training))
            for path, part in self._parts.items():
                if isinstance(part, nn.Parameter):
                    # Whatever depends on a frozen one must be seen, too.
                    stack.callback(part.requires_grad_, part.requires_grad)
                    part.requires_grad_()
                    continue
                watch_calls(part, partial(self._starts, path), partial(self._ends, path), stack)
            stack.enter_context(replacing(stand_ins_of(self.original.blocks, self._attributes, self._visit)))
            stack.enter_context(self._attributes.all_watched())
            stack.enter_context(Uses(self._uses, also_sizes=True))
            yield

    def check_parameters(self) -> None:
        """Raises ConfigError if parameters belong to several blocks, or to one and to another part."""
        known = set(self._owners)
        for block in self._blocks:
            own = {id(parameter) for parameter in block.parameters()}
            if not known.isdisjoint(own):
                raise self.refusal("its blocks share parameters")
            known |= own

    def result(self, arguments: Arguments, output: Any) -> Survey:
        for path in self._read_before:
            raise self.refusal(f"its forward reads a parameter of '{path}' before the blocks without calling it")
        free = (self._without_parameters.keys() - self._changing) | self._anywhere
        unused = (path for path in self._parts if path not in self._before and path not in self._used_after)
        before = [*self._before, *(path for path in unused if self._precedes_blocks(path))]
        return Survey(
            before=[path for path in before if path not in free],
            after=[path for path in self._parts if path not in before and path not in free],
            returned=[self._trials.shown[kind_of(block)][0] for block in self._blocks],
            recorded=[self._trials.shown[kind_of(block)][1] for block in self._blocks],
            use=self._use,
            tensor_attributes=self._trials.attributes,
            travels_to_blocks=frozenset(each for each in self._travels_to_blocks if each.path not in free),
            travels_to_loss=frozenset(each for each in self._travels_to_loss if each.path not in free),
            travels_to_output=frozenset(each for each in self._travels_to_output if each.path not in free),
            reads_after=self._reads_after,
            arguments=arguments,
            output=output,
            shapes_before=self._shapes_before,
        )

    def _precedes_blocks(self, path: str) -> bool:
        """Whether the model has a part before its blocks, such as the encoder of images that text does not need."""
        blocks = self.original.blocks
        names = [name for name, _ in self._model.named_modules(remove_duplicate=False)]
        return path not in names or names.index(path) < names.index(f"{blocks.path}.{next(iter(blocks.named))}")

    def check_output(self, output: Any) -> Any:
        """Returns the output, with stand-ins for what blocks return.

        Finds on which results before the blocks the output depends in another way than through hidden states. Where
        only the loss counts, training needs no outputs that depend on no hidden states, such as features of images.
        Raises ConfigError if blocks were left out.
        """
        if self._visits != len(self._blocks):
            raise self.refusal(f"its forward called {self._visits} of {len(self._blocks)} blocks")
        if not self._in_turn:
            raise self.refusal("its forward calls them in another order than that of the list, or one of them twice")
        # What follows reads parameters for itself.
        self._owners.clear()
        if self._use is Use.NONE and any(isinstance(leaf, Placeholder) for leaf in tree_leaves(output)):
            self._use = Use.RETURN
        output = tree_map_only(Placeholder, lambda _: NotReturned(), output)
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self._check_backward([output for output in outputs if output.is_floating_point()])
        results, leaves = reached(outputs, self._results)
        self._travels_to_output |= results
        # Frozen blocks may run without gradients.
        if self.original.only_loss and self._hidden.requires_grad:
            results, leaves = reached([leaf for leaf in outputs if _depends(leaf, self._hidden)], self._results)
        if any(leaf is inside for leaf in leaves for inside in self._trials.inside):
            raise self.refusal(_BESIDE)
        if any(leaf is earlier for leaf in leaves for earlier in self._returned[:-1]):
            raise self.refusal("after the blocks its forward computes with what an earlier one than the last returned")
        self._travels_to_loss |= results
        return output

    def _check_backward(self, outputs: list[Tensor]) -> None:
        """Raises ConfigError if the backward of what the forward computes around blocks calls these again, as with
        checkpoints of a block together with what precedes or follows it."""
        self._has_returned = True
        for tensor, leaf in [*self._between, *((output, self._returned[-1]) for output in outputs)]:
            _depends(tensor, leaf)

    def _starts(self, path: str) -> None:
        self._running = self._running or path
        if path in self._buffers:
            self._buffers[path].remember()

    def _uses(self, tensor: Tensor) -> None:
        """Called with a tensor with which a function computes. A parameter shows which parts the forward needs."""
        owners = self._owners.get(id(tensor), []) if isinstance(tensor, nn.Parameter) else []
        if not owners or self._running in owners:
            return
        path = next((each for each in owners if isinstance(self._parts[each], nn.Parameter)), None)
        if self._visits == len(self._blocks):
            self._used_after.update(owners)
            if path is not None and path in self._before:
                self._travels_to_loss.add(Result(path))
                self._travels_to_output.add(Result(path))
            else:
                self._reads_after |= not set(owners).isdisjoint(self._before)
        elif path is None:
            self._read_before.append(owners[0])
        elif path not in self._before:
            self._before.append(path)
            self._results.append((Result(path), tensor))

    def _ends(self, path: str, result: Any, arguments: Arguments) -> Any:
        """Called with what a part has returned for its ``arguments``. Returns what takes its place, None if it
        stays."""
        is_within = self._running not in (None, path)
        if is_within and not self._visits:
            # Another part called it, whose results count.
            return None
        if not is_within:
            self._running = None
        call = self._calls[path]
        self._calls[path] += 1
        if path in self._buffers:
            if self._buffers[path].changed() is not None:
                self._changing.add(path)
            if path not in self._changing:
                return None
        if self._visits and path in self._before and path not in self._anywhere:
            where = "after" if self._visits == len(self._blocks) else "between"
            raise self.refusal(f"its module '{path}' runs before the blocks and again {where} them")
        if self._visits:
            self._used_after.add(path)
            self._ran_last = path
            return None
        if path not in self._before:
            self._before.append(path)
        self._shapes_before[path, call] = shapes_in(result, arguments)
        return tree_map_only(Tensor, partial(self._tracked, path, call, count()), result)

    def _tracked(self, path: str, call: int, numbers: Iterator[int], tensor: Tensor) -> Tensor:
        """Returns a result of a module such that autograd's graph leads to it from whatever depends on it, also if the
        module is frozen."""
        if not tensor.is_floating_point():
            return tensor
        # Also where the forward calls the module under torch.no_grad(). Each result gets a node of its own, which
        # results of torch.chunk lack. Forwards may change it in place, which is forbidden with a leaf.
        with torch.enable_grad():
            tracked = tensor.requires_grad_().clone()
        result = Result(path, call, next(numbers))
        # A hook of the module may have kept the tensor.
        self._results += [(result, tensor), (result, tracked)]
        return tracked

    def _visit(self, index: int, hidden: Any, others: BlockArguments) -> Any:
        """Returns what the forward gets in place of the result of the block with this place among the blocks."""
        block = self._blocks[index]
        if self._has_returned:
            raise ConfigError(
                f"{type(self._model).__name__} checkpoints its blocks '{self.original.blocks.path}' together with "
                "other code, so that its backward would call them again; take the checkpoints out of the forward, "
                f"because {BLOCK}.recompute decides what is computed again"
            )
        others = others._replace(attributes=self._attributes.of(index))
        self._in_turn &= index == self._visits
        self._check_trains(block)
        if any(hasattr(each, "get_seq_length") for each in (*others.positional, *others.named.values())):
            raise self.refusal("its blocks get a cache of keys and values, by use_cache of its config or by peft")
        if self._ran_last is not None:
            raise self.refusal(f"its module '{self._ran_last}' runs between blocks")
        if self._visits:
            self._check_between(hidden)
        self._check_others(others)
        if kind_of(block) not in self._trials.shown:
            self._run(block, hidden, others)
        self._visits += 1
        self._returned.append(hidden.detach().requires_grad_())
        # Forwards may change it in place, which is forbidden with a leaf.
        self._hidden = hidden = self._returned[-1].clone()
        self._version = hidden._version
        modes, recorded = self._trials.shown[kind_of(block)]
        if self.original.recorder.records():
            self.original.recorder.give([*map(_tracked_like, recorded)])
        shown = modes[False].tensors
        if self._use is Use.COMPUTE:
            self._made.append([*map(_tracked_like, shown)])
            return modes[False].with_tensors(hidden, self._made[-1])
        return modes[False].with_tensors(hidden, [Placeholder.of(index, place) for place in range(len(shown))])

    def _run(self, block: nn.Module, hidden: Any, others: BlockArguments) -> None:
        """Runs a block, which shows what it returns, and which attributes it sets."""
        result = self._trials.run(block, hidden, others)
        if not isinstance(result, Tensor) or not isinstance(hidden, Tensor) or result.shape != hidden.shape:
            raise self.refusal("its blocks return something else than tensors of the shape that they get")
        returned, _ = self._trials.shown[kind_of(block)]
        if returned[True].kinds != returned[False].kinds and self._use is not Use.COMPUTE:
            # This forward does not show what becomes of that in training.
            raise PlaceholderUsed

    def _check_others(self, others: BlockArguments) -> None:
        """Finds from which parts the tensors come that a block gets besides hidden states. Every rank may compute what
        parts without parameters return, such as rotary embeddings whose tables grow: these parts need no layer. Raises
        ConfigError if the tensors depend on more than parts before the blocks."""
        leaves = [leaf for leaf in tree_leaves([*others.values]) if isinstance(leaf, Tensor)]
        for leaf in leaves:
            self._uses(leaf)
        if any(isinstance(leaf, Placeholder) and leaf.block != self._visits - 1 for leaf in leaves):
            raise self.refusal(_EARLIER)
        own = [*self._made[-1]] if self._made else []
        if any(leaf is made for returned in self._made[:-1] for made in returned for leaf in leaves):
            raise self.refusal(_EARLIER)
        given = [leaf for leaf in leaves if not isinstance(leaf, Placeholder) and all(leaf is not each for each in own)]
        results, foreign = reached([leaf for leaf in given if leaf.requires_grad], self._results)
        if self._are_foreign(foreign):
            raise self.refusal("its blocks get another tensor that depends on parameters, besides hidden states")
        self._anywhere |= {result.path for result in results} & self._changing
        self._travels_to_blocks |= results

    def _check_between(self, hidden: Any) -> None:
        """Raises ConfigError if ``hidden`` states that enter a block depend on more than the block before it and parts
        before the blocks."""
        if self._hidden._version != self._version:
            raise self.refusal("its forward changes hidden states in place between blocks")
        if hidden is not self._hidden and isinstance(hidden, Tensor) and hidden.requires_grad:
            self._between.append((hidden, self._returned[-1]))
            results, others = reached([hidden], self._results)
            if self._are_foreign(others):
                raise self.refusal(
                    "its forward computes between blocks with parameters, or with what an earlier block returned"
                )
            self._travels_to_blocks |= results

    def _are_foreign(self, leaves: list[Tensor]) -> bool:
        """Whether there are other ``leaves`` than the hidden states that the last block so far has returned."""
        own = self._returned[-1] if self._returned else None
        return any(leaf is not own for leaf in leaves)

    def _check_trains(self, block: nn.Module) -> None:
        """Raises ConfigError if the forward calls ``block`` without gradients, though parameters up to there train."""
        parts = [block, *(self._parts[path] for path in self._before)]
        if not torch.is_grad_enabled() and not self._trained.isdisjoint(map(id, parameters_of(parts))):
            raise ConfigError(
                f"{type(self._model).__name__} calls its blocks '{self.original.blocks.path}' without gradients, but "
                f"with a {BLOCK} block they would train; freeze the parameters of all that runs under torch.no_grad(), "
                "and take reentrant checkpointing out of the forward"
            )

    def refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{type(self._model).__name__} cannot be split at its blocks '{self.original.blocks.path}': {reason}; "
            f"remove the {BLOCK} block, write the model as a PipelineModule, or name another list in {BLOCK}.blocks"
        )


_EARLIER = "a block gets what another one returned than the one right before it"
_BESIDE = (
    "its output depends on what a block computes, but not through what the block returns: it comes by a list, a global "
    "variable, a hook or an attribute, which stay on the rank of the block"
)


def _depends(output: Tensor, hidden: Tensor) -> bool:
    (gradient,) = torch.autograd.grad(output.sum(), hidden, retain_graph=True, allow_unused=True)
    return gradient is not None


def _tracked_like(like: Tensor) -> Tensor:
    """Returns numbers of the shape of a tensor, which autograd follows. Forwards may change them in place."""
    if not like.is_floating_point():
        return like.clone()
    return numbers_like(like.detach()).requires_grad_().clone()
