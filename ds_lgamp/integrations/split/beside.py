"""Compares a split model with the whole one, on two micro-batches in turn, as a program computes them. State that
reaches a block by another way than its arguments is then that of the other micro-batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.blocks import Blocks
from ds_lgamp.integrations.split.call import Arguments, Call, Calls, run_uncompiled
from ds_lgamp.integrations.split.parts import place_of
from ds_lgamp.integrations.split.snapshot import Snapshot, untouched
from ds_lgamp.integrations.split.stand_ins import replacing
from ds_lgamp.integrations.split.travelling import one
from ds_lgamp.runtime.random_state import RandomSource, read_states, undisturbed

_LARGEST = 250_000_000
"""Parameters of the largest models that are compared. For others it would take seconds, and much memory."""
_ROUNDS = 2
"""How often the micro-batches are computed. What a forward counts shows in the second round."""
Layer = Callable[[Any], Any]


class Computed(NamedTuple):
    """What a model computes for a micro-batch."""

    hidden: list[Tensor]
    """The hidden states behind every block."""
    output: list[Any]
    """The tensors in its output that count."""
    gradients: Sequence[Tensor | None]
    """By parameter."""


class Comparison:
    """Compares a model with its layers.

    Args:
        model: the whole model.
        blocks: its blocks.
        layers: what computes in its place: one for all that is ahead of the blocks, one for each block, one for the
            rest.
        calls: where the layers find their micro-batch.
        own_modules: the modules of the model that belong to no layer.
        random_sources: generators that the model may draw from.
        loss_in: returns the loss in an output, if nothing else there has gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks,
        layers: Sequence[Layer],
        calls: Calls,
        own_modules: Sequence[nn.Module],
        random_sources: Sequence[RandomSource],
        loss_in: Callable[[Any], Any] | None,
    ) -> None:
        self._model, self._blocks, self._layers, self._calls = model, blocks, layers, calls
        self._own_modules, self._random_sources, self._loss_in = own_modules, random_sources, loss_in
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._comparable = len(blocks.named)
        """How many blocks precede code that draws random numbers between two: the layer of a block draws others."""

    def check(self, arguments: Arguments, apart: bool) -> None:
        """Raises ConfigError if the layers compute something else than the model, or fail where it does not.

        Args:
            arguments: with which the model can be called.
            apart: whether layers may be on several ranks. Then each has the next one on another rank.
        """
        if not _is_whole(self._model):
            return
        # A number beyond an embedding would stop a GPU for good.
        sizes = [module.num_embeddings for module in self._model.modules() if isinstance(module, nn.Embedding)]
        candidates = [*_others(arguments, min([1, *(size - 1 for size in sizes)])), arguments]
        for number, others in enumerate(candidates):
            is_last = number == len(candidates) - 1
            try:
                draws = self._draws(arguments)
                expected = self._rounds(partial(self._whole, [arguments, others]))
            except Exception as error:
                # The model need not take what nobody has given.
                if is_last:
                    raise self._refusal(f"its forward fails on its dummy inputs: {_told(error)}") from error
                continue
            try:
                found = self._rounds(self._in_layers([arguments, others], 2 if apart else 1))
            except Exception as error:
                if not is_last:
                    continue
                if isinstance(error, ConfigError):
                    raise
                raise self._refusal(f"its layers fail with {_told(error)}") from error
            for whole, split in zip(expected, found, strict=True):
                self._compare(whole, split, draws)
            return

    def _rounds(self, compute: Callable[[], list[Computed]]) -> list[Computed]:
        """Returns what is computed in all rounds. The model is the same afterwards."""
        with undisturbed(self._random_sources), untouched(self._model), torch.enable_grad():
            return [each for _ in range(_ROUNDS) for each in compute()]

    def _whole(self, micro_batches: Sequence[Arguments]) -> list[Computed]:
        """Computes the micro-batches by the whole model."""
        return [self._computed_whole(each) for each in micro_batches]

    def _computed_whole(self, arguments: Arguments) -> Computed:
        hidden: list[Tensor] = []
        behind: list[Any] = []

        def enters(index: int) -> None:
            if behind and not self._is_same(behind[-1], read_states(self._random_sources)):
                self._comparable = min(self._comparable, index - 1)
            self._seed(index)

        def leaves(result: Any) -> None:
            hidden.append(_first(result).detach().clone())
            behind.append(read_states(self._random_sources))

        with ExitStack() as stack:
            for index, (name, block) in enumerate(self._blocks.named.items(), 1):
                if isinstance(block, torch.jit.ScriptModule):
                    # It takes no hooks.
                    block = nn.Sequential(block)
                    stack.enter_context(replacing([(*place_of(self._blocks.container, name), block)]))
                before = block.register_forward_pre_hook(lambda *_, index=index: enters(index))
                after = block.register_forward_hook(lambda *seen: leaves(seen[-1]))
                stack.callback(before.remove)
                stack.callback(after.remove)
            self._seed(0)
            output = run_uncompiled(self._model, *arguments[0], **arguments[1])
        return self._computed(hidden, output)

    def _in_layers(self, micro_batches: Sequence[Arguments], ranks: int) -> Callable[[], list[Computed]]:
        """Returns what computes the micro-batches in turn, layer by layer. Each rank knows its own of the calls."""

        def compute() -> list[Computed]:
            calls = [[Call(*each) for each in micro_batches] for _ in range(ranks)]
            # Each rank has a model of its own.
            states = [Snapshot(self._own_modules) for _ in range(ranks)]
            values: list[Any] = [*calls[0]]
            hidden: list[list[Tensor]] = [[] for _ in micro_batches]
            for number, layer in enumerate(self._layers):
                rank = number % ranks
                self._calls.all = calls[rank]
                states[rank].restore()
                for micro_batch, value in enumerate(values):
                    self._calls.before_layer(number, micro_batch)
                    self._seed(number)
                    values[micro_batch] = layer(value)
                    if 0 < number < len(self._layers) - 1:
                        hidden[micro_batch].append(_first(values[micro_batch]).detach().clone())
                states[rank] = Snapshot(self._own_modules)
            return [self._computed(*each) for each in zip(hidden, values)]

        return compute

    def _computed(self, hidden: list[Tensor], output: Any) -> Computed:
        counted = output if self._loss_in is None else self._loss_in(output)
        tensors = [leaf for leaf in tree_leaves(counted) if isinstance(leaf, Tensor)]
        summed = [(leaf.float() * one(leaf.detach().float())).sum() for leaf in tensors if leaf.requires_grad]
        gradients: Sequence[Tensor | None] = []
        if summed:
            gradients = torch.autograd.grad(torch.stack(summed).sum(), self._trained, allow_unused=True)
        return Computed(hidden, [leaf.detach() for leaf in tensors], gradients)

    def _draws(self, arguments: Arguments) -> bool:
        """Whether the forward draws random numbers."""
        with undisturbed(self._random_sources), untouched(self._model), torch.no_grad():
            before = read_states(self._random_sources)
            run_uncompiled(self._model, *arguments[0], **arguments[1])
            after = read_states(self._random_sources)
        return not self._is_same(before, after)

    def _is_same(self, one: Sequence[Any], other: Sequence[Any]) -> bool:
        """Whether all generators have the same state twice."""
        return all(source.same(*states) for source, *states in zip(self._random_sources, one, other))

    def _compare(self, whole: Computed, split: Computed, draws: bool) -> None:
        for index, pair in enumerate(zip(whole.hidden[: self._comparable], split.hidden)):
            if not _are_equal(*pair):
                raise self._refusal(f"block {index} {_OTHERWISE}")
        if draws:
            # What follows the blocks draws after what precedes them, which the last layer runs again.
            return
        if not all(map(_are_equal, whole.output, split.output)):
            raise self._refusal(f"what follows its blocks {_OTHERWISE}")
        norms = [float(gradient.float().norm()) for gradient in whole.gradients if gradient is not None]
        total = sum(filter(isfinite, norms))
        for parameter, *pair in zip(self._trained, whole.gradients, split.gradients):  # type: ignore[assignment]
            own, split_own = (torch.zeros_like(parameter) if each is None else each for each in pair)
            # Dummy inputs may make it NaN.
            if own.isfinite().all() and not _are_equal(own, split_own, total):
                name = next(name for name, each in self._model.named_parameters() if each is parameter)
                raise self._refusal(f"the gradient of '{name}' {_OTHERWISE}")

    def _seed(self, number: int) -> None:
        for source in self._random_sources:
            source.seed(number)

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{type(self._model).__name__} cannot be split at its blocks '{self._blocks.path}': {reason}; pass blocks "
            "all that they need as arguments, and return all that follows from them, or write the model as a "
            f"PipelineModule, or remove the {BLOCK} block"
        )


_OTHERWISE = (
    "computes something else once two micro-batches take turns, as state does that passes by a block's arguments and "
    "results: in a global, a context variable, a closure, or an attribute of another object"
)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _is_whole(model: nn.Module) -> bool:
    """Whether all parameters of a model are here, and not too many."""
    parameters = [*model.parameters()]
    return all(parameter.numel() for parameter in parameters) and sum(map(Tensor.numel, parameters)) <= _LARGEST


def _first(result: Any) -> Tensor:
    """Returns the hidden states in what a block returned."""
    return result[0] if isinstance(result, tuple) else result


def _are_equal(one: Tensor, other: Tensor, scale: float = 0.0) -> bool:
    """Whether tensors are equal, but for rounding.

    Args:
        scale: numbers that are much smaller do not count.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    first, second = one.double(), other.double()
    finite = first.isfinite()
    if not torch.equal(finite, second.isfinite()):
        return False
    tolerance = 1e-4 if one.dtype in (torch.float32, torch.float64) else 2e-2
    difference = torch.where(finite, first - second, 0.0).norm()
    return bool(difference <= tolerance * (torch.where(finite, first, 0.0).norm() + 1e-3 * scale) + 1e-12)


def _others(arguments: Arguments, largest: int) -> Iterator[Arguments]:
    """Yields arguments that differ from these, first also in the number of rows and in length.

    Args:
        largest: an integer in place of zeros that is in the range of every embedding.
    """
    other = tree_map_only(Tensor, partial(_other, largest=largest), arguments)
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.ndim]
    lengths = {leaf.shape[-1] for leaf in tensors if leaf.ndim > 1 and not leaf.is_floating_point()}
    longer = tree_map_only(Tensor, lambda each: torch.cat([each, each]) if each.ndim else each, other)
    if len({leaf.shape[0] for leaf in tensors}) == 1:
        if len(lengths) == 1 and max(lengths) > 1:
            yield tree_map_only(Tensor, _shorter, longer)
        yield longer
    yield other
    yield tree_map_only(Tensor, lambda each: each if each.is_floating_point() else _other(each, largest), arguments)


def _shorter(tensor: Tensor) -> Tensor:
    """Returns a tensor of integers without the last column."""
    return tensor if tensor.is_floating_point() or tensor.ndim < 2 else tensor[..., :-1]


def _other(tensor: Tensor, largest: int) -> Tensor:
    """Returns a tensor of the same shape with other numbers of the same range."""
    if tensor.is_floating_point():
        return one(tensor.detach())
    if tensor.numel() == 0 or tensor.ndim == 0:
        return tensor
    low, high = (int(each) for each in tensor.to(torch.int64).aminmax())
    if low == high == 0:
        # They may be any tokens.
        places = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
        return ((places + 1) % 2 * largest).to(tensor.dtype)
    if low == high == 1:
        # They may be a mask, which needs some ones.
        masked = tensor.clone()
        masked[..., -1] = 0
        return masked
    rolled = tensor.flatten().roll(1).view(tensor.shape)
    return rolled if not torch.equal(rolled, tensor) else tensor.flip(-1)
