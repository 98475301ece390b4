"""Finds out, by one small forward of the model, which of its modules work ahead of the blocks and which behind them."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.attributes import SetAttributes
from ds_lgamp.integrations.split.blocks import Blocks
from ds_lgamp.integrations.split.buffers import Buffers
from ds_lgamp.integrations.split.call import Arguments, BlockArguments, run_uncompiled
from ds_lgamp.integrations.split.dataclass_outputs import register_dataclasses
from ds_lgamp.integrations.split.imagined import Shape
from ds_lgamp.integrations.split.kept import kept_in_training
from ds_lgamp.integrations.split.loss_graph import walk
from ds_lgamp.integrations.split.parts import (
    Attribute,
    Result,
    Returned,
    parameters_of,
    parts_of,
    place_of,
    restored_modes,
)
from ds_lgamp.integrations.split.stand_ins import Passed, Touched, Visited, replacing
from ds_lgamp.runtime.recompute import RandomSource, undisturbed


class Survey(NamedTuple):
    """What the forward of a model showed."""

    ahead: list[str]
    """The parts that were used ahead of the blocks, and unused ones that the model has ahead of them, by name."""
    behind: list[str]
    """All other parts, by name."""
    returned: int
    """How many members the tuple has that a block returns; 0 if it returns a tensor."""
    beside: tuple[bool, ...]
    """Which of them beside hidden states are tensors."""
    kept: list[Attribute]
    """The attributes of blocks that they set to tensors which depend on parameters."""
    travels_to_blocks: frozenset[Result]
    """Results of parts ahead of the blocks on which depends what blocks get beside hidden states."""
    travels_behind: frozenset[Result]
    """Those on which the loss depends other than through hidden states."""
    travels_to_output: frozenset[Result]
    """Those on which any output does."""
    read_behind: bool
    """Whether the forward reads, behind the blocks, parameters of modules that ran ahead of them."""
    arguments: Arguments
    """With which the forward was called."""
    output: Any
    """What it returned."""
    returned_ahead: Returned


def survey(
    model: nn.Module, blocks: Blocks, dummy: Arguments, random_sources: Sequence[RandomSource], only_loss: bool
) -> Survey:
    """Runs the model's forward on ``dummy`` arguments, with the first block only, and returns what it showed.

    Args:
        only_loss: whether a training step needs no other output than the loss.

    Raises ConfigError if the model cannot be split at its blocks.
    """
    walk = _Walk(model, blocks)
    walk.check_parameters()
    positional, named = _on_device_of(model, dummy)
    with undisturbed(random_sources), walk.watching():
        try:
            output = run_uncompiled(model, *positional, **named)
            register_dataclasses(output)
            walk.check_output(output, only_loss)
        except ConfigError:
            raise
        except Touched:
            raise walk.refusal("its forward computes with what a block returned beside hidden states") from None
        except Exception as error:
            raise ConfigError(
                f"{type(model).__name__} cannot be split at its blocks '{blocks.path}': its forward failed with "
                f"{type(error).__name__} on {_shown(dummy)}: {error}; set {BLOCK}.dummy_inputs to arguments that it "
                "takes, unless its blocks change the shape of hidden states, which no split model may"
            ) from error
    return walk.result((positional, named), output)


def _on_device_of(model: nn.Module, dummy: Arguments) -> Arguments:
    """Returns the arguments with their tensors where the model is."""
    device = next(model.parameters()).device
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), dummy)


class _Reads(TorchFunctionMode):
    """Tells which parameters functions compute with."""

    def __init__(self, read: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self._read = read

    def __torch_function__(self, function: Any, types: Any, positional: Any = (), named: Any = None) -> Any:
        result = function(*positional, **(named or {}))
        # Whoever asks for a dtype or a device needs no values.
        if isinstance(result, torch.Size) or any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            for leaf in tree_leaves((positional, named)):
                if isinstance(leaf, nn.Parameter):
                    self._read(leaf)
        return result


class _Walk:
    """Watches one forward."""

    def __init__(self, model: nn.Module, blocks: Blocks) -> None:
        self._model, self._blocks = model, blocks
        self._parts = dict(parts_of(model, blocks))
        self._owners: dict[int, list[str]] = {}
        """The parts that have a parameter, by its id."""
        for path, part in self._parts.items():
            for parameter in parameters_of([part]):
                self._owners.setdefault(id(parameter), []).append(path)
        self._trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        self._ahead: list[str] = []
        self._results: list[tuple[Result, Tensor]] = []
        """What parts ahead of the blocks returned, and parameters of no module that were read there."""
        self._calls: Counter[str] = Counter()
        """How often each part has been called."""
        self._returned_ahead: dict[tuple[str, int], Any] = {}
        self._travels_to_blocks: set[Result] = set()
        self._travels_behind: set[Result] = set()
        self._travels_to_output: set[Result] = set()
        self._running: str | None = None
        """The one of them that is called."""
        self._without_parameters = {
            path: part for path, part in self._parts.items() if isinstance(part, nn.Module) and _has_no_parameters(part)
        }
        self._buffers = {path: Buffers(part.named_modules()) for path, part in self._without_parameters.items()}
        self._changing: set[str] = set()
        """The parts without parameters that change their buffers. Others need no layer."""
        self._anywhere: set[str] = set()
        """Those of them that need none either, because blocks get what they return."""
        self._read_ahead: list[str] = []
        """Modules of which parameters were read ahead of the blocks, but not by the module itself."""
        self._read_behind = False
        self._used_behind: set[str] = set()
        self._ran_last: str | None = None
        """The last of them that was called."""
        self._visited = 0
        self._in_turn = True
        """Whether it has called each block behind the one before it in the list."""
        self._behind_blocks: list[Tensor] = []
        """On these leaves depends what depends on the hidden states behind a block."""
        self._inside: list[Tensor] = []
        """On these leaves depends what the blocks compute that ran: the first of every kind."""
        self._kinds = blocks.kinds
        self._passed: Any = None
        """The hidden states that a block has passed on."""
        self._version = 0
        """How often they had been changed in place by then."""
        self._kept: list[Attribute] = []
        self._called = [*blocks.named.values()]
        self._attributes = SetAttributes(self._called)
        self._returned = 0
        self._beside: tuple[bool, ...] = ()
        """Which of what a block returns beside hidden states are tensors."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        with torch.enable_grad(), ExitStack() as stack:
            for buffers in self._buffers.values():
                stack.enter_context(buffers.restored())
            training = [each for part in self._without_parameters.values() for each in part.modules()]
            stack.enter_context(evaluating(self._model, self._blocks, training))
            for path, part in self._parts.items():
                if isinstance(part, nn.Parameter):
                    # Whatever depends on a frozen one must be seen, too.
                    stack.callback(part.requires_grad_, part.requires_grad)
                    part.requires_grad_()
                    continue
                before = part.register_forward_pre_hook(lambda *_, path=path: self._starts(path))
                after = part.register_forward_hook(lambda *seen, path=path: self._saw(path, seen[-1]))
                stack.callback(before.remove)
                stack.callback(after.remove)
            stand_ins = [
                (*place_of(self._blocks.container, name), Visited(block, index, self._attributes, self._visit))
                for index, (name, block) in enumerate(self._blocks.named.items())
            ]
            stack.enter_context(replacing(stand_ins))
            stack.enter_context(self._attributes.looking())
            stack.enter_context(_Reads(self._read))
            yield

    def check_parameters(self) -> None:
        """Raises ConfigError if parameters belong to several blocks, or to one and to another part."""
        seen = set(self._owners)
        for block in self._blocks.named.values():
            own = {id(parameter) for parameter in block.parameters()}
            if not seen.isdisjoint(own):
                raise self.refusal("its blocks share parameters")
            seen |= own

    def result(self, arguments: Arguments, output: Any) -> Survey:
        for path in self._read_ahead:
            raise self.refusal(f"its forward reads a parameter of '{path}' ahead of the blocks without calling it")
        free = (self._without_parameters.keys() - self._changing) | self._anywhere
        unused = (path for path in self._parts if path not in self._ahead and path not in self._used_behind)
        ahead = [*self._ahead, *(path for path in unused if self._precedes_blocks(path))]
        behind = [path for path in self._parts if path not in ahead and path not in free]
        ahead = [path for path in ahead if path not in free]
        return Survey(
            ahead=ahead,
            behind=behind,
            returned=self._returned,
            beside=self._beside,
            kept=self._kept,
            travels_to_blocks=frozenset(each for each in self._travels_to_blocks if each.path not in free),
            travels_behind=frozenset(each for each in self._travels_behind if each.path not in free),
            travels_to_output=frozenset(each for each in self._travels_to_output if each.path not in free),
            read_behind=self._read_behind,
            arguments=arguments,
            output=output,
            returned_ahead=self._returned_ahead,
        )

    def _precedes_blocks(self, path: str) -> bool:
        """Whether the model has a part ahead of its blocks, such as the encoder of images that text does not need."""
        names = list(dict(self._model.named_modules()))
        return path not in names or names.index(path) < names.index(self._blocks.path)

    def check_output(self, output: Any, only_loss: bool) -> None:
        """Notes on which results ahead of the blocks the output depends in another way than through hidden states.
        With ``only_loss``, training needs no outputs that depend on no hidden states, such as features of images.
        Raises ConfigError if blocks were left out."""
        if self._visited != len(self._blocks.named):
            raise self.refusal(f"its forward called {self._visited} of {len(self._blocks.named)} blocks")
        if not self._in_turn:
            raise self.refusal("its forward calls them in another order than that of the list, or one of them twice")
        # What follows reads parameters for itself.
        self._owners.clear()
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        results, leaves = self._reached(outputs)
        self._travels_to_output |= results
        # Frozen blocks may run without gradients.
        if only_loss and self._passed.requires_grad:
            results, leaves = self._reached([leaf for leaf in outputs if _depends(leaf, self._passed)])
        if any(leaf is inside for leaf in leaves for inside in self._inside):
            raise self.refusal(_BESIDE)
        if any(leaf is earlier for leaf in leaves for earlier in self._behind_blocks[:-1]):
            raise self.refusal("behind the blocks its forward computes with what an earlier one than the last returned")
        self._travels_behind |= results

    def _reached(self, tensors: Sequence[Tensor]) -> tuple[set[Result], list[Tensor]]:
        """Returns on which results of parts ahead of the blocks, and on which other leaves, ``tensors`` depend."""
        nodes = {get_gradient_edge(tensor).node: result for result, tensor in self._results}
        reached, leaves = walk(tensors, nodes)
        return {nodes[node] for node in reached}, leaves

    def _starts(self, path: str) -> None:
        self._running = self._running or path
        if path in self._buffers:
            self._buffers[path].look()

    def _read(self, parameter: nn.Parameter) -> None:
        """Notes that a function computes with a parameter."""
        owners = self._owners.get(id(parameter), [])
        if not owners or self._running in owners:
            return
        path = next((each for each in owners if isinstance(self._parts[each], nn.Parameter)), None)
        if self._visited == len(self._blocks.named):
            self._used_behind.update(owners)
            if path is not None and path in self._ahead:
                self._travels_behind.add(Result(path))
                self._travels_to_output.add(Result(path))
            else:
                self._read_behind |= not set(owners).isdisjoint(self._ahead)
        elif path is None:
            self._read_ahead.append(owners[0])
        elif path not in self._ahead:
            self._ahead.append(path)
            self._results.append((Result(path), parameter))

    def _saw(self, path: str, result: Any) -> Any:
        """Notes what a module has returned. Returns what takes its place, None if it stays."""
        is_within = self._running not in (None, path)
        if is_within and not self._visited:
            # Another part called it, whose results are seen.
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
        if self._visited and path in self._ahead and path not in self._anywhere:
            where = "behind" if self._visited == len(self._blocks.named) else "between"
            raise self.refusal(f"its module '{path}' runs ahead of the blocks and again {where} them")
        if self._visited:
            self._used_behind.add(path)
            self._ran_last = path
            return None
        if path not in self._ahead:
            self._ahead.append(path)
        self._returned_ahead[path, call] = tree_map_only(Tensor, Shape, result)
        return tree_map_only(Tensor, partial(self._noted, path, call, count()), result)

    def _noted(self, path: str, call: int, numbers: Iterator[int], tensor: Tensor) -> Tensor:
        """Returns a result of a module, noted so that whatever depends on it is seen, also if the module is frozen."""
        if not tensor.is_floating_point():
            return tensor
        # Also where the forward calls the module under torch.no_grad(). Each gets a node of its own, which those of
        # torch.chunk do not have. Forwards may change it in place, which is forbidden with a leaf.
        with torch.enable_grad():
            noted = tensor.requires_grad_().clone()
        result = Result(path, call, next(numbers))
        # A hook of the module may have kept the tensor.
        self._results += [(result, tensor), (result, noted)]
        return noted

    def _visit(self, index: int, hidden: Any, beside: BlockArguments) -> Any:
        """Returns what the forward gets in place of the result of the block with this place among the blocks."""
        block = self._called[index]
        self._in_turn &= index == self._visited
        self._check_trains(block)
        if any(hasattr(each, "get_seq_length") for each in (*beside.positional, *beside.named.values())):
            raise self.refusal("its blocks get a cache of keys and values, by use_cache of its config or by peft")
        if self._ran_last is not None:
            raise self.refusal(f"its module '{self._ran_last}' runs between blocks")
        if self._visited:
            self._check_between(hidden)
        leaves = tree_leaves([*beside.values])
        for leaf in leaves:
            if isinstance(leaf, nn.Parameter):
                self._read(leaf)
        passed = [leaf for leaf in leaves if isinstance(leaf, Passed)]
        if any(leaf.block != self._visited - 1 for leaf in passed):
            raise self.refusal("a block gets what another one returned than the one right before it")
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Passed))
        self._check_others([leaf for leaf in tensors if leaf.requires_grad])
        if any(block is each for each in self._kinds):
            self._inside += block.parameters()
            named = {name: self._entering(value) for name, value in beside.named.items()}
            run = partial(block, *map(self._entering, (hidden, *beside.positional)), **named)
            self._kept += kept_in_training(block, run)
            if self._visited == 0:
                self._note_result(run(), hidden)
        self._visited += 1
        self._behind_blocks.append(hidden.detach().requires_grad_())
        # Forwards may change it in place, which is forbidden with a leaf.
        hidden = self._behind_blocks[-1].clone()
        self._passed, self._version = hidden, hidden._version
        others = [Passed.of(self._visited - 1, place) if tensor else None for place, tensor in enumerate(self._beside)]
        return (hidden, *others) if self._returned else hidden

    def _entering(self, given: Any) -> Any:
        """Returns an argument of a block, with tensors of the same numbers on which all depends that the block
        computes. Lists and dictionaries stay, to which it may write."""
        if type(given) is tuple:
            return tuple(map(self._entering, given))
        if not isinstance(given, Tensor) or isinstance(given, Passed) or not given.is_floating_point():
            return given
        self._inside.append(given.detach().requires_grad_())
        # Blocks may change it in place, which is forbidden with a leaf.
        return self._inside[-1].clone()

    def _check_others(self, depending: list[Tensor]) -> None:
        """Notes from which parts the ``depending`` tensors are that blocks get beside hidden states. Those from parts
        without parameters may be computed on every rank, as those of rotary embeddings whose tables grow: these parts
        need no layer. Raises ConfigError if they depend on more than parts ahead of the blocks."""
        results, others = self._reached(depending)
        if self._are_foreign(others):
            raise self.refusal("its blocks get another tensor that depends on parameters, beside hidden states")
        self._anywhere |= {result.path for result in results} & self._changing
        self._travels_to_blocks |= results

    def _check_between(self, hidden: Any) -> None:
        """Raises ConfigError if ``hidden`` states that enter a block depend on more than the block before it and parts
        ahead of the blocks."""
        if self._passed._version != self._version:
            raise self.refusal("its forward changes hidden states in place between blocks")
        if hidden is not self._passed and isinstance(hidden, Tensor) and hidden.requires_grad:
            results, others = self._reached([hidden])
            if self._are_foreign(others):
                raise self.refusal(
                    "its forward computes between blocks with parameters, or with what an earlier block returned"
                )
            self._travels_to_blocks |= results

    def _are_foreign(self, leaves: list[Tensor]) -> bool:
        """Whether there are other ``leaves`` than the hidden states that the last block so far has returned."""
        own = self._behind_blocks[-1] if self._behind_blocks else None
        return any(leaf is not own for leaf in leaves)

    def _check_trains(self, block: nn.Module) -> None:
        """Raises ConfigError if the forward calls ``block`` without gradients, though parameters up to there train."""
        parts = [block, *(self._parts[path] for path in self._ahead)]
        if not torch.is_grad_enabled() and not self._trained.isdisjoint(map(id, parameters_of(parts))):
            raise ConfigError(
                f"{type(self._model).__name__} calls its blocks '{self._blocks.path}' without gradients, but with a "
                f"{BLOCK} block they would train; freeze the parameters of all that runs under torch.no_grad(), and "
                "take reentrant checkpointing out of the forward"
            )

    def _note_result(self, result: Any, hidden: Any) -> None:
        if isinstance(result, tuple):
            self._returned = len(result)
            self._beside = tuple(isinstance(each, Tensor) for each in result[1:])
            result = result[0]
        if not isinstance(result, Tensor) or not isinstance(hidden, Tensor) or result.shape != hidden.shape:
            raise self.refusal("its blocks return something else than tensors of the shape that they get")

    def refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{type(self._model).__name__} cannot be split at its blocks '{self._blocks.path}': {reason}; remove the "
            f"{BLOCK} block, write the model as a PipelineModule, or name another list in {BLOCK}.blocks"
        )


_BESIDE = (
    "its output depends on what a block computes, but not through what the block returns: it comes by a list, a global "
    "variable, a hook or an attribute, which stay on the rank of the block"
)


def _depends(output: Tensor, hidden: Tensor) -> bool:
    (gradient,) = torch.autograd.grad(output.sum(), hidden, retain_graph=True, allow_unused=True)
    return gradient is not None


def _shown(dummy: Arguments) -> str:
    """Returns the arguments in words, without the values of tensors."""
    positional, named = dummy
    told = {**{str(place): value for place, value in enumerate(positional)}, **named}
    shapes = tree_map_only(Tensor, lambda tensor: list(tensor.shape), told)
    return "the dummy inputs " + ", ".join(f"{name} {value!r}" for name, value in shapes.items())


def _has_no_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is None


@contextmanager
def evaluating(model: nn.Module, blocks: Blocks, training: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Switches the model to evaluation inside the block, so that nothing is dropped at random, but for some modules in
    ``training``, and for those that contain ``blocks``: their forward may compute a loss in training only."""
    with restored_modes(model):
        model.eval()
        for module in [*training, *(model.get_submodule(path) for path in blocks.chain)]:
            module.training = True
        yield
