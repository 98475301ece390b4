"""Where the graph of a chunk, which is kept from the forward to the backward pass, begins and ends: of the tensors that
cross there, shapes and gradients are kept, data only as far as autograd saved them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ds_lgamp.runtime.chunk import Tensors, differentiable


@torch.enable_grad()
def begin_graph(inputs: Tensors) -> tuple[Tensors, Tensors]:
    """Leaves whose gradients can be read after the backward pass, and ``inputs`` as what follows them: layers may work
    on these in place. Nobody else may read ``inputs`` from now on."""
    if isinstance(inputs, tuple):
        leaves, followers = zip(*map(_begin, inputs)) if inputs else ((), ())
        return tuple(leaves), tuple(followers)
    return _begin(inputs)


def end_graph(result: Tensors) -> list[GradientEdge | None]:
    """Where graphs are made: what a backward pass starts from in place of the floating-point members of ``result``, the
    place where gradients enter the graph; None for those that need none."""
    return [_edge(member) if member.requires_grad else None for member in differentiable(result)]


def backpropagate(ends: Sequence[Any], gradients: Sequence[torch.Tensor]) -> None:
    """A backward pass from ``ends`` with their ``gradients``, as torch.autograd.backward without its checks, which the
    engine of autograd repeats: they take longer than the pass through a small layer. Megatron-core does likewise."""
    starts = [(end, gradient) for end, gradient in zip(ends, gradients) if end is not None]
    if starts:
        run_backward = Variable._execution_engine.run_backward
        run_backward(*zip(*starts), False, False, (), allow_unreachable=True, accumulate_grad=True)


def own_loss(loss: Any) -> Any:
    """A loss without the memory it may be a view of, that of all the terms of a mean. What is no scalar stays."""
    return loss.clone() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else loss


def _begin(member: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not member.is_floating_point():
        return _placeholder(member), member
    leaf = member.detach().requires_grad_()
    # No view, so that it can be changed in place; its gradient passes as it is.
    follower = torch.ops.aten._unsafe_view(leaf, leaf.shape)
    # The graph needs the leaf's shape and gradient alone.
    leaf.data = _placeholder(member)
    return leaf, follower


def _edge(member: torch.Tensor) -> GradientEdge:
    # Through a view, whose node is none of a Python function: those live only as long as what they returned.
    return get_gradient_edge(member.view_as(member))


def _placeholder(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like ``tensor`` with memory for one element."""
    return tensor.new_empty(()).expand(tensor.shape)
