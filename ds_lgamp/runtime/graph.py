"""The two ends of a chunk's autograd graph, which is kept from the forward to the backward pass.

Tensors that cross an end keep their shapes and gradients. They keep their data only if autograd saved them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from ds_lgamp.runtime.chunk import Tensors, as_tuple, differentiable


@torch.enable_grad()
def begin_graph(inputs: Tensors) -> tuple[Tensors, Tensors]:
    """Begins a graph at ``inputs``. Returns (leaves, followers), each shaped like ``inputs``.

    The gradients of the leaves can be read after the backward pass. Layers compute on the followers, which hold the
    data of ``inputs`` and may be changed in place. No other code may read ``inputs`` from now on.
    """
    if isinstance(inputs, tuple):
        leaves, followers = zip(*map(_begin, inputs)) if inputs else ((), ())
        return tuple(leaves), tuple(followers)
    return _begin(inputs)


def end_graph(result: Tensors) -> list[GradientEdge | None]:
    """Returns where gradients enter the graph, one edge for every floating-point member of ``result``.

    A backward pass starts from these edges instead of the tensors. The edge is None if the member needs no gradient.
    The caller must have gradients enabled.
    """
    return [_edge(member) if member.requires_grad else None for member in differentiable(result)]


def end_outputs(outputs: Any) -> list[GradientEdge | None]:
    """Returns what :func:`end_graph` does, for all tensors in the model's ``outputs``. None may be complex: raises
    TypeError."""
    return end_graph(as_tuple(tuple(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor))))


def backpropagate(ends: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> None:
    """Runs a backward pass from ``ends`` with their ``gradients``. Nothing begins where one of both is None.

    This is torch.autograd.backward without its checks, which the autograd engine repeats. The checks take longer than
    the pass through a small layer. Megatron-core skips them too.

    It stays on the calling thread. On an accelerator autograd would hand every pass to a thread of its own and back,
    which takes the host as long as some layers do, and a step has a pass for every chunk and micro-batch.
    """
    starts = [(end, gradient) for end, gradient in zip(ends, gradients) if end is not None and gradient is not None]
    if starts:
        run_backward = Variable._execution_engine.run_backward
        with torch.autograd.set_multithreading_enabled(False):
            run_backward(*zip(*starts), False, False, (), allow_unreachable=True, accumulate_grad=True)


def drop_unfinished() -> None:
    """Frees what a backward pass that failed on this thread has left to do, with the tensors that it holds.

    Autograd keeps it in the thread's queue until the next pass of the thread.
    """
    torch.ones((), device="cpu", requires_grad=True).backward()


def own_loss(loss: Any) -> Any:
    """Copies a scalar loss, because it may be a view of more memory, such as all terms of a mean.

    Returns any other value as it is.
    """
    return loss.clone() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else loss


def checked_loss(result: Any) -> torch.Tensor:
    """Returns the ``result`` of the last chunk. Raises ValueError if no backward pass can start from it."""
    if not isinstance(result, torch.Tensor) or result.numel() != 1:
        raise ValueError("the loss is not a tensor with one element; the loss function must return one")
    if not result.requires_grad:
        raise ValueError("the loss needs no gradient; it must depend on the model's parameters")
    return result


def _begin(member: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not member.is_floating_point():
        return placeholder(member), member
    leaf = member.detach().requires_grad_()
    # To autograd this is not a view, so layers may change it in place. Its gradient passes through unchanged.
    follower = torch.ops.aten._unsafe_view(leaf, leaf.shape)
    # The graph needs only the leaf's shape and gradient.
    leaf.data = placeholder(member)
    return leaf, follower


def _edge(member: torch.Tensor) -> GradientEdge:
    # A node of a Python autograd function lives only as long as the tensor it returned. The edge therefore goes through
    # a view, whose node is torch's own.
    return get_gradient_edge(member.view_as(member))


def placeholder(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the shape of ``tensor`` and memory for one element."""
    return tensor.new_empty(()).expand(tensor.shape)
