"""What blocks, or what follows them, compute with besides the hidden states that they get: results of parts before the
blocks, which have to travel with hidden states from the first layer to all others, and code between two blocks.

There are two ways to find it: autograd's graph leads there from what blocks get, or blocks get something else once the
numbers there are others.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.call import Call, DryRun, Needs
from ds_lgamp.integrations.split.parts import Result
from ds_lgamp.integrations.split.stand_ins import NONE, Placeholder, Results


class Uses(TorchFunctionMode):
    """Calls ``use`` with every tensor with which a function computes; if ``also_sizes``, also with a tensor whose size
    it asks for. Dtypes and devices need no values."""

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
    """Follows autograd's graph from the tensors in ``roots`` to its leaves or to the nodes ``ends``. Returns which of
    these nodes it reached, and the leaves."""
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


def reached(values: Any, results: Iterable[tuple[Result, Tensor]]) -> tuple[set[Result], list[Tensor]]:
    """Returns the results to which autograd's graph leads from the tensors in ``values``, and the other leaves."""
    nodes = {get_gradient_edge(tensor).node: result for result, tensor in results if tensor.requires_grad}
    found, leaves = walk(values, nodes)
    return {nodes[node] for node in found}, leaves


def random_results(like: Mapping[Result, Tensor]) -> Results:
    """Returns random results of these shapes, which autograd follows."""
    # Forwards may change them in place, which is forbidden with leaves.
    return {result: numbers_like(tensor).requires_grad_().clone() for result, tensor in like.items()}


def numbers_like(like: Tensor) -> Tensor:
    """Returns random numbers of the shape of a tensor, the same every time."""
    return random_like(like, 1)


def other_numbers_like(like: Tensor) -> Tensor:
    """Returns other random numbers than :func:`numbers_like`."""
    # Their mean and their deviation differ, too, which blocks may get instead of them.
    return 0.5 + 2 * random_like(like, 2)


def random_like(like: Tensor, seed: int) -> Tensor:
    """Returns random numbers of the shape of a tensor, by a seed."""
    return torch.empty_like(like).normal_(generator=torch.Generator(like.device).manual_seed(seed))


def is_alike(first: Any, second: Any) -> bool:
    """Whether the tensors in two values are equal, except for rounding. All that is no tensor may differ, and so may
    placeholders."""
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


EARLIER = (
    "a block of the model gets what a block returned that is not the one right before it; with a "
    f"{BLOCK} block, write the model as a PipelineModule"
)
Fill = Callable[[int, Tensor], Tensor]
"""Makes the hidden states after a block, by its number, from those that the forward had there."""
RunDry = Callable[[Call, Mapping[Result, Tensor], Fill], tuple[DryRun, Results]]
"""Runs a forward up to the last block, with the results that are given, and fills the hidden states after every block.
Returns what it showed, and all results."""


class Travelling:
    """Knows what travels, and where the forward computes between blocks.

    Args:
        after: the results that the loss needs after the blocks, and all that any output does.
        run_dry: runs the model's forward where parts and blocks are absent.
    """

    def __init__(self, after: tuple[Collection[Result], Collection[Result]], run_dry: RunDry) -> None:
        self._for_loss, self._for_output = map(set, after)
        self._run_dry = run_dry
        self._known: dict[Any, Needs] = {}

    def of(self, call: Call, run: DryRun, results: Results, trains: bool) -> Needs:
        """Returns what a call needs whose dry run is ``run``, with these ``results``. All ranks find the same.

        Raises ConfigError if a block gets what a block returned that is not the one right before it.
        """
        own = {id(tensor): result for result, tensor in results.items()}
        # Which block gets what may depend on values, too, such as the number of a task.
        gets = tuple([own.get(id(each), isinstance(each, Tensor)) for each in _others(run)])
        key = trains, call.is_whole, call.signature, tuple(results), tuple(run.entries), run.places, gets
        if key not in self._known:
            for_blocks, between = self._find(call)
            needed = {*(self._for_output if call.is_whole else self._for_loss), *for_blocks}
            self._known[key] = Needs(tuple(result for result in results if result in needed), between, run.places)
        return self._known[key]

    def add(self, for_loss: Collection[Result], for_output: Collection[Result]) -> None:
        """Lets more results travel in later calls."""
        self._for_loss.update(for_loss)
        self._for_output.update(for_output)

    @torch.no_grad()
    def _find(self, call: Call) -> tuple[list[Result], frozenset[int]]:
        """Finds what travels to blocks, and before which blocks the forward computes.

        A result travels if a block gets something else once the result has other numbers, or if autograd's graph leads
        to it from what a block gets. Graphs do not lead to masks, and numbers do not show what a mask of this call
        leaves out. The forward computes before a block that gets something else once the block before it has returned
        other hidden states, or that gets other hidden states than these.
        """

        def entering(given: Mapping[Result, Tensor], changed: Collection[int] = ()) -> list[Any]:
            """Returns what enters every block, with other hidden states after the blocks ``changed``."""
            run, _ = self._run_dry(call, given, lambda index, hidden: _filled(hidden, index, index in changed))
            return [(run.entries.get(index), block) for index, block in enumerate(run.blocks)]

        run, zeros = self._run_dry(call, NONE, _filled_by_index)
        given = {result: numbers_like(tensor) for result, tensor in zeros.items()}
        expected, blocks = entering(given), range(len(run.blocks))
        between = set(run.entries)
        if not is_alike(expected, entering(given, blocks)):
            for changed in blocks:
                found = [*map(is_alike, expected, entering(given, [changed]))]
                if not all(found[changed + 2 :]):
                    raise ConfigError(EARLIER)
                between |= {index for index, alike in enumerate(found) if not alike}
        connected = self._connected(call, zeros)
        replaced = {result: {**given, result: other_numbers_like(tensor)} for result, tensor in given.items()}
        travels = [
            result for result, each in replaced.items() if result in connected or not is_alike(expected, entering(each))
        ]
        return travels, frozenset(between)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _connected(self, call: Call, like: Mapping[Result, Tensor]) -> set[Result]:
        """Returns the results to which autograd's graph leads from what blocks get, by their shapes."""
        # Graphs keep no tensors of inference mode.
        call = call.with_arguments(*tree_map_only(Tensor, Tensor.clone, (call.positional, call.named)))
        given = random_results(like)
        # This may run inside a chunk's forward, but not inside its recomputation. Both must save the same tensors.
        with saved_tensors_hooks(_as_it_is, _as_it_is):
            return uses(self._run_dry(call, given, _filled_by_index)[0], given)


def uses(run: DryRun, results: Mapping[Result, Tensor]) -> set[Result]:
    """Returns the results to which autograd's graph leads from what blocks get."""
    if not torch.is_grad_enabled():
        return set()
    given = (*run.entries.values(), *_others(run))
    tensors = [
        each for each in given if isinstance(each, Tensor) and not isinstance(each, Placeholder) and each.requires_grad
    ]
    return reached(tensors, results.items())[0] if tensors else set()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _others(run: DryRun) -> Iterator[Any]:
    """Yields what blocks get besides hidden states, also in tuples and lists. Does not use pytree, which takes longer
    than all else that is done for a call."""
    for block in run.blocks:
        for each in block.values:
            if isinstance(each, list | tuple):
                yield from each
            else:
                yield each


def _filled(like: Tensor, index: int, changed: bool) -> Tensor:
    """Returns random hidden states after block ``index``, or other ones if they are ``changed``. Every block has its
    own, because the next one may get the difference between the hidden states after two blocks."""
    return other_numbers_like(like) * (1 + index) if changed else random_like(like, 3 + index)


def _filled_by_index(index: int, like: Tensor) -> Tensor:
    return _filled(like, index, False)
