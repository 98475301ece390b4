"""The two ends of a chunk's autograd graph, which lives from the forward to the backward pass, and the inputs of graphs
that wait for their backward on the host.

Tensors that cross an end keep their shapes and gradients. They keep their data only if autograd saved them.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from ds_lgamp.partition.bus import Bus, Transfer
from ds_lgamp.partition.memory import shared_size
from ds_lgamp.runtime.chunk import Tensors, as_tuple, differentiable, needs_gradient


def begin_graph(inputs: Tensors, marked: bool = False) -> tuple[Tensors, Tensors]:
    """Begins a graph at ``inputs``. Returns (leaves, followers), each shaped like ``inputs``.

    The gradients of the leaves can be read after the backward pass. Layers compute on the followers, which hold the
    data of ``inputs`` and may be changed in place. No other code may read ``inputs`` from now on. The caller must have
    gradients enabled.

    Args:
        marked: whether only members that require a gradient get one, instead of all floating-point ones.
    """
    if isinstance(inputs, tuple):
        leaves, followers = zip(*(_begin(member, marked) for member in inputs)) if inputs else ((), ())
        return tuple(leaves), tuple(followers)
    return _begin(inputs, marked)


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


def parameters_below(ends: Sequence[Any]) -> set[int]:
    """Returns the ids of the parameters in the graph of :func:`end_graph`'s edges, or of the loss."""
    nodes = [end.node if isinstance(end, GradientEdge) else end.grad_fn for end in ends if end is not None]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [below for below, _ in node.next_functions]
    return {id(node.variable) for node in seen if hasattr(node, "variable")}


def backpropagate(ends: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> None:
    """Runs a backward pass from ``ends`` with their ``gradients``. A pair of which one is None begins nothing.

    This is torch.autograd.backward without its checks, which the autograd engine repeats. The checks take longer than
    the pass through a small layer. Megatron-core skips them too.
    """
    starts = [(end, gradient) for end, gradient in zip(ends, gradients) if end is not None and gradient is not None]
    if starts:
        run_backward = Variable._execution_engine.run_backward
        run_backward(*zip(*starts), False, False, (), allow_unreachable=True, accumulate_grad=True)


def on_this_thread() -> AbstractContextManager[None]:
    """Returns a context in which backward passes stay on the calling thread.

    On an accelerator autograd would hand every pass to a thread of its own and back, which takes the host as long as
    some layers do, and a step has a pass for every chunk and micro-batch.
    """
    return torch.autograd.set_multithreading_enabled(False)


def gradients_of(leaves: Tensors) -> list[torch.Tensor | None]:
    """Returns the gradients of floating-point ``leaves`` after the backward pass; None for one that gets none."""
    return [
        torch.zeros_like(leaf) if leaf.grad is None and leaf.requires_grad else leaf.grad
        for leaf in differentiable(leaves)
    ]


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


def _begin(member: torch.Tensor, marked: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if not needs_gradient(member, marked):
        return placeholder(member), member
    leaf = member.detach().requires_grad_()
    # To autograd this is not a view, so layers may change it in place. Its gradient passes through unchanged.
    follower = _follow(leaf, leaf.shape)
    # The graph needs only the leaf's shape and gradient.
    leaf.data = placeholder(member)
    return leaf, follower


_follow = torch.ops.aten._unsafe_view.default
"""Named with its overload, which torch would look for in every call."""


def _edge(member: torch.Tensor) -> GradientEdge:
    node = member.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):
        # A node of a Python autograd function lives only as long as the tensor it returned, and a leaf has none. Their
        # edges go through a view, whose node is torch's own.
        return get_gradient_edge(member.view_as(member))
    return GradientEdge(node, member.output_nr)


def placeholder(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the shape of ``tensor`` and memory for one element."""
    return tensor.new_empty_strided(tensor.shape, (0,) * tensor.dim())


_Place = tuple[int, int]
"""A chunk and a micro-batch."""


class StoredInputs:
    """Moves inputs between device and host while the program computes.

    An input is the beginning of a graph: leaves that hold the data from which a chunk is computed again. The leaves
    stay; their data leave. Members without gradients, such as token ids, stay on the device.

    Args:
        on_disk: whether they wait on the disk of the ``bus``, instead of in the memory of the host.
    """

    def __init__(self, bus: Bus, on_disk: bool = False) -> None:
        self._bus, self._on_disk = bus, on_disk
        self._under_way: dict[_Place, list[tuple[Transfer, torch.Tensor, torch.Tensor]]] = {}
        """Copies, each with its memory on the host and the leaf whose data it moves."""
        self._away: dict[_Place, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """Memory on the host with data, and the leaf of each."""
        self._free: dict[int, list[torch.Tensor]] = {}
        """Memory on the host without data, by its bytes."""

    def store(self, chunk: int, micro_batch: int, beginning: Tensors) -> None:
        """Launches the copies of an input to the host."""
        copies = self._under_way[chunk, micro_batch] = []
        leaves = differentiable(beginning)
        _part(beginning, leaves)
        for leaf in leaves:
            home = self._home(leaf)
            copies.append((self._bus.store(_values(home, leaf), leaf.detach().reshape(-1)), home, leaf))

    def _home(self, leaf: torch.Tensor) -> torch.Tensor:
        if self._on_disk:
            assert self._bus.disk is not None, "inputs lie on it"
            return self._bus.disk.empty(leaf.numel(), leaf.dtype)
        fitting = [size for size, free in self._free.items() if free and size >= leaf.nbytes]
        if fitting:
            return self._free[min(fitting)].pop()
        return self._bus.room.empty(shared_size(leaf.nbytes), torch.uint8)

    def wait_store(self, chunk: int, micro_batch: int) -> None:
        """Waits for the copies, and frees the input on the device."""
        away = self._away[chunk, micro_batch] = []
        for transfer, home, leaf in self._under_way.pop((chunk, micro_batch)):
            transfer.wait()
            leaf.data = placeholder(leaf)
            away.append((home, leaf))

    def load(self, chunk: int, micro_batch: int) -> None:
        """Launches the copies of an input back to the device."""
        copies = self._under_way[chunk, micro_batch] = []
        for home, leaf in self._away.pop((chunk, micro_batch)):
            data = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
            copies.append((self._bus.load(data.view(-1), _values(home, data)), home, leaf))
            leaf.data = data

    def wait_load(self, chunk: int, micro_batch: int) -> None:
        """Waits until the input is on the device."""
        for transfer, home, _ in self._under_way.pop((chunk, micro_batch)):
            transfer.wait()
            if not self._on_disk:
                # The next copy to it begins after what the device does until now.
                self._free.setdefault(home.numel(), []).append(home)

    def clear(self) -> None:
        """Forgets the inputs of a batch that failed."""
        self._under_way.clear()
        self._away.clear()


def _values(home: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Returns the part of ``home`` that holds the values of ``leaf``, in its dtype."""
    return home if home.dtype == leaf.dtype else home[: leaf.numel() * leaf.itemsize].view(leaf.dtype)


def _part(beginning: Tensors, leaves: list[torch.Tensor]) -> None:
    """Gives members that stay on the device memory of their own, if they share memory with one of the ``leaves``, as
    the members of a message do."""
    leaving = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    for member in beginning if isinstance(beginning, tuple) else ():
        if not member.is_floating_point() and member.untyped_storage().data_ptr() in leaving:
            member.data = member.data.clone()
