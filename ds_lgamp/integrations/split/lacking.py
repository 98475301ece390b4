"""Outputs of an evaluation that depend on what the last layer lacks, such as features of images in a call unlike the
dummy inputs."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ds_lgamp.integrations.split.ahead import Results
from ds_lgamp.integrations.split.alike import is_alike
from ds_lgamp.integrations.split.call import Call
from ds_lgamp.integrations.split.loss_graph import walk
from ds_lgamp.integrations.split.output import NotComputed
from ds_lgamp.integrations.split.parts import Result
from ds_lgamp.integrations.split.travelling import other

Leaves = dict[str, list[Tensor]]
Run = Callable[[Mapping[Result, Tensor], Leaves | None], tuple[Any, Results]]
"""Computes the output once more, with the results that are given. With lists for leaves, what the last layer lacks
depends on them. Returns all results, too."""


class LackingOutputs:
    """Knows which outputs the last layer cannot compute, for every kind of call."""

    def __init__(self) -> None:
        self._known: dict[Any, frozenset[int]] = {}

    def left_out(self, call: Call, output: Any, leaves: Leaves, run: Run) -> Any:
        """Returns the ``output`` of a call with :class:`NotComputed` in place of tensors that the last layer cannot
        compute.

        Args:
            leaves: a list for every part that the last layer lacks.
            run: computes the output once more. It is called for the first call of a kind.
        """
        kind = call.signature, call.needs
        if kind not in self._known:
            self._known[kind] = _lacking(tree_leaves(output), leaves, run)
        if not (lacking := self._known[kind]):
            return output
        values, structure = tree_flatten(output)
        return tree_unflatten(
            [NotComputed() if place in lacking else each for place, each in enumerate(values)], structure
        )


def _lacking(outputs: list[Any], leaves: Leaves, run: Run) -> frozenset[int]:
    """Returns the places in ``outputs`` of tensors that the last layer cannot compute: autograd's graph leads from them
    to ``leaves``, or they are others with other numbers there. Graphs do not show what is detached, nor numbers what
    the model multiplies with zeros that are trained later."""
    with torch.enable_grad():
        connected, zeros = run({}, leaves)
        made = {id(leaf) for each in leaves.values() for leaf in each}
        of_graph = [any(id(leaf) in made for leaf in walk(each, ())[1]) for each in tree_leaves(connected)]
    changed, _ = run({result: other(tensor.detach()) for result, tensor in zeros.items()}, None)
    others = [not is_alike(*pair) for pair in zip(outputs, tree_leaves(changed), strict=True)]
    return frozenset(place for place, found in enumerate(zip(of_graph, others, strict=True)) if any(found))
