"""Logits that never exist whole.

For a large vocabulary, logits and their gradients are the peak of a step's memory. A head that works row by row gives
:class:`Logits`, which remember how they would be computed. Where ``torch.nn.functional.cross_entropy`` gets them, head
and loss are computed in pieces of rows (:class:`~ds_lgamp.runtime.pieces.Losses`). Whatever else asks for their values
gets all of them, with the numbers of the head itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_lgamp.cost.activations import rows_of_piece
from ds_lgamp.runtime.pieces import Criterion, Head, Losses, Step, autocast_now, refuse_gradients_of_gradients


class Entry(NamedTuple):
    """How hidden states reach a head of which each rank has a slice, with some words of the vocabulary."""

    gather: Callable[[Tensor], Tensor]
    """Returns the hidden states of all rows. Its backward adds up the gradients that the slices give them."""
    parts: int
    """How many ranks each have a part of the rows; 1 if all have all of them."""

    @classmethod
    def of_slices(
        cls, ranks: int, divide_rows: bool, gather: Callable[[Tensor], Tensor], copy: Callable[[Tensor], Tensor]
    ) -> Entry | None:
        """Returns that of a head of which each of the ``ranks`` has a slice; None if there is one rank.

        Args:
            divide_rows: whether each has a part of the rows, as with sequence parallelism.
            gather, copy: what gives a rank the rows of all, and the same rows, with backwards that add up gradients.
        """
        if ranks == 1:
            return None
        return cls(gather, ranks) if divide_rows else cls(copy, 1)


def deferred(head: Head, hidden: Tensor, loss_chunk: int | str | None, entry: Entry | None = None) -> Logits | None:
    """Returns the logits of ``hidden`` states, not computed. None if they have no more rows than a piece, or if nothing
    in training gets a gradient.

    Args:
        loss_chunk: rows of a piece, "auto", or 0 or None for all.
        entry: None if the head has the whole vocabulary.
    """
    width = hidden.shape[-1] if hidden.dim() > 1 else 0
    plain = type(hidden) in _PLAIN and hidden.is_floating_point() and hidden.numel() > 0 and not hidden.is_inference()
    trains = torch.is_grad_enabled()
    if not (loss_chunk and plain) or (trains and not (hidden.requires_grad or head.weights)):
        return None
    with torch.no_grad():
        probe = head(hidden.detach().reshape(-1, width)[:0])
    rows = hidden.numel() // width * (1 if entry is None else entry.parts)
    piece = rows_of_piece(loss_chunk, rows, width, probe.shape[-1])
    if rows <= piece:
        return None
    if entry is not None:
        hidden = entry.gather(hidden)
    return _Deferred.apply(_Recipe(_Source(head, hidden, piece), hidden, (), probe), hidden, *head.weights)


@runtime_checkable
class MakesLogits(Protocol):
    """A layer whose result may be deferred logits."""

    loss_chunk: int | str | None
    """Rows of a piece, "auto", or 0 or None for all."""


def defer_logits(layers: Iterable[Any], loss_function: Any, loss_chunk: int | str | None) -> None:
    """Lets layers that can defer logits, if the loss function takes these."""
    if getattr(loss_function, "takes_deferred_logits", False):
        for layer in layers:
            if isinstance(layer, MakesLogits):
                layer.loss_chunk = loss_chunk


class _Source:
    """The head and the hidden states of logits, and all logits that derive from them.

    Args:
        piece: rows that are computed together.
    """

    def __init__(self, head: Head, hidden: Tensor, piece: int) -> None:
        self.head, self.hidden, self.piece = head, hidden, piece
        self.trains = torch.is_grad_enabled()
        """Whether values get a graph, even if something asks for them without."""
        self._version = hidden._version
        self.family: list[ref[Logits]] = []
        """In the order in which they were made."""

    def check(self) -> None:
        """Raises RuntimeError if the hidden states are other ones by now."""
        if self.hidden._version != self._version:
            raise RuntimeError(
                "hidden states were changed in place after the head had got them; let the model change a copy, or set "
                "ds_lgamp.loss_chunk to 0"
            )

    def compute_all(self) -> None:
        """Computes all logits that derive from the head's."""
        self.check()
        family, self.family = self.family, []
        for reference in family:
            if (logits := reference()) is not None:
                logits.computed()


class _Recipe(NamedTuple):
    """How logits would be computed."""

    source: _Source
    rows: Tensor
    """The hidden states, in the shape of the logits but for the last dimension."""
    steps: tuple[Step, ...]
    """What is computed of the head's result, element by element."""
    probe: Tensor
    """Logits of no rows, of shape (0, V)."""
    parent: Logits | None = None
    """The logits from which these derive; None for the result of the head."""
    operation: Step | None = None
    """What makes them of their parent."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns the logits of the head's ``hidden`` states."""
        if self.parent is None or self.operation is None:
            return self.source.head(hidden)
        return self.operation(self.parent.recipe(hidden))


class Logits(Tensor):
    """Logits of shape (..., V) that are not computed. They say their shape and type. Cross entropy computes them in
    pieces. Everything else gets the values of all."""

    recipe: _Recipe
    _computed: Tensor | None

    @classmethod
    def of(cls, recipe: _Recipe) -> Logits:
        probe, shape = recipe.probe, (*recipe.rows.shape[:-1], recipe.probe.shape[-1])
        logits = Tensor._make_wrapper_subclass(cls, shape, dtype=probe.dtype, device=probe.device)  # type: ignore
        logits.recipe, logits._computed = recipe, None
        recipe.source.family.append(ref(logits))
        return logits

    def computed(self) -> Tensor:
        """Returns the logits, computed."""
        if self._computed is None:
            recipe = self.recipe
            with torch.set_grad_enabled(recipe.source.trains):
                if recipe.parent is None or recipe.operation is None:
                    self._computed = recipe(recipe.source.hidden)
                else:
                    self._computed = recipe.operation(recipe.parent.computed())
        return self._computed

    def is_open(self) -> bool:
        """Whether losses may be computed in pieces: nothing has asked for values, which it may have changed, and losses
        have gradients where logits have them."""
        return self._computed is None and torch.is_grad_enabled() == self.recipe.source.trains

    def loss_by_row(self, targets: Tensor, criterion: Criterion) -> Tensor:
        """Returns the loss of every row, in one dimension. Its backward computes each piece again, for gradients that
        only then are known."""
        if not self.is_open():
            return criterion(self.computed().reshape(-1, self.shape[-1]), targets.reshape(-1))
        losses, rows = self._losses(targets, criterion)
        return losses.by_row(rows)

    def loss_in_all(
        self,
        targets: Tensor,
        criterion: Criterion,
        dtype: torch.dtype,
        count: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Returns the sum of the losses of all rows.

        Args:
            dtype: of the result.
            count: a number by which to divide it; where it is less than 1, gradients are divided by 1.
            weights: those of the rows; by default ones.
        """
        losses, rows = self._losses(targets, criterion)
        _, narrow, autocasts = losses.head.autocast
        if not self.is_open() or torch.float16 in (rows.dtype, self.recipe.probe.dtype, narrow if autocasts else None):
            # Its gradients fit into 16 bits only with the loss scale, which comes with the backward.
            of_rows = self.loss_by_row(targets, criterion).float()
            total = (of_rows if weights is None else of_rows * weights.reshape(-1)).sum()
            return (total if count is None else total / count).to(dtype)
        return losses.in_all(rows, count, None if weights is None else weights.reshape(-1)).to(dtype)

    def _losses(self, targets: Tensor, criterion: Criterion) -> tuple[Losses, Tensor]:
        """Returns what computes the losses, and the rows."""
        recipe, source = self.recipe, self.recipe.source
        source.check()
        rows = recipe.rows.reshape(-1, recipe.rows.shape[-1])
        autocast = autocast_now(rows.device)
        return Losses(source.head, recipe.steps, source.piece, targets.reshape(-1), criterion, autocast), rows

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, positional: Any = (), named: Any = None) -> Any:
        named = named or {}
        if _tells_of(function) in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*positional, **named)
        result = _without_values(function, positional, named)
        if result is not None:
            return result
        # What follows may change them in place, so the others are computed before.
        for leaf in tree_leaves((positional, named)):
            if isinstance(leaf, cls):
                leaf.recipe.source.compute_all()
        positional, named = tree_map_only(cls, cls.computed, (positional, named))
        return function(*positional, **named)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Computes for functions that come here another way, such as the kernels of a function of autograd."""
        return function(*tree_map_only(cls, _values, args), **tree_map_only(cls, _values, kwargs or {}))


@torch.no_grad()
def _values(logits: Logits) -> Tensor:
    logits.recipe.source.compute_all()
    return logits.computed().detach()


class _Deferred(torch.autograd.Function):
    """Makes logits that are not computed. Its backward is the head's, for functions that call no function of torch."""

    @staticmethod
    def forward(context: Any, recipe: _Recipe, hidden: Tensor, *weights: Tensor) -> Logits:
        context.recipe = recipe
        context.save_for_backward(hidden)
        return Logits.of(recipe)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        refuse_gradients_of_gradients()
        (hidden,), recipe = context.saved_tensors, context.recipe
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            logits = recipe(leaf)
        inputs = [leaf, *recipe.source.head.weights]
        return None, *torch.autograd.grad(logits, inputs, gradients, allow_unused=True)


_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)
_KNOWN = {
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf", "names", "itemsize"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xpu", "is_mps"),
    *("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "get_device", "element_size", "stride"),
    *("__hash__", "__len__", "_version", "is_sparse_csr", "is_inference", "is_contiguous"),
}
"""What of logits is known without their values."""
_OF_ROWS = {"view", "reshape", "flatten", "unflatten", "unsqueeze", "contiguous", "clone"}
"""Functions that leave rows in their order, if the last dimension stays."""
_STEPS = {
    *("float", "to", "double", "half", "bfloat16", "tanh"),
    *("mul", "multiply", "__mul__", "__rmul__", "div", "divide", "true_divide", "__truediv__"),
}
"""Functions that compute element by element, if everything else that they get is a number or a type."""
_OTHERS = (int, float, bool, torch.dtype, torch.device, str, type(None))


def _tells_of(function: Any) -> str:
    """Returns the name of a function, or of the attribute that it reads."""
    name = getattr(function, "__name__", "")
    return getattr(function.__self__, "__name__", "") if name == "__get__" else name


def _without_values(function: Any, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor | None:
    """Returns what a function makes of logits, if that needs no values; else None."""
    if function is functional.cross_entropy:
        asked = _Asked.of(*positional, **named)
        return None if asked is None else asked.loss()
    if not positional or not torch.is_grad_enabled():
        return None
    logits, *others = positional
    if not isinstance(logits, Logits) or not logits.is_open():
        return None
    name, recipe = getattr(function, "__name__", ""), logits.recipe
    if name == "__getitem__" and len(others) == 1 and _keeps_columns(others[0], logits.dim()):
        made = recipe._replace(rows=recipe.rows[others[0]])
    elif not all(isinstance(each, _OTHERS) for each in tree_leaves((others, named))):
        return None
    elif name in _OF_ROWS:
        shape = function(torch.empty(logits.shape, device="meta"), *others, **named).shape
        if not shape or shape[-1] != logits.shape[-1]:
            return None
        made = recipe._replace(rows=recipe.rows.reshape(*shape[:-1], recipe.rows.shape[-1]))
    elif name in _STEPS:
        step = partial(_applied, function, others, named)
        made = recipe._replace(steps=(*recipe.steps, step), probe=step(recipe.probe))
    else:
        return None
    made = made._replace(parent=logits, operation=partial(_applied, function, others, named))
    return _Deferred.apply(made, recipe.source.hidden, *recipe.source.head.weights)


def _applied(function: Any, others: Sequence[Any], named: Mapping[str, Any], logits: Tensor) -> Tensor:
    return function(logits, *others, **named)


def _keeps_columns(index: Any, dimensions: int) -> bool:
    """Whether an index of logits with so many ``dimensions`` chooses whole rows."""
    if isinstance(index, Tensor):
        return not isinstance(index, Logits) and index.dtype in (torch.bool, torch.int64) and index.dim() < dimensions
    entries = index if isinstance(index, tuple) else (index,)
    if not all(each is Ellipsis or isinstance(each, slice) for each in entries):
        return False
    slices = [each for each in entries if each is not Ellipsis]
    reaches_last = len(slices) == dimensions or (Ellipsis in entries[:-1] and entries[-1] is not Ellipsis)
    return not reaches_last or slices[-1] == slice(None)


class _Asked(NamedTuple):
    """What a call of cross entropy asks for that pieces can compute."""

    logits: Logits
    targets: Tensor
    ignored: int
    smoothing: float
    reduction: str

    @classmethod
    def of(
        cls,
        input: Any,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> _Asked | None:
        """Takes the arguments of ``torch.nn.functional.cross_entropy``."""
        if not (isinstance(input, Logits) and input.is_open() and type(target) in _PLAIN and torch.is_grad_enabled()):
            return None
        of_rows = input.dim() == 2 and target.shape == input.shape[:1] and not target.is_floating_point()
        deprecated = size_average is not None or reduce is not None
        if not of_rows or weight is not None or deprecated or reduction not in ("mean", "sum", "none"):
            return None
        return cls(input, target, ignore_index, label_smoothing, reduction)

    def loss(self) -> Tensor:
        criterion = partial(
            functional.cross_entropy, ignore_index=self.ignored, reduction="none", label_smoothing=self.smoothing
        )
        if self.reduction == "none":
            return self.logits.loss_by_row(self.targets, criterion)
        count = (self.targets != self.ignored).sum() if self.reduction == "mean" else None
        # Under autocast it is not that of the logits.
        dtype = criterion(self.logits.recipe.probe, self.targets[:0]).dtype
        return self.logits.loss_in_all(self.targets, criterion, dtype, count)
