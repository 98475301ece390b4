"""Compares a split model with the whole one, on two micro-batches in turn, as a program computes them. State that
reaches a block by another way than its arguments is then that of the other micro-batch."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.call import Arguments, BatchCalls, Call, Returned, run_uncompiled
from ds_lgamp.integrations.split.forward import SplitForward
from ds_lgamp.integrations.split.parts import full_shape, place_of, restored_modes
from ds_lgamp.integrations.split.stand_ins import replacing, watch_calls
from ds_lgamp.integrations.split.state import Snapshot, leave_out_hosts, snapshot_of, untouched
from ds_lgamp.integrations.split.travelling import numbers_like
from ds_lgamp.integrations.split.trials import others
from ds_lgamp.runtime.chunk import Chunk, as_tuple, cloned
from ds_lgamp.runtime.recompute import SavedTensors, read_states

_LARGEST = 250_000_000
"""Parameters of the largest models that are compared. For others it would take seconds, and much memory."""
_ROUNDS = 2
"""How often the micro-batches are computed. What a forward counts shows in the second round. There the whole output
counts, as in evaluation; in the first round the loss."""
_ELEMENTS = 64
"""Of a gradient, to be compared."""
Layer = Callable[[Any], Any]


class Computed(NamedTuple):
    """What a model computes for a micro-batch."""

    hidden: list[Tensor]
    """The hidden states after every block."""
    output: list[Any]
    """The tensors in its output that count."""
    gradients: Sequence[Tensor]
    """A few numbers of each, by parameter."""
    again: Sequence[Tensor] = ()
    """The hidden states after every block, computed once more."""


Both = tuple[list[Computed], list[Computed]]
"""What a model computes, and what its layers do."""


class Comparison:
    """Compares a model with its layers.

    Args:
        split: the model, split.
        layers: what computes in its place: one for all that is before the blocks, one for each block, one for the rest.
        calls: where the layers find their micro-batch.
    """

    def __init__(self, split: SplitForward, layers: Sequence[Layer], calls: BatchCalls) -> None:
        leave_out_hosts()
        self._original, self._model, self._calls = split.original, split.original.model, calls
        self._layers = layers
        self._own_modules, self._loss_in = split.own_state.modules, split.loss_in
        self._random_sources = split.original.random_sources
        self._trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._comparable = len(split.blocks)
        """How many blocks precede code that draws random numbers between two: the layer of a block draws others."""

    def check(self, arguments: Arguments) -> None:
        """Raises ConfigError if the layers compute something else than the model, or fail where it does not."""
        if not _is_whole(self._model):
            return
        try:
            draws = self._draws(arguments)
        except Exception as error:
            raise self._failure(error) from error
        self._compare_both(arguments, draws)
        self._check_in_training(arguments)

    def _check_in_training(self, arguments: Arguments) -> None:
        """As :meth:`check`, with modules in training, which may keep state only then, as for noise or a warm-up. Passes
        over models that cannot train with such arguments, as a BatchNorm cannot with one row."""
        with restored_modes(self._model), self._before.given_back():
            self._model.train()
            try:
                draws = self._draws(arguments)
            except Exception:
                return
            self._compare_both(arguments, draws)

    def _compare_both(self, arguments: Arguments, draws: bool) -> None:
        """Compares what the model and its layers compute with these arguments and others; only these if one of both
        takes no others."""
        # New ones, which have not learned what changes in evaluation.
        self._chunks = [Chunk([layer], number, self._calls.before_layer) for number, layer in enumerate(self._layers)]
        # A walk over all that is reached takes longer than some forwards, and all of them begin there.
        self._before = snapshot_of(self._model)
        found = self._on_others(arguments, (_ROUNDS, 1))
        try:
            found = found or [self._both([arguments, arguments], _ROUNDS)]
        except Exception as error:
            raise self._failure(error) from error
        for whole, layers in found:
            for pair in zip(whole, layers, strict=True):
                self._compare_one(*pair, draws)

    def _on_others(self, arguments: Arguments, rounds: Sequence[int]) -> list[Both]:
        """Returns what is computed with these arguments and others of each kind, in so many rounds."""
        found: list[Both] = []
        for number, ways in zip(rounds, others(arguments, largest_token(self._model))):
            for other in ways:
                # Neither the model nor its layers need take what nobody has given.
                with suppress(Exception):
                    found.append(self._both([arguments, other], number, between=1 if found else 3))
                    break
        return found

    def _both(self, micro_batches: Sequence[Arguments], rounds: int, between: int = 0) -> Both:
        """Returns what the model computes in all rounds, and what its layers do. If there is one round, the model runs
        ``between`` times more before its layers."""
        whole = self._rounds(rounds, lambda is_whole: [self._whole(each, is_whole) for each in micro_batches])
        if rounds == 1:
            # What cannot be taken back, such as an iterator that repeats itself, then begins three forwards later, and
            # after two rounds four: with any period it is elsewhere in one of them.
            self._rounds(between, lambda is_whole: [self._whole(micro_batches[0], is_whole)])
        return whole, self._rounds(rounds, lambda is_whole: self._in_layers(micro_batches, is_whole))

    def _rounds(self, rounds: int, compute: Callable[[bool], list[Computed]]) -> list[Computed]:
        """Returns what is computed in all rounds. The model is the same afterwards."""
        with self._original.undisturbed(), self._before.given_back(), torch.enable_grad():
            return [each for number in range(rounds) for each in compute(number > 0)]

    def _whole(self, arguments: Arguments, is_whole: bool) -> Computed:
        hidden: list[Tensor] = []
        states: list[Any] = []
        """Of the generators, after every block."""

        def enters(index: int) -> None:
            if states and not self._is_same(states[-1], read_states(self._random_sources)):
                self._comparable = min(self._comparable, index - 1)
            self._original.seed(index)

        def leaves(result: Any, _: Arguments) -> None:
            hidden.append(Returned.of(result)[0].detach().clone())
            states.append(read_states(self._random_sources))

        blocks = self._original.blocks
        with ExitStack() as stack:
            for index, (name, block) in enumerate(blocks.named.items(), 1):
                if isinstance(block, torch.jit.ScriptModule):
                    # It takes no hooks.
                    block = nn.Sequential(block)
                    stack.enter_context(replacing([(*place_of(blocks.container, name), block)]))
                watch_calls(block, partial(enters, index), leaves, stack)
            self._original.seed(0)
            output = run_uncompiled(self._model, *arguments[0], **arguments[1])
        return self._computed(is_whole, hidden, output)

    def _in_layers(self, micro_batches: Sequence[Arguments], is_whole: bool) -> list[Computed]:
        """Computes the micro-batches in turn, layer by layer, with the next layer of each on another rank if there are
        several. Each rank has calls and a model of its own."""
        ranks = 2 if self._original.on_several_ranks else 1
        recomputes = self._original.settings.recompute != "none"
        calls = [
            [Call(positional, named, is_whole=is_whole) for positional, named in micro_batches] for _ in range(ranks)
        ]
        states = [Snapshot(self._own_modules) for _ in range(ranks)]
        values: list[Any] = [*calls[0]]
        hidden: list[list[Tensor]] = [[] for _ in micro_batches]
        again: list[list[Tensor]] = [[] for _ in micro_batches]
        for number, chunk in enumerate(self._chunks):
            rank, is_block = number % ranks, 0 < number < len(self._chunks) - 1
            self._calls.all = calls[rank]
            if ranks > 1:
                states[rank].restore()
            inputs, values, moments = values, [], []
            saved = [SavedTensors() if is_block and recomputes else None for _ in inputs]
            for micro_batch, value in enumerate(inputs):
                moments.append(chunk.state.read())
                tensors = saved[micro_batch]
                with nullcontext() if tensors is None else tensors.dropped():
                    values.append(self._run(chunk, value, micro_batch))
                chunk.state.moved(moments[-1])
            for micro_batch, value in enumerate(inputs if is_block else ()):
                hidden[micro_batch].append(as_tuple(values[micro_batch])[0].detach().clone())
                if (tensors := saved[micro_batch]) is not None:
                    current = chunk.state.rewind(moments[micro_batch])
                    again[micro_batch].append(self._recomputed(tensors, chunk, value, micro_batch))
                    if current is not None:
                        current.write()
            if ranks > 1:
                states[rank] = Snapshot(self._own_modules)
        return [self._computed(is_whole, *each) for each in zip(hidden, values, again)]

    def _recomputed(self, saved: SavedTensors, chunk: Chunk, value: Any, micro_batch: int) -> Tensor:
        """Restores what a block has ``saved``, from its input. Returns the hidden states after it."""
        hidden: list[Tensor] = []
        saved.restore(
            lambda: hidden.append(as_tuple(self._run(chunk, value, micro_batch))[0].detach()), completely=True
        )
        return hidden[0]

    def _run(self, chunk: Chunk, value: Any, micro_batch: int) -> Any:
        """Returns what a layer makes of a micro-batch."""
        self._original.seed(chunk.first_layer)
        return chunk(cloned(value), micro_batch)

    def _computed(self, is_whole: bool, hidden: list[Tensor], output: Any, again: Sequence[Tensor] = ()) -> Computed:
        trained = output if self._loss_in is None else self._loss_in(output)
        weighed = [leaf for leaf in tree_leaves(trained) if isinstance(leaf, Tensor) and leaf.requires_grad]
        summed = [(leaf.float() * numbers_like(leaf.detach().float())).sum() for leaf in weighed]
        gradients: list[Tensor] = []
        if summed:
            found = torch.autograd.grad(torch.stack(summed).sum(), self._trained, allow_unused=True)
            gradients = [_sample(parameter, gradient) for parameter, gradient in zip(self._trained, found)]
        counted = tree_leaves(output if is_whole else trained)
        return Computed(hidden, tree_map_only(Tensor, Tensor.detach, counted), gradients, again)

    def _draws(self, arguments: Arguments) -> bool:
        """Whether the forward draws random numbers."""
        with self._original.undisturbed(), untouched(self._model), torch.no_grad():
            before = read_states(self._random_sources)
            run_uncompiled(self._model, *arguments[0], **arguments[1])
            after = read_states(self._random_sources)
        return not self._is_same(before, after)

    def _is_same(self, one: Sequence[Any], other: Sequence[Any]) -> bool:
        """Whether all generators have the same state twice."""
        return all(source.same(*states) for source, *states in zip(self._random_sources, one, other))

    def _compare_one(self, whole: Computed, split: Computed, draws: bool) -> None:
        for index, pair in enumerate(zip(whole.hidden[: self._comparable], split.hidden)):
            if not _are_equal(*pair):
                raise self._refusal(f"block {index} {_OTHERWISE}")
        for index, pair in enumerate(zip(split.hidden, split.again)):
            if not _are_equal(*pair):
                raise self._refusal(f"block {index} {_AGAIN}")
        if draws:
            # What follows the blocks draws after what precedes them, which the last layer runs again.
            return
        pairs = zip(whole.output, split.output)
        if not all(_are_equal(*pair) for pair in pairs if isinstance(pair[0], Tensor)):
            raise self._refusal(f"what follows its blocks {_OTHERWISE}")
        norms = [float(gradient[0]) for gradient in whole.gradients]
        total = sum(filter(isfinite, norms))
        for parameter, own, other in zip(self._trained, whole.gradients, split.gradients):
            # Dummy inputs may make it NaN.
            if not _are_equal(own, other, total) and own.isfinite().all():
                name = next(name for name, each in self._model.named_parameters() if each is parameter)
                raise self._refusal(f"the gradient of '{name}' {_OTHERWISE}")

    def _failure(self, error: Exception) -> ConfigError:
        return self._refusal(f"on its dummy inputs it fails with {type(error).__name__}: {error}")

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{type(self._model).__name__} cannot be split at its blocks '{self._original.blocks.path}': {reason}; "
            "pass blocks all that they need as arguments, and return all that follows from them, or write the model as "
            f"a PipelineModule, or remove the {BLOCK} block"
        )


_OTHERWISE = (
    "computes something else once two micro-batches take turns, as state does that passes by a block's arguments and "
    "results: in a global, a context variable, a closure, or an attribute of another object"
)
_AGAIN = (
    "computes something else when it is computed once more for the backward pass, as with a counter in a global, a "
    f"closure, or an attribute of another object; set {BLOCK}.recompute to 'none'"
)


def largest_token(model: nn.Module) -> int:
    """Returns a small number that may be a token."""
    if all(parameter.device.type == "cpu" for parameter in model.parameters()):
        return 7
    # One beyond a table would stop a GPU for good.
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return min([2, *tables]) - 1


def _is_whole(model: nn.Module) -> bool:
    """Whether all parameters of a model are here, and not too many."""
    parameters = [*model.parameters()]
    is_here = all(parameter.numel() == full_shape(parameter).numel() for parameter in parameters)
    return is_here and sum(map(Tensor.numel, parameters)) <= _LARGEST


def _sample(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """Returns the norm of the gradient of a ``parameter``, its sum, and some of its elements."""
    flat = (torch.zeros_like(parameter) if gradient is None else gradient).detach().flatten().float()
    some = flat[:: max(1, len(flat) // _ELEMENTS)]
    return torch.cat([torch.stack([flat.norm(), flat.sum()]), some]).to(parameter.dtype)


def _are_equal(one: Tensor, other: Tensor, scale: float = 0.0) -> bool:
    """Whether tensors are equal, but for rounding. Numbers that are much smaller than ``scale`` do not count."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # The usual case, faster.
    if torch.equal(one, other):
        return True
    if not one.is_floating_point():
        return False
    first, second = one.double(), other.double()
    finite = first.isfinite()
    if not torch.equal(finite, second.isfinite()):
        return False
    tolerance = 1e-4 if one.dtype in (torch.float32, torch.float64) else 2e-2
    difference = torch.where(finite, first - second, 0.0).norm()
    return bool(difference <= tolerance * (torch.where(finite, first, 0.0).norm() + 1e-3 * scale) + 1e-12)
