"""Backwards in two parts: the first one leaves out gradients of weights that matrix products read, the second one
computes them (zero bubble, arXiv 2401.10241).

While a chunk computes whose backward is split, :func:`torch.nn.functional.linear` and :func:`torch.addmm` are functions
of this module, which compute the same. In the first part, their backward keeps what the gradient of the weight needs:
the product's input and the gradient of its result. All other gradients are computed there, such as those of norms and
biases, and of weights that are read in other ways: by convolutions, by compiled or scripted layers, under autocast, or
after a parametrization. So the second part needs no weights, which may be released by then.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter, functional
from torch.overrides import has_torch_function

from ds_lgamp.runtime.graph import backpropagate

_linear, _addmm = torch._C._nn.linear, torch._C._VariableFunctions.addmm
"""torch's own. Where something else has replaced them, backwards stay whole."""
_no_view = torch.ops.aten._unsafe_view.default
"""Returns a tensor with the same memory that is no view to autograd."""


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
    versions: tuple[int, int]
    """How often the input and the gradient had been changed in place."""

    def compute(self) -> torch.Tensor:
        """Returns the gradient of the weight, by the operations that autograd takes. Raises RuntimeError if what it
        needs has been changed since."""
        if self.versions != (self.input._version, self.gradient._version):
            raise RuntimeError(
                "the input of a matrix product, or the gradient of its result, was changed in place after the "
                "product's backward, but the gradient of its weight comes later; change a copy, or remove "
                "ds_lgamp.split_backward"
            )
        if self.transposed:
            return self.gradient.t().mm(self.input)
        return self.input.t().mm(self.gradient)


class SecondParts:
    """Second parts of backwards that are still to come, by chunk and micro-batch."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], list[_Product]] = {}

    @contextmanager
    def first(self, chunk: int, micro_batch: int, ends: Iterable[Any]) -> Iterator[None]:
        """Inside the block, a backward pass from ``ends`` leaves out what :meth:`run` then computes. A pass that a
        layer runs inside it leaves out nothing."""
        left = _Left([])
        self._waiting[chunk, micro_batch] = left.products
        nodes = {end.node if isinstance(end, GradientEdge) else end.grad_fn for end in ends if end is not None}
        handles = [node.register_prehook(left.begin) for node in nodes if node is not None]
        try:
            with _splitting(left):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def run(self, chunk: int, micro_batch: int) -> None:
        """Computes the gradients of weights that a first part has left out."""
        by_weight: dict[Any, list[_Product]] = {}
        for product in self._waiting.pop((chunk, micro_batch)):
            by_weight.setdefault(product.weight.node, []).append(product)
        while by_weight:
            _, (first, *others) = by_weight.popitem()
            gradient = first.compute()
            for product in others:
                # Autograd, too, adds the gradients of one pass to each other first.
                gradient = gradient + product.compute()
            backpropagate([first.weight], [gradient])

    def nbytes(self) -> int:
        """Returns how much memory they hold."""
        products = [product for each in self._waiting.values() for product in each]
        tensors = [tensor for product in products for tensor in (product.input, product.gradient)]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())

    def clear(self) -> None:
        self._waiting.clear()


class _Left:
    """What a first part that runs leaves out."""

    def __init__(self, products: list[_Product]) -> None:
        self.products = products
        self._task = -1
        """The number of its pass; -1 before that begins."""

    def begin(self, *_: Any) -> None:
        self._task = torch._C._current_graph_task_id()

    @property
    def runs(self) -> bool:
        """Whether it is the innermost backward pass of this thread."""
        return self._task == torch._C._current_graph_task_id()


_left: _Left | None = None
"""What the first part that runs leaves out; None between first parts."""


@contextmanager
def splitting() -> Iterator[None]:
    """Inside the block, a chunk computes whose backward is split."""
    with _splitting(None):
        yield


@contextmanager
def _splitting(left: _Left | None) -> Iterator[None]:
    global _left
    before, functions = _left, (functional.linear, torch.addmm)
    _left = left
    if functional.linear is _linear:
        functional.linear = _split_linear
    if torch.addmm is _addmm:
        vars(torch)["addmm"] = _split_addmm
    try:
        yield
    finally:
        _left = before
        functional.linear, vars(torch)["addmm"] = functions


def _split_linear(input: Any, weight: Any, bias: Any = None) -> Any:
    # Inputs of more dimensions take other ways through torch, which depend on whether it records a graph.
    if _is_plain(input, weight, bias) and input.dim() in (2, 3):
        return _SplitProduct.apply(_linear, input, weight, bias, True, _left is None)
    return _linear(input, weight, bias)


def _split_addmm(*operands: Any, **options: Any) -> Any:
    if len(operands) == 3 and not options and isinstance(operands[0], torch.Tensor):
        bias, input, weight = operands
        if _is_plain(input, weight, bias) and input.dim() == 2 and bias.dim() == 1:
            return _SplitProduct.apply(_addmm_of, input, weight, bias, False, _left is None)
    return _addmm(*operands, **options)


def _addmm_of(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return _addmm(bias, input, weight)


def _is_plain(input: Any, weight: Any, bias: Any) -> bool:
    """Whether ``weight`` is a matrix that trains by itself, autograd records what reads it, and ``input`` is a result
    of the chunk's layers. Buffers may change before the second part, and parameters may be released."""
    return (
        isinstance(weight, Parameter)
        and isinstance(input, torch.Tensor)
        and input.requires_grad
        and input.layout is torch.strided
        and not input.is_nested
        and input.is_contiguous()
        and not isinstance(input if input._base is None else input._base, Parameter)
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
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None:
            context.save_for_backward(input, weight)
            context.saved = None
        else:
            # torch would call hooks after the product. A recomputation ends with the last saved tensor, before it.
            pack, unpack = hooks
            context.saved = [(unpack, pack(input)), (unpack, pack(weight))]
        context.transposed, context.splits = transposed, splits
        context.bias_shape = None if bias is None else bias.shape
        result = compute(input, weight, bias)
        # Layers may change it in place, which autograd forbids for views that a function returns.
        return _no_view(result, result.shape) if result._is_view() else result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        saved = context.saved
        input, weight = context.saved_tensors if saved is None else [unpack(packed) for unpack, packed in saved]
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
            given = input.reshape(-1, input.shape[-1])
            product = _Product(edge, given, rows, context.transposed, (given._version, rows._version))
            # A pass that a layer runs by itself expects all gradients at once, and so does a graph that a backward pass
            # makes.
            if context.splits and _left is not None and _left.runs:
                _left.products.append(product)
                # The pass comes here once. What the second part does not need is free from now on.
                context.saved = None
            else:
                weight_gradient = product.compute()
        return None, input_gradient, weight_gradient, bias_gradient, None, None
