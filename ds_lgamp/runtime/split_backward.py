"""Backwards in two parts: the first one leaves out gradients of weights that matrix products read, the second one
computes them (zero bubble, arXiv 2401.10241).

While a chunk computes whose backward is split, :func:`torch.nn.functional.linear` and :func:`torch.addmm` are functions
of this module, which compute the same. In the first part, their backward keeps what the gradient of the weight needs:
the product's input and the gradient of its result. All other gradients are computed there, such as those of norms and
biases, and of weights that are read in other ways: by convolutions, by compiled or scripted layers, under autocast, or
after a parametrization. So the second part needs no weights, which may be released by then.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter, functional
from torch.overrides import has_torch_function

from ds_lgamp.runtime.graph import backpropagate

_linear, _addmm = functional.linear, torch.addmm


class _Product(NamedTuple):
    """What the gradient of a weight needs."""

    weight: GradientEdge
    """Where the gradient enters."""
    input: torch.Tensor
    """[rows, columns of the input]"""
    gradient: torch.Tensor
    """Of the result: [rows, columns of the result]."""
    transposed: bool
    """Whether the weight has a row for each column of the result, as in a linear layer."""

    def compute(self) -> torch.Tensor:
        """Returns the gradient of the weight, by the operations that autograd takes."""
        if self.transposed:
            return self.gradient.t().mm(self.input)
        return self.input.t().mm(self.gradient)


class SecondParts:
    """Second parts of backwards that are still to come, by chunk and micro-batch."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], list[_Product]] = {}

    @contextmanager
    def first(self, chunk: int, micro_batch: int) -> Iterator[None]:
        """Inside the block, a backward pass leaves out what :meth:`run` then computes."""
        products = self._waiting[chunk, micro_batch] = []
        with _splitting(products):
            yield

    def run(self, chunk: int, micro_batch: int) -> None:
        """Computes the gradients of weights that a first part has left out."""
        sums: dict[Any, tuple[GradientEdge, torch.Tensor]] = {}
        products = self._waiting.pop((chunk, micro_batch))[::-1]
        times: dict[Any, int] = {}
        for product in products:
            times[product.weight.node] = times.get(product.weight.node, 0) + 1
        while products:
            product = products.pop()
            node, gradient = product.weight.node, product.compute()
            times[node] -= 1
            if node in sums:
                # Autograd, too, adds the gradients of one pass to each other first.
                gradient = sums[node][1] + gradient
            if times[node]:
                sums[node] = product.weight, gradient
            else:
                backpropagate([product.weight], [gradient])

    def nbytes(self) -> int:
        """Returns how much memory they hold."""
        products = [product for each in self._waiting.values() for product in each]
        tensors = [tensor for product in products for tensor in (product.input, product.gradient)]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())

    def clear(self) -> None:
        self._waiting.clear()


_products: list[_Product] | None = None
"""Where a first part that runs leaves what it leaves out."""


@contextmanager
def splitting() -> Iterator[None]:
    """Inside the block, a chunk computes whose backward is split."""
    with _splitting(None):
        yield


@contextmanager
def _splitting(products: list[_Product] | None) -> Iterator[None]:
    global _products
    before, functions = _products, (functional.linear, torch.addmm)
    _products, functional.linear = products, _split_linear
    vars(torch)["addmm"] = _split_addmm
    try:
        yield
    finally:
        _products = before
        functional.linear, vars(torch)["addmm"] = functions


def _split_linear(input: Any, weight: Any, bias: Any = None) -> Any:
    # Other inputs take other ways through torch, which depend on whether it records a graph.
    if _is_plain(input, weight, bias) and input.dim() in (2, 3) and input.is_contiguous():
        return _SplitProduct.apply(_linear, input, weight, bias, True, _products is None)
    return _linear(input, weight, bias)


def _split_addmm(bias: Any, input: Any, weight: Any, **options: Any) -> Any:
    if not options and _is_plain(input, weight, bias) and bias.dim() == 1:
        return _SplitProduct.apply(_addmm_of, input, weight, bias, False, _products is None)
    return _addmm(bias, input, weight, **options)


def _addmm_of(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return _addmm(bias, input, weight)


def _is_plain(input: Any, weight: Any, bias: Any) -> bool:
    """Whether ``weight`` is a matrix that trains by itself, and autograd records what reads it."""
    return (
        isinstance(weight, Parameter)
        and isinstance(input, torch.Tensor)
        and weight.requires_grad
        and weight.is_leaf
        and weight.dim() == 2
        # Hooks of a weight would see no gradient, or an old one, in the first part.
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
        and torch.is_grad_enabled()
        and not has_torch_function((input, weight, bias))
        and not torch.is_autocast_enabled(input.device.type)
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


class _SplitProduct(torch.autograd.Function):
    """A matrix product whose weight's gradient may come later."""

    @staticmethod
    def forward(  # type: ignore[override]
        context: Any,
        compute: Callable[..., torch.Tensor],
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
        splits: bool,
    ) -> torch.Tensor:
        context.save_for_backward(input, weight)
        context.transposed, context.splits = transposed, splits
        context.bias_shape = None if bias is None else bias.shape
        return compute(input, weight, bias)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        input, weight = context.saved_tensors
        _, of_input, of_weight, of_bias, *_ = context.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        input_gradient = weight_gradient = bias_gradient = None
        if of_input:
            input_gradient = rows.mm(weight if context.transposed else weight.t()).view(input.shape)
        if of_bias:
            bias_gradient = rows.sum_to_size(context.bias_shape)
        if of_weight:
            # The node of the weight outlives its data.
            edge = GradientEdge(*context.next_functions[1])
            product = _Product(edge, input.reshape(-1, input.shape[-1]), rows, context.transposed)
            # A graph that a backward pass makes and goes through by itself expects all gradients at once, as does a
            # pass that a layer runs in its forward.
            if context.splits and _products is not None:
                _products.append(product)
            else:
                weight_gradient = product.compute()
        return None, input_gradient, weight_gradient, bias_gradient, None, None
