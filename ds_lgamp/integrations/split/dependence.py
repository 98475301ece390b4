"""On what values depend: autograd's graph leads there, or they are others with other numbers there."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves

from ds_lgamp.integrations.split.parts import Result
from ds_lgamp.integrations.split.stand_ins import Placeholder, Results


class Uses(TorchFunctionMode):
    """Tells with which tensors functions compute.

    Args:
        use: called with each of them.
        also_sizes: whether who asks for a size needs the tensor, too. Dtypes and devices need no values.
    """

    def __init__(self, use: Callable[[Tensor], None], also_sizes: bool = False) -> None:
        super().__init__()
        self._use, self._also_sizes = use, also_sizes

    def __torch_function__(self, function: Any, types: Any, positional: Any = (), named: Any = None) -> Any:
        named = named or {}
        result = function(*positional, **named)
        is_size = self._also_sizes and isinstance(result, torch.Size)
        if is_size or any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            for leaf in tree_leaves((positional, named)):
                if isinstance(leaf, Tensor):
                    self._use(leaf)
        return result


def walk(roots: Any, ends: Collection[Any]) -> tuple[set[Any], list[Tensor]]:
    """Follows autograd's graph from those tensors in ``roots`` that have gradients down to its leaves, or to the nodes
    ``ends``. Returns which of these it reached, and the leaves."""
    seen: set[Any] = {None}
    reached, leaves = set(), []
    tensors = (leaf for leaf in tree_leaves(roots) if isinstance(leaf, Tensor) and leaf.requires_grad)
    left: list[Any] = [get_gradient_edge(tensor).node for tensor in tensors]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in ends:
            reached.add(node)
            continue
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves.append(node.variable)
        left += [each for each, _ in node.next_functions]
    return reached, leaves


def reached(values: Any, results: Mapping[Result, Tensor]) -> set[Result]:
    """Returns the results to which autograd's graph leads from the tensors in ``values``."""
    nodes = {get_gradient_edge(tensor).node: result for result, tensor in results.items() if tensor.requires_grad}
    return {nodes[node] for node in walk(values, nodes)[0]}


def random_results(like: Mapping[Result, Tensor]) -> Results:
    """Returns random numbers for results, in the shapes of these, that autograd follows."""
    # Forwards may change them in place, which is forbidden with leaves.
    return {result: one(tensor).requires_grad_().clone() for result, tensor in like.items()}


def one(like: Tensor) -> Tensor:
    """Returns random numbers of the shape of a tensor, the same every time."""
    return random_like(like, 1)


def other(like: Tensor) -> Tensor:
    """Returns other random numbers than :func:`one`."""
    # Their mean and their deviation differ, too, which blocks may get instead of them.
    return 0.5 + 2 * random_like(like, 2)


def random_like(like: Tensor, seed: int) -> Tensor:
    """Returns random numbers of the shape of a tensor, by a seed."""
    return torch.empty_like(like).normal_(generator=torch.Generator(like.device).manual_seed(seed))


def is_alike(first: Any, second: Any) -> bool:
    """Whether tensors in both values are equal, but for rounding. Everything else may differ, and what stands in for a
    tensor of another block."""
    pairs = zip(tree_flatten(first)[0], tree_flatten(second)[0], strict=True)
    return all(
        _are_close(one, other) for one, other in pairs if isinstance(one, Tensor) and not isinstance(one, Placeholder)
    )


def _are_close(one: Tensor, other: Any) -> bool:
    if not isinstance(other, Tensor) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one.float(), other.float(), rtol=1e-3, atol=1e-5, equal_nan=True)
