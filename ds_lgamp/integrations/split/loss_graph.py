"""Refuses losses, and other outputs, that depend on more than the last layer computes with."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.parts import Part, parameters_of


class LossGraph:
    """Looks at the graph of a loss or of all outputs, once for every signature of a call, because the model may
    compute more with labels than without them.

    Args:
        model: the model.
        held: the parts of the last layer.
    """

    def __init__(self, model: nn.Module, held: Collection[Part]) -> None:
        own = {id(parameter) for parameter in parameters_of(held)}
        self._foreign = {id(each): name for name, each in model.named_parameters() if id(each) not in own}
        """The names of the parameters that the last layer lacks, by their ids."""
        self.checked: set[Any] = set()
        """The signatures of the calls at which it has looked."""

    def check(self, signature: Any, roots: Any, inputs: Collection[Any], zeros: Mapping[str, list[Tensor]]) -> None:
        """Raises ConfigError if a tensor in ``roots`` depends on a parameter that the last layer lacks, or on zeros.

        Looks at nodes only: where the forward is recomputed, gradients cannot be computed inside it.

        Args:
            signature: that of the call.
            roots: the loss, or all outputs.
            inputs: the nodes that made what the last layer got, or take its gradients.
            zeros: on what the results of each stand-in depend, by the name of its part.
        """
        if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(roots)):
            return
        makers = {id(leaf): path for path, leaves in zeros.items() for leaf in leaves}
        for leaf in walk(roots, inputs)[1]:
            if (name := self._foreign.get(id(leaf))) is not None:
                raise ConfigError(
                    f"behind the blocks the model's output depends on parameter '{name}', which the last layer lacks; "
                    f"{_FIX}"
                )
            if (path := makers.get(id(leaf))) is not None:
                raise ConfigError(
                    f"behind the blocks the model's output depends on what '{path}' returned ahead of them; {_FIX}"
                )
        self.checked.add(signature)


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


_FIX = (
    f"set {BLOCK}.dummy_inputs to arguments such as the script's, else leave that term out of the forward, or write "
    "the model as a PipelineModule"
)
