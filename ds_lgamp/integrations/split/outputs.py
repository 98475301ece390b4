"""Which outputs of the model there are on the rank of the last layer, which the script gets, and which are computed in
pieces."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_unflatten

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.parts import Part, Result, parameters_of
from ds_lgamp.integrations.split.stand_ins import Leaves, Results, StandIns
from ds_lgamp.integrations.split.travelling import is_alike, other_numbers_like, walk
from ds_lgamp.runtime.logits import deferred
from ds_lgamp.runtime.pieces import Head


class MissingOutput(ConfigError, AttributeError):
    """An output that the script does not get. An AttributeError too, so that ``hasattr`` says no."""


class NotInTraining(MissingOutput):
    """An output that stays on the rank that computed it."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"with {BLOCK}.outputs 'loss' the output of a training step has only {what}, which "
            "label_smoothing_factor, compute_loss_func, trl's trainers, similar losses and metrics of training batches "
            "need; set it to 'all', or leave the metric out"
        )


class NotReturned:
    """Stands in for a tensor that stays on the rank that computed it. Whatever uses it raises MissingOutput."""

    @staticmethod
    def _refusal() -> MissingOutput:
        return NotInTraining("the loss, not its other tensors")

    def __getattr__(self, name: str) -> NoReturn:
        raise self._refusal()

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        raise cls._refusal()


class NotComputed(NotReturned):
    """Stands in for a tensor that the last layer could not compute."""

    @staticmethod
    def _refusal() -> MissingOutput:
        return MissingOutput(
            "this output of the model depends on more than its last layer has in a call unlike the dummy inputs; set "
            f"{BLOCK}.dummy_inputs to arguments such as this call's"
        )


class Reduced(NotReturned):
    """Stands in for a by-product of a block of which only a sum has reached the last layer."""

    @staticmethod
    def _refusal() -> MissingOutput:
        return MissingOutput(
            f"with a {BLOCK} block router_logits stay on the ranks of their blocks in training, because the model's "
            "loss needs sums of them only; read aux_loss, or read them in evaluation, or set router_aux_loss_coef to 0 "
            "in the model's config if the script computes that loss"
        )


Run = Callable[[Mapping[Result, Tensor], Leaves | None], tuple[Any, Results]]
"""Computes the output once more, with the results that are given. With lists for leaves, what the last layer lacks
depends on them. Returns all results, too."""


def without(output: Any, lacking: Collection[int]) -> Any:
    """Returns the ``output`` with :class:`NotComputed` at the places ``lacking``."""
    values, structure = tree_flatten(output)
    return tree_unflatten([NotComputed() if place in lacking else each for place, each in enumerate(values)], structure)


def lacking_outputs(outputs: list[Any], leaves: Leaves, run: Run) -> frozenset[int]:
    """Returns the places in ``outputs`` of tensors that the last layer cannot compute: autograd's graph leads from them
    to ``leaves``, or they are others with other numbers there. Graphs do not show what is detached, nor numbers what
    the model multiplies with zeros that are trained later. ``leaves`` has a list for every part that it lacks."""
    with torch.enable_grad():
        connected, zeros = run({}, leaves)
        made = {id(leaf) for each in leaves.values() for leaf in each}
        of_graph = [any(id(leaf) in made for leaf in walk(each, ())[1]) for each in tree_leaves(connected)]
    changed, _ = run({result: other_numbers_like(tensor.detach()) for result, tensor in zeros.items()}, None)
    others = [not is_alike(*pair) for pair in zip(outputs, tree_leaves(changed), strict=True)]
    return frozenset(place for place, found in enumerate(zip(of_graph, others, strict=True)) if any(found))


class LossGraph:
    """Checks the graph of a loss or of all outputs, once for every signature of a call, because the model may compute
    more with labels than without them."""

    def __init__(self, model: nn.Module, parts: Collection[Part]) -> None:
        own = {id(parameter) for parameter in parameters_of(parts)}
        self._foreign = {id(each): name for name, each in model.named_parameters() if id(each) not in own}
        """The names of the parameters that the last layer lacks, by their ids."""
        self.checked: set[Any] = set()
        """The signatures of the calls whose graph is checked."""

    def check(self, signature: Any, roots: Any, inputs: Collection[Any], zeros: Leaves) -> None:
        """Raises ConfigError if a tensor in ``roots`` depends on a parameter that the last layer lacks, or on zeros.

        Follows nodes only: where the forward is recomputed, gradients cannot be computed inside it.

        Args:
            signature: that of the call.
            roots: the loss, or all outputs.
            inputs: the nodes that made what the last layer got, or take its gradients.
            zeros: the leaves on which the results of each stand-in depend.
        """
        if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(roots)):
            return
        makers = {id(leaf): path for path, leaves in zeros.items() for leaf in leaves}
        for leaf in walk(roots, inputs)[1]:
            if (name := self._foreign.get(id(leaf))) is not None:
                raise ConfigError(
                    f"after the blocks the model's output depends on parameter '{name}', which the last layer lacks; "
                    f"{_FIX}"
                )
            if (path := makers.get(id(leaf))) is not None:
                raise ConfigError(
                    f"after the blocks the model's output depends on what '{path}' returned before them; {_FIX}"
                )
        self.checked.add(signature)


_FIX = (
    f"set {BLOCK}.dummy_inputs to arguments such as the script's, else leave that term out of the forward, or write "
    "the model as a PipelineModule"
)


def heads_in(parts: Mapping[str, Part]) -> Iterator[nn.Module]:
    """Yields the modules in ``parts`` that may be a head, without those inside one of them."""
    inside: set[nn.Module] = set()
    for part in parts.values():
        for module in part.modules() if isinstance(part, nn.Module) else ():
            if module not in inside and works_by_rows(module):
                inside.update(module.modules())
                yield module


def deferring(module: nn.Module, loss_chunk: int | str | None) -> StandIns:
    """Returns the stand-in for the forward of a layer after the blocks, with its place, if it may be the head. Its
    result is then computed in pieces of rows, where the loss is. Hooks of the layer run as always."""
    if not works_by_rows(module):
        return []
    stock: Callable[..., Any] = module.forward
    matrix = module.weight if type(module) is nn.Linear else None

    def forward(*positional: Any, **named: Any) -> Any:
        logits = None
        if not named and len(positional) == 1:
            head = Head.of(stock, module.parameters(), positional[0].device, matrix)
            logits = deferred(head, positional[0], loss_chunk)
        return stock(*positional, **named) if logits is None else logits

    return [(vars(module), "forward", forward)]


def works_by_rows(module: nn.Module) -> bool:
    """Whether the forward of a module computes every row of its input by itself, and does nothing else: a plain linear
    layer, or one with adapters of peft that drop nothing."""
    if "forward" in vars(module) or module._backward_hooks or module._backward_pre_hooks:
        return False
    if any(_is_watched(part) for part in module.modules() if part is not module):
        return False
    kind = type(module)
    if kind is nn.Linear:
        # Pruning and weight norm compute the weight.
        return "weight" in module._parameters
    adapted: Any = module
    if (kind.__module__, kind.__name__) != ("peft.tuners.lora.layer", "Linear") or any(adapted.use_dora.values()):
        return False
    drops = any(isinstance(each, nn.Dropout) and each.p > 0 for each in module.modules())
    return not (drops and module.training) and works_by_rows(adapted.base_layer)


def _is_watched(module: nn.Module) -> bool:
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks)


def register_dataclasses(output: Any) -> None:
    """Lets torch's trees find what dataclasses in ``output`` hold, in all objects of these classes."""
    for leaf in tree_leaves(output):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            _register(type(leaf))
            register_dataclasses(leaf)


def _register(cls: Any) -> None:
    names = [field.name for field in fields(cls)]

    def flatten(value: Any) -> tuple[list[Any], None]:
        return [getattr(value, name) for name in names], None

    def unflatten(values: Any, _: None) -> Any:
        # Not by its __init__, which may compute.
        made = object.__new__(cls)
        for name, value in zip(names, values):
            object.__setattr__(made, name, value)
        return made

    register_pytree_node(cls, flatten, unflatten)
