"""The small forwards that survey a model and compare it with its layers: their arguments, what blocks show, and checks
that what parts compute depends on nothing that other ranks lack. All parameters are here except those of blocks."""

import operator
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from functools import partial
from inspect import Parameter, signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.call import Arguments, BlockArguments, Call, DryRun, Returned, Survey
from ds_lgamp.integrations.split.forward import SplitForward
from ds_lgamp.integrations.split.imagined import Imagined, UnknownShape, is_imagined
from ds_lgamp.integrations.split.parts import Attribute, ByproductRecorder, Result, kind_of, model_of, restored_modes
from ds_lgamp.integrations.split.stand_ins import Placeholder, PlaceholderUsed, Results
from ds_lgamp.integrations.split.state import Buffers, Snapshot
from ds_lgamp.integrations.split.travelling import (
    Uses,
    is_alike,
    numbers_like,
    other_numbers_like,
    random_results,
    reached,
)

_TENSOR = {"shape", "dtype"}
"""The keys of an object that describes a tensor."""
_LABELS = ("label", "labels", "target", "targets", "y")
_DEPENDS = (
    "depends on random numbers that its forward draws before the blocks, on values of modules there, or on what an "
    f"earlier call left, but with a {BLOCK} block that code runs several times; give the engine random numbers as "
    "arguments, and compute masks from arguments"
)


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


@torch.no_grad()
def results_after(split: SplitForward, shown: Survey) -> tuple[set[Result], set[Result]]:
    """Returns the results of parts before the blocks with whose numbers the loss changes other than through hidden
    states, and the results with which any output changes: autograd's graph does not lead to detached ones. Where only
    the loss counts, so do outputs that depend on hidden states, as the loss does."""
    call = Call(*shown.arguments, shown.shapes_before)
    run, zeros = split.dry_run_without_parts(call)
    given = {result: numbers_like(tensor) for result, tensor in zeros.items()}

    def output(given: Mapping[Result, Tensor], hidden: Tensor) -> list[Any]:
        with split.original.undisturbed(), split.parts_before.absent(call.shapes, given):
            return tree_leaves(split.output(call, hidden.clone))

    hidden = numbers_like(run.hidden)
    expected = output(given, hidden)
    if is_imagined(expected):
        return set(), set()

    def differ(given: Mapping[Result, Tensor], hidden: Tensor) -> list[bool]:
        return [not is_alike(*pair) for pair in zip(expected, output(given, hidden), strict=True)]

    changed = {result: differ({**given, result: other_numbers_like(given[result])}, hidden) for result in given}
    of_loss = differ(given, other_numbers_like(hidden)) if split.loss_in is not None else [True] * len(expected)
    for_loss = {result for result, leaves in changed.items() if any(map(operator.and_, leaves, of_loss))}
    return for_loss, {result for result, leaves in changed.items() if any(leaves)}


def check_travels(split: SplitForward, shown: Survey) -> None:
    """Raises ConfigError if the forward gets what travels otherwise than from the parts that return it, such as from a
    hook: autograd's graph does not lead there. Numbers show less: a last layer may begin with zeros."""
    call = Call(*shown.arguments, shown.shapes_before, is_whole=True)
    with torch.no_grad():
        run, zeros = split.dry_run_without_parts(call)
    missing = shown.travels_to_blocks.difference(split.needs_of(call).travels)
    if shown.travels_to_output:
        hidden = numbers_like(run.hidden)
        with torch.enable_grad(), split.original.undisturbed():
            given = random_results(zeros)
            with split.parts_before.absent(call.shapes, given):
                output = split.output(call, hidden.clone)
        # A hook of a part may have kept what the part would return.
        missing |= shown.travels_to_output.difference(() if is_imagined(output) else reached(output, given.items())[0])
    for result in missing:
        raise ConfigError(
            f"the forward of the model uses what '{result.path}' returned besides hidden states, but gets it from a "
            f"hook or an attribute; with a {BLOCK} block, pass it on in the forward, or write the model as a "
            "PipelineModule"
        )


@torch.no_grad()
def check_parts(split: SplitForward, shown: Survey, largest: int) -> None:
    """Runs the parts of the forward again without the modules before the blocks, and with other random numbers there.
    Raises ConfigError if that makes a difference besides the hidden states that enter the first block: with the
    arguments of the small forward, or with others up to ``largest``, because zeros stay zeros whatever drops them."""
    with split.original.undisturbed():
        _run_again(split, *_run_once(split, shown, shown.arguments))
        *_, ways = others(shown.arguments, largest)
        for arguments in ways:
            try:
                once = _run_once(split, shown, arguments)
            except Exception:
                # The model need not take what nobody has given.
                continue
            return _run_again(split, *once)


def _run_once(split: SplitForward, shown: Survey, arguments: Arguments) -> tuple[Call, DryRun, Results, Any]:
    """Returns the call with these arguments, what its dry run shows, the results that travel, and the output."""
    call = Call(*arguments, shown.shapes_before, is_whole=True)
    split.original.seed(1)
    run, results = split.dry_run(call)
    given = {result: results.take(result) for result in split.needs_of(call).travels}
    return call, run, given, split.output(call, partial(_hidden_after, split, run))


def _hidden_after(split: SplitForward, run: DryRun) -> Tensor:
    # After the blocks, numbers are drawn once.
    split.original.seed(0)
    return run.hidden.clone()


def _run_again(split: SplitForward, call: Call, run: DryRun, given: Results, output: Any) -> None:
    """Raises ConfigError if another run has another output, or other arguments of blocks."""
    original, needs = split.original, split.needs_of(call)
    if is_imagined(output):
        return

    def entering(number: int) -> list[Any]:
        """Returns what blocks get before which their layers compute. Only what is drawn before the first block depends
        on ``number``."""

        def fill(_: int, hidden: Tensor) -> Tensor:
            original.seed(0)
            return numbers_like(hidden)

        original.seed(number)
        run, _ = split.dry_run_without_parts(call, given, fill)
        return [(run.entries.get(index), run.blocks[index]) for index in sorted(needs.between)]

    # A loss is one number, which may be almost the same by chance.
    for number in (2, 3):
        original.seed(number)
        # Otherwise no rank without these modules computes what blocks get.
        if original.on_several_ranks or given:
            again, _ = split.dry_run_without_parts(call, given)
            for index, pair in enumerate(zip(run.blocks, again.blocks, strict=True)):
                if index not in needs.between and not is_alike(*pair):
                    raise ConfigError(f"what blocks get besides hidden states {_DEPENDS}")
        if needs.between and not is_alike(entering(1), entering(number)):
            raise ConfigError(f"what blocks get {_DEPENDS}")
        original.seed(number)
        with split.parts_before.absent(call.shapes, given):
            if not is_alike(output, split.output(call, partial(_hidden_after, split, run))):
                raise ConfigError(f"what the model returns {_DEPENDS}")


def check_foreign(split: SplitForward, shown: Survey) -> None:
    """Raises ConfigError if a block computes with a parameter of another module, or with a tensor that the forward made
    outside of the block and did not pass to it. Works for models too large to compute: blocks run with imagined tensors
    for their arguments, parameters and buffers, so a real tensor has come another way. A block that cannot be imagined
    is not checked."""
    call, parameters = Call(*shown.arguments), [*split.original.model.named_parameters()]
    with split.original.undisturbed():
        with torch.no_grad(), _NewTensors() as new:
            run, _ = split.dry_run(call)
        hidden = run.hidden
        for index, (block, others) in enumerate(zip(split.blocks, run.blocks, strict=True)):
            hidden = run.entries.get(index, hidden)
            assert others.autocast is not None, "found with the arguments"
            foreign: list[Tensor] = []
            # It may keep its own beside where they are replaced, as recurrent modules do.
            own = {id(parameter) for parameter in block.parameters()}
            elsewhere = {id(parameter): name for name, parameter in parameters if id(parameter) not in own}

            def use(tensor: Tensor, foreign: list[Tensor] = foreign, elsewhere: Container[int] = elsewhere) -> None:
                if not isinstance(tensor, FakeTensor) and (tensor in new or id(tensor) in elsewhere):
                    foreign.append(tensor)

            with suppress(UnknownShape, PlaceholderUsed):
                # The block's own tensors are copies, so that none of them counts as made outside.
                positional, named, attributes = tree_map_only(
                    Tensor, torch.clone, (others.after(hidden), dict(others.named), dict(others.attributes))
                )
                split.attributes.set(index, attributes)
                with others.autocast.entered(), Uses(use):
                    Imagined(block)(positional, named)
            for name in filter(None, map(elsewhere.get, map(id, foreign))):
                raise ConfigError(
                    f"block {index} computes with parameter '{name}', which the model holds elsewhere, and which would "
                    f"get no gradient from there; with a {BLOCK} block, make it a part of that block alone"
                )
            if foreign:
                raise ConfigError(
                    f"block {index} computes with a tensor of shape {[*foreign[-1].shape]} that the forward of the "
                    "model made and did not give it as an argument, but left in a global, a context variable, a "
                    f"closure, or an attribute of another object; with a {BLOCK} block, pass it as an argument"
                )


class _NewTensors(TorchDispatchMode):
    """Collects all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, Tensor] = {}
        """One by storage. While they live, no other one gets it."""

    def __torch_dispatch__(self, function: Any, types: Any, positional: Any = (), named: Any = None) -> Any:
        result = function(*positional, **(named or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._tensors.setdefault(leaf.untyped_storage()._cdata, leaf)
        return result

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._tensors
