"""Head and loss in pieces of rows.

A piece of rows at a time becomes logits, a loss, and gradients of the rows and of the head, as in the fused losses of
Liger (arXiv 2410.10989, section 3.2). So neither all logits nor all their gradients exist at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.nn import functional

from ds_lgamp.runtime.graph import placeholder
from ds_lgamp.runtime.recompute import is_dropping

Step = Callable[[Tensor], Tensor]
"""Computes a tensor from another one of the same shape, element by element."""
Autocast = tuple[str, torch.dtype, bool]
"""The type of device, the type of numbers, and whether autocast is on."""
Criterion = Callable[[Tensor, Tensor], Tensor]
"""Returns the losses of rows from their logits, of shape (rows, V), and targets."""


class Head(NamedTuple):
    """What makes logits of hidden states, row by row."""

    compute: Callable[[Tensor], Tensor]
    """Returns logits of shape (..., V) for hidden states of shape (..., H)."""
    weights: Sequence[Tensor]
    """What it reads that needs gradients."""
    autocast: Autocast
    matrix: Tensor | None = None
    """Of shape (V, H), if the head is a linear layer with this weight, perhaps with a bias, and nothing else."""

    @classmethod
    def of(
        cls,
        compute: Callable[[Tensor], Tensor],
        weights: Iterable[Tensor],
        device: torch.device,
        matrix: Tensor | None = None,
    ) -> Head:
        """Returns the head as it computes now, under the autocast that is on."""
        state = autocast_now(device)
        needs_gradients = [weight for weight in weights if weight.requires_grad]
        return cls(compute, needs_gradients, state, None if state[2] else matrix)

    @classmethod
    def linear(cls, weight: Tensor, bias: Tensor | None) -> Head:
        """Returns a linear layer."""
        own = (weight,) if bias is None else (weight, bias)
        return cls.of(lambda rows: functional.linear(rows, *own), own, weight.device, weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        with torch.autocast(*self.autocast):
            return self.compute(hidden)


def autocast_now(device: torch.device) -> Autocast:
    kind = device.type
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


class Losses(NamedTuple):
    """The losses of rows."""

    head: Head
    steps: tuple[Step, ...]
    piece: int
    """Rows that are computed together."""
    targets: Tensor
    criterion: Criterion
    autocast: Autocast
    """Where the loss was asked for. A backward runs without."""

    def pieces(self, hidden: Tensor, others: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yields rows, targets and ``others`` of every piece."""
        rows = hidden.detach().split(self.piece)
        yield from zip(
            rows, self.targets.split(self.piece), repeat(None) if others is None else others.split(self.piece)
        )

    def of(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, GradientEdge | None]:
        """Returns the losses of a piece, and where gradients of its logits leave the graph, if there is one."""
        logits = self.head(hidden)
        edge = get_gradient_edge(logits) if logits.requires_grad else None
        with torch.autocast(*self.autocast):
            for step in self.steps:
                logits = step(logits)
            return self.criterion(logits, targets), edge

    def sum(self, hidden: Tensor, weights: Tensor | None) -> Tensor:
        """Returns the sum of the losses of all rows, without gradients."""
        pieces = self.pieces(hidden, weights)
        return torch.stack([_sum(self.of(rows, targets)[0], scale) for rows, targets, scale in pieces]).sum()

    def by_row(self, hidden: Tensor) -> Tensor:
        """Returns the loss of every row. Its backward computes each piece again, for gradients that only then are
        known."""
        return _Again.apply(self, hidden, *self.head.weights)

    def in_all(self, hidden: Tensor, count: Tensor | None, weights: Tensor | None) -> Tensor:
        """Returns the sum of the losses of all rows. In training its forward computes the gradients, too.

        Args:
            count: a number by which to divide it; where it is less than 1, gradients are divided by 1.
            weights: those of the rows; by default ones.
        """
        if not torch.is_grad_enabled():
            total = self.sum(hidden, weights)
            return total if count is None else total / count
        return _Together.apply(self, (count, weights), hidden, *self.head.weights)


class _Gradients:
    """Gradients of rows and of the head's weights, piece by piece. Those of weights add up in 32 bits at least.

    Args:
        hidden: all rows.
        of_rows: whether they need gradients.
    """

    def __init__(self, weights: Sequence[Tensor], hidden: Tensor, of_rows: bool) -> None:
        self._weights = weights
        self.of_rows = torch.zeros_like(hidden, requires_grad=False) if of_rows else None
        self.of_weights = [torch.zeros_like(each, dtype=_wide(each.dtype), requires_grad=False) for each in weights]
        self._done = 0

    def add(self, losses: Losses, rows: Tensor, targets: Tensor, gradient: Tensor | None) -> Tensor:
        """Computes the losses of a piece, and adds its gradients. Returns the losses.

        Args:
            gradient: that of the losses; by default ones.
        """
        start, self._done = self._done, self._done + len(rows)
        of_piece = None if self.of_rows is None else self.of_rows[start : self._done]
        # Nothing that surrounds it saves tensors of this graph, which ends here.
        with torch.enable_grad(), saved_tensors_hooks(_same, _same):
            leaf = rows.requires_grad_(of_piece is not None)
            found, edge = losses.of(leaf, targets)
            gradient = torch.ones_like(found) if gradient is None else gradient.to(found.dtype)
            matrix = losses.head.matrix
            if matrix is None or edge is None:
                self._add_all(found, gradient, leaf, of_piece)
            else:
                (of_logits,) = torch.autograd.grad(found, [edge], gradient)
                self._add_linear(matrix, of_logits, rows.detach(), of_piece)
        return found.detach()

    def _add_all(self, found: Tensor, gradient: Tensor, leaf: Tensor, of_piece: Tensor | None) -> None:
        """Adds the gradients that autograd computes of any head."""
        inputs = [*self._weights] if of_piece is None else [*self._weights, leaf]
        gradients = torch.autograd.grad(found, inputs, gradient, allow_unused=True)
        totals = [*self.of_weights] if of_piece is None else [*self.of_weights, of_piece]
        for total, each in zip(totals, gradients):
            if each is not None:
                total += each

    @torch.no_grad()
    def _add_linear(self, matrix: Tensor, of_logits: Tensor, rows: Tensor, of_piece: Tensor | None) -> None:
        """Adds the gradients of a linear layer, without a temporary of the size of its weight."""
        if of_piece is not None:
            torch.mm(of_logits, matrix, out=of_piece)
        for weight, total in zip(self._weights, self.of_weights):
            if weight is not matrix:
                total += of_logits.sum(0, dtype=total.dtype)
            elif total.dtype == of_logits.dtype:
                total.addmm_(of_logits.t(), rows)
            else:
                some = -(-len(total) // _PARTS)
                for part, columns in zip(total.split(some), of_logits.split(some, dim=1)):
                    part += columns.t() @ rows


_PARTS = 8
"""In how many parts the gradient of a weight in 16 bits is computed, before each is added up in 32 bits."""


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


Scales = tuple[Tensor | None, Tensor | None]
"""A number by which to divide a sum of losses, and the weights of rows."""


def _sum(losses: Tensor, weights: Tensor | None) -> Tensor:
    return (losses if weights is None else losses * weights).sum(dtype=torch.float64)


class _Together(torch.autograd.Function):
    """The sum of losses. Its forward computes gradients, too, which its backward multiplies."""

    @staticmethod
    def forward(context: Any, losses: Losses, scales: Scales, hidden: Tensor, *weights: Tensor) -> Tensor:
        count, of_rows = scales
        context.count, context.dtypes = count, [each.dtype for each in weights]
        if is_dropping():
            # What is saved now is dropped. The forward that restores it computes the gradients.
            total = losses.sum(hidden, of_rows)
            saved = _like_gradients(context.needs_input_grad[2], hidden, weights)
        else:
            found, sums = _Gradients(weights, hidden, context.needs_input_grad[2]), []
            for rows, targets, scale in losses.pieces(hidden, of_rows):
                sums.append(_sum(found.add(losses, rows, targets, scale), scale))
            total = torch.stack(sums).sum()
            saved = [*([] if found.of_rows is None else [found.of_rows]), *found.of_weights]
        context.total = total
        # On the host, so that the backward need not wait for the device to read it.
        context.save_for_backward(torch.tensor(not is_dropping(), device="cpu"), *saved)
        return total if count is None else total / count

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        refuse_gradients_of_gradients()
        is_there, *found = context.saved_tensors
        if not is_there:
            raise RuntimeError(
                "hooks for saved tensors of the model's own have kept what a recomputation restores; leave them out, "
                "or set ds_lgamp.loss_chunk to 0"
            )
        # Where no row counts, the loss is NaN, but gradients are zero.
        factor = gradients[0] if context.count is None else gradients[0] / context.count.clamp(min=1)
        # So they are where a script divides the sum by the number of such rows.
        factor = torch.where((context.total == 0) & ~factor.isfinite(), 0.0, factor)
        # In place, which lets autograd refuse a second backward.
        found = [each.mul_(factor) for each in found]
        of_rows = found.pop(0) if context.needs_input_grad[2] else None
        return None, None, of_rows, *(each.to(dtype) for each, dtype in zip(found, context.dtypes))


def _like_gradients(of_rows: bool, hidden: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors without values, of the shapes and types of gradients."""
    like = [placeholder(hidden)] if of_rows else []
    return like + [placeholder(each.new_empty((), dtype=_wide(each.dtype)).expand(each.shape)) for each in weights]


class _Again(torch.autograd.Function):
    """The loss of every row. Its backward computes each piece again."""

    @staticmethod
    def forward(context: Any, losses: Losses, hidden: Tensor, *weights: Tensor) -> Tensor:
        context.losses = losses
        context.save_for_backward(hidden)
        return torch.cat([losses.of(rows, targets)[0] for rows, targets, _ in losses.pieces(hidden, None)])

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        refuse_gradients_of_gradients()
        (hidden,), losses = context.saved_tensors, context.losses
        weights = losses.head.weights
        found = _Gradients(weights, hidden, context.needs_input_grad[1])
        for rows, targets, gradient in losses.pieces(hidden, gradients[0]):
            found.add(losses, rows, targets, gradient)
        return None, found.of_rows, *(each.to(weight.dtype) for each, weight in zip(found.of_weights, weights))


def refuse_gradients_of_gradients() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "gradients of gradients were asked for (create_graph=True), which a loss in pieces does not have; set "
            "ds_lgamp.loss_chunk to 0"
        )
