"""The small forwards that survey a model and compare it with its layers: their arguments, and what blocks show."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from inspect import Parameter, signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.call import Arguments, BlockArguments, Returned
from ds_lgamp.integrations.split.parts import Attribute, ByproductRecorder, kind_of, model_of, restored_modes
from ds_lgamp.integrations.split.stand_ins import Placeholder
from ds_lgamp.integrations.split.state import Buffers, Snapshot
from ds_lgamp.integrations.split.travelling import numbers_like

_TENSOR = {"shape", "dtype"}
"""The keys of an object that describes a tensor."""
_LABELS = ("label", "labels", "target", "targets", "y")


def given_inputs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that ``dummy_inputs`` of the block describes. Raises ConfigError if it does not."""
    return {name: _value(name, value) for name, value in given.items()}


def _value(name: str, value: Any) -> Any:
    """Returns the value of an argument: a tensor for nested lists of numbers and for an object with a shape, a
    dictionary for any other object, a list for one of objects or texts."""
    if isinstance(value, Mapping) and _TENSOR.isdisjoint(value):
        return {key: _value(f"{name}.{key}", each) for key, each in value.items()}
    if isinstance(value, list) and any(isinstance(each, Mapping | str) for each in value):
        return [_value(f"{name}.{place}", each) for place, each in enumerate(value)]
    try:
        if isinstance(value, list):
            return torch.tensor(value)
        if isinstance(value, Mapping):
            shape, dtype = value["shape"], getattr(torch, value.get("dtype", "float32"))
            return torch.zeros(shape, dtype=dtype)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"{BLOCK}.dummy_inputs.{name} is {value!r}, which makes no tensor; give nested lists of numbers, or an "
            'object such as {"shape": [1, 3, 32, 32], "dtype": "float32"}'
        ) from None
    return value


def inputs_of(model: nn.Module) -> Arguments:
    """Returns the model's own ``dummy_inputs``. If it has none, what it makes of a text by its tokenizer, as models of
    sentence-transformers do; else token ids for the first parameter of its forward, for parameters without a default,
    and for labels."""
    model = model_of(model)
    own = getattr(model, "dummy_inputs", None)
    if own is not None:
        return (), dict(own)
    if (features := _tokenized(model)) is not None:
        return (features,), {}
    positional: list[Tensor] = []
    named: dict[str, Tensor] = {}
    parameters = list(signature(model.forward).parameters.values())
    takes_any = any(each.kind is Parameter.VAR_POSITIONAL for each in parameters)
    for number, parameter in enumerate(parameters):
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL):
            positional.append(tokens)
        elif takes_any and parameter.kind is Parameter.POSITIONAL_OR_KEYWORD:
            # What follows by position takes its place otherwise.
            positional.append(tokens)
        elif parameter.kind is Parameter.VAR_KEYWORD:
            continue
        elif number == 0 or parameter.default is Parameter.empty or parameter.name in _LABELS:
            named[parameter.name] = tokens
    return tuple(positional), named


def _tokenized(model: Any) -> Mapping[str, Any] | None:
    """Returns what the model's own method makes of a list of texts; None if it has no tokenizer and no such method."""
    if getattr(model, "tokenizer", None) is None:
        return None
    for name in ("preprocess", "tokenize"):
        with suppress(Exception):
            # It may mean something else by this name.
            features = getattr(model, name)(["a text"])
            if isinstance(features, Mapping) and any(isinstance(each, Tensor) for each in features.values()):
                return features
    return None


def others(arguments: Arguments, largest: int) -> Iterator[Iterator[Arguments]]:
    """Yields arguments that differ from these, first also in the number of rows or in length, then only in values. Of
    each kind, others than the first are for models that do not take that.

    Args:
        largest: a number that may be a token.
    """
    few = min(largest, 1)
    found = [tree_map_only(Tensor, partial(_other, largest=each), arguments) for each in dict.fromkeys([largest, few])]
    yield chain.from_iterable(map(_of_other_shape, found))
    integers = tree_map_only(Tensor, lambda each: each if each.is_floating_point() else _other(each, few), arguments)
    yield iter([*found, integers])


def _of_other_shape(arguments: Arguments) -> Iterator[Arguments]:
    """Yields arguments with twice as many rows, the first time without the last column."""
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.ndim]
    if len({leaf.shape[0] for leaf in tensors}) != 1:
        return
    longer = tree_map_only(Tensor, lambda each: torch.cat([each, each]) if each.ndim else each, arguments)
    lengths = {leaf.shape[-1] for leaf in tensors if leaf.ndim > 1 and not leaf.is_floating_point()}
    if len(lengths) == 1 and max(lengths) > 1:
        yield tree_map_only(Tensor, _shorter, longer)
    yield longer


def _shorter(tensor: Tensor) -> Tensor:
    """Returns a tensor of integers without the last column."""
    return tensor if tensor.is_floating_point() or tensor.ndim < 2 else tensor[..., :-1]


def _other(tensor: Tensor, largest: int) -> Tensor:
    """Returns a tensor of the same shape with other numbers of the same range."""
    if tensor.is_floating_point():
        return numbers_like(tensor.detach())
    if tensor.numel() == 0 or tensor.ndim == 0:
        return tensor
    low, high = (int(each) for each in tensor.to(torch.int64).aminmax())
    if low == high == 0:
        # They may be any tokens.
        places = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
        return ((places * 3 + 1) % (largest + 1)).to(tensor.dtype)
    if low == high == 1:
        # They may be a mask, which needs some ones.
        masked = tensor.clone()
        masked[..., -1] = 0
        return masked
    rolled = tensor.flatten().roll(1).view(tensor.shape)
    return rolled if not torch.equal(rolled, tensor) else tensor.flip(-1)


def in_words(arguments: Arguments) -> str:
    """Returns arguments in words, without the values of tensors."""
    positional, named = arguments
    values = {**{str(place): value for place, value in enumerate(positional)}, **named}
    shapes = tree_map_only(Tensor, lambda tensor: list(tensor.shape), values)
    return ", ".join(f"{name} {value!r}" for name, value in shapes.items())


class BlockTrials:
    """Runs the first block of every kind as the forward calls it, and tells what it shows."""

    def __init__(self, recorder: ByproductRecorder) -> None:
        self._recorder = recorder
        self.shown: dict[Any, tuple[Mapping[bool, Returned], list[Tensor]]] = {}
        """What blocks return besides hidden states, in training or not, and what is recorded of them, by kind."""
        self.attributes: list[Attribute] = []
        """What blocks set to tensors that depend on parameters."""
        self.inside: list[Tensor] = []
        """On these leaves depends what the blocks compute that ran."""

    def run(self, block: nn.Module, hidden: Any, others: BlockArguments) -> Any:
        """Runs ``block``, the first of its kind. Returns the hidden states after it."""
        self.inside += block.parameters()
        named = {name: self._entering(value) for name, value in others.named.items()}
        run = partial(block, *map(self._entering, others.after(hidden)), **named)
        with self._recorder.recording(self._recorder.records()):
            result, attributes = in_training(block, run)
        self.attributes += attributes
        training = None if result is None else Returned.of(result)[1].detached()
        with self._recorder.recording(self._recorder.records()) as recorded:
            result, returned = Returned.of(run())
        returned = returned.detached()
        self.shown[kind_of(block)] = {False: returned, True: training or returned}, [*map(Tensor.detach, recorded)]
        return result

    def _entering(self, given: Any) -> Any:
        """Returns an argument of a block, with tensors of the same numbers on which all depends that the block
        computes. Lists and dictionaries stay, to which it may write."""
        if type(given) is tuple:
            return tuple(map(self._entering, given))
        if not isinstance(given, Tensor) or isinstance(given, Placeholder) or not given.is_floating_point():
            return given
        self.inside.append(given.detach().requires_grad_())
        # Blocks may change it in place, which is forbidden with a leaf.
        return self.inside[-1].clone()


def in_training(block: nn.Module, call: Callable[[], Any]) -> tuple[Any, list[Attribute]]:
    """Returns what the ``call`` of a ``block`` returns in training, None if it fails, and the attributes that it sets
    there to tensors that depend on parameters, such as the balancing loss of experts. Afterwards they have their old
    values again."""
    before, found, result = Snapshot(block.modules()), [], None
    paths = {id(vars(module)): (path, vars(module)) for path, module in block.named_modules()}
    with restored_modes(block), Buffers(block.named_modules()).restored(), suppress(Exception):
        block.train()
        # Training may need more than the dummy inputs have, such as several rows for BatchNorm.
        result = call()
    for holder, name, _ in before.changed():
        path, attributes = paths[holder]
        value = attributes.get(name)
        if isinstance(value, Tensor) and value.requires_grad:
            found.append(Attribute(path, name))
    before.restore()
    return result, found
