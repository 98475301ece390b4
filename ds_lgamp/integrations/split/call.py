"""A micro-batch that a script gave to the engine: the arguments of one call of the model, what its blocks return, what
a call shows, and which attributes of blocks it sets."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import cached_property
from itertools import chain, count
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.parts import Attribute, Result, ShapesOfCalls
from ds_lgamp.integrations.split.reached import MISSING
from ds_lgamp.integrations.split.state import Snapshot, copied_containers, set_or_delete


class Autocast(NamedTuple):
    """Whether autocast is on for a type of device, and its dtype."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def on(cls, device_type: str) -> "Autocast":
        return cls(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    def entered(self) -> AbstractContextManager[None]:
        if self == self.on(self.device_type):
            return nullcontext()
        return torch.autocast(self.device_type, self.dtype, self.enabled)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and named arguments of a call of the model."""


class BlockArguments(NamedTuple):
    """What the model's forward passes to one block besides the hidden states."""

    positional: tuple[Any, ...]
    named: Mapping[str, Any]
    autocast: Autocast | None = None
    """In which it calls the block; None until a dry run finds it."""
    attributes: Mapping[Attribute, Any] = MappingProxyType({})
    """The attributes of the block that it has set."""
    records: bool = False
    """Whether the forward records by-products of the block."""
    in_tuple: bool = False
    """Whether the block gets hidden states and positional arguments in one tuple, as layers of a pipeline do."""

    def after(self, hidden: Any) -> tuple[Any, ...]:
        """Returns all positional arguments of a call of the block."""
        given = (hidden, *self.positional)
        return (given,) if self.in_tuple else given

    @property
    def values(self) -> Iterator[Any]:
        return chain(self.positional, self.named.values(), self.attributes.values())


def apart(positional: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, BlockArguments]:
    """Returns the hidden states among the arguments of a block, and the others. They are the first one, or the first
    in a tuple that is the only one, or have the name that they have in transformers."""
    if len(positional) == 1 and type(positional[0]) is tuple and positional[0] and not named:
        return positional[0][0], BlockArguments(positional[0][1:], named, in_tuple=True)
    if positional:
        return positional[0], BlockArguments(positional[1:], named)
    name = "hidden_states" if "hidden_states" in named else next(iter(named), None)
    others = {key: value for key, value in named.items() if key != name}
    return named.get(name) if name is not None else None, BlockArguments((), others)


_CONSTANTS = (type(None), bool, int, float, str)
"""Types of which a value may always be the same. Other values than tensors and these do not travel."""


class NoTensor:
    """Stands in for an object that does not travel. Whatever computes with it raises ConfigError."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"the forward of the model computes with an object that a block returned besides hidden states, but with a "
            f"{BLOCK} block only tensors travel; let the block return a tensor"
        )


def _refuse(*_: Any) -> NoReturn:
    NoTensor.__torch_function__()


for _name in "bool float int index len iter getitem contains add radd sub rsub mul rmul truediv eq ne call".split():
    setattr(NoTensor, f"__{_name}__", _refuse)


class Use(Enum):
    """What the forward of a model does with tensors that blocks return besides hidden states, after all blocks."""

    NONE = "nothing"
    RETURN = "returns them"
    COMPUTE = "computes with them"


class Returned(NamedTuple):
    """What a block returned besides hidden states."""

    leaves: Sequence[Any]
    structure: TreeSpec | None
    """How they are nested; None if the block returned a tensor only."""

    @classmethod
    def of(cls, result: Any) -> tuple[Any, "Returned"]:
        """Returns the hidden states in what a block returned, and what is beside them."""
        if not isinstance(result, tuple) or not result:
            return result, NOTHING
        return result[0], cls(*tree_flatten(result[1:]))

    def detached(self) -> "Returned":
        return self._replace(leaves=[leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves])

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def kinds(self) -> tuple[Any, ...]:
        """What must be the same of two, so that code that gets the one goes on as with the other."""
        return self.structure, *map(_kind_of_leaf, self.leaves)

    def with_tensors(self, hidden: Any, tensors: Sequence[Any]) -> Any:
        """Returns such a result of a block, with others for its ``tensors``."""
        if self.structure is None:
            return hidden
        places = count()
        leaves = [tensors[next(places)] if isinstance(leaf, Tensor) else _without_object(leaf) for leaf in self.leaves]
        return hidden, *tree_unflatten(leaves, self.structure)


NOTHING = Returned((), None)


def _kind_of_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Tensor
    return (type(leaf), leaf) if isinstance(leaf, _CONSTANTS) else NoTensor


def _without_object(leaf: Any) -> Any:
    return leaf if isinstance(leaf, _CONSTANTS) else NoTensor()


class Survey(NamedTuple):
    """What the forward of a model showed."""

    before: list[str]
    """The parts that ran before the blocks, and unused ones that the model has before them, by name."""
    after: list[str]
    """All other parts, by name."""
    returned: list[Mapping[bool, Returned]]
    """What every block returned besides hidden states, in training (True) and in evaluation (False)."""
    recorded: list[list[Tensor]]
    """What was recorded of every block."""
    use: Use
    """What the code after the blocks does with what they return besides hidden states."""
    tensor_attributes: list[Attribute]
    """The attributes of blocks that they set to tensors which depend on parameters."""
    travels_to_blocks: frozenset[Result]
    """Results of parts before the blocks on which depends what blocks get besides hidden states."""
    travels_to_loss: frozenset[Result]
    """Such results on which the loss depends other than through hidden states."""
    travels_to_output: frozenset[Result]
    """Such results on which any output depends."""
    reads_after: bool
    """Whether the forward reads, after the blocks, parameters of modules that ran before them."""
    arguments: Arguments
    """With which the forward was called."""
    output: Any
    """What it returned."""
    shapes_before: ShapesOfCalls
    """What parts before the blocks returned."""


class DryRun(NamedTuple):
    """What a forward shows in which no block computes."""

    hidden: Tensor
    """The hidden states that enter the first block."""
    blocks: list[BlockArguments]
    """What every block gets besides hidden states."""
    entries: dict[int, Tensor]
    """The hidden states that enter a block, where the block before it did not return them."""
    places: tuple[tuple[int, ...], ...]
    """For every block, the places of the tensors that it gets from the block before it besides hidden states."""


class Needs(NamedTuple):
    """What layers compute with besides hidden states."""

    travels: tuple[Result, ...]
    """The results of parts before the blocks that travel with hidden states, in their order."""
    between: frozenset[int]
    """The blocks before which the forward computes with what the block before them returned."""
    places: tuple[tuple[int, ...], ...]
    """As :class:`DryRun`'s."""


class Call:
    """The arguments of one call of the model, and what its blocks get on this rank.

    Args:
        positional, named: the arguments.
        shapes: what parts before the blocks return, if they have run on this rank.
        is_whole: whether the script gets the whole output, as in evaluation, and not the loss only.
    """

    def __init__(
        self,
        positional: tuple[Any, ...],
        named: Mapping[str, Any],
        shapes: ShapesOfCalls | None = None,
        is_whole: bool = False,
    ) -> None:
        self.positional, self.named, self.is_whole = positional, named, is_whole
        self.shapes: ShapesOfCalls = shapes or {}
        self.needs: Needs | None = None
        """None until a dry run finds them."""
        self.blocks: list[BlockArguments] | None = None
        """What every block gets, if nothing travels. Recomputations need it, too: rotary tables of type "dynamic" have
        grown with the lengths since."""
        self.own_state: Snapshot | None = None
        """What the model's own modules held when its forward first ran for this call; None before that."""
        self._checks_graph: bool | None = None

    @property
    def arguments(self) -> Arguments:
        return self.positional, dict(self.named)

    @cached_property
    def signature(self) -> Any:
        """What of the arguments may decide which code runs."""
        leaves = tree_leaves([*self.positional, *self.named.values()])
        return len(self.positional), tuple(self.named), *map(_kind, leaves)

    def checks_graph(self, wanted: bool) -> bool:
        """Returns what was ``wanted`` first: a recomputed forward must save the same tensors."""
        if self._checks_graph is None:
            self._checks_graph = wanted
        return self._checks_graph

    def with_arguments(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> "Call":
        """Returns a call with other arguments that counts as this one."""
        other = Call(positional, named, self.shapes, self.is_whole)
        other.own_state = self.own_state
        return other


_CHOICES = 64
"""Smaller integers may choose, such as a task. Larger ones count something, and change with every call."""


def _kind(leaf: Any) -> Any:
    """Returns what of an argument may decide which code runs. Most numbers may change with every call."""
    if isinstance(leaf, Tensor):
        return leaf.dtype
    if isinstance(leaf, int) and abs(leaf) < _CHOICES:
        return type(leaf), leaf
    if isinstance(leaf, int | float):
        return type(leaf), bool(leaf)
    return leaf if isinstance(leaf, str) else type(leaf)


class BatchCalls:
    """The micro-batches of a batch, and the one that the layers compute now."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Ends the batch."""
        self.all: list[Call] = []
        self._now = _Now()

    @property
    def number(self) -> int:
        """The micro-batch that the layers compute."""
        return self._now.number

    @property
    def current(self) -> Call:
        return self.all[self.number]

    def before_layer(self, layer: int, micro_batch: int) -> None:
        """Makes ``micro_batch`` the current one."""
        now = self._now
        if (layer, micro_batch) != (now.layer + 1, now.number):
            now.in_chunk = None
        now.layer, now.number = layer, micro_batch

    def in_chunk(self, travels: Sequence[Tensor], compute: Callable[[], list[BlockArguments]]) -> list[BlockArguments]:
        """Returns what blocks get in the current micro-batch by what ``travels`` with its hidden states. ``compute`` is
        called once for consecutive layers."""
        known = self._now.in_chunk
        if known is None or any(one is not other for one, other in zip(known[0], travels)):
            self._now.in_chunk = known = travels, compute()
        return known[1]


class SetAttributes:
    """Finds the attributes of ``blocks`` that the model's own forward sets, and their values for a micro-batch. No
    block runs while a forward sets attributes."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._modules = [dict(block.named_modules()) for block in blocks]
        self._unset: list[dict[Attribute, Any]] = [{} for _ in blocks]
        """By block: its attributes that forwards set, with the values from before the first time."""
        self._snapshots: list[Snapshot] = []

    @contextmanager
    def all_watched(self) -> Iterator[None]:
        """Watches the attributes of all modules of all blocks, in the forward that runs inside the block."""
        self._snapshots = [Snapshot(modules.values()) for modules in self._modules]
        try:
            yield
        finally:
            self._snapshots = []

    def before_write(self, index: int, name: str) -> None:
        """Called before a forward sets or deletes an attribute of block ``index`` itself."""
        self._unset[index].setdefault(Attribute("", name), vars(self._modules[index][""]).get(name, MISSING))

    def of(self, index: int) -> Mapping[Attribute, Any]:
        """Returns what the forward has set for block ``index``, which it calls now."""
        unset, modules = self._unset[index], self._modules[index]
        if self._snapshots:
            paths = {id(vars(module)): path for path, module in modules.items()}
            for holder, name, before in self._snapshots[index].changed():
                unset.setdefault(Attribute(paths[holder], name), before)
        now = {each: _holder(modules[each.path], each.name).get(each.name, MISSING) for each in unset}
        return {each: copied_containers(value) for each, value in now.items()}

    def set(self, index: int, values: Mapping[Attribute, Any]) -> None:
        """Gives the modules of block ``index`` the ``values`` that :meth:`of` returned."""
        for each, before in self._unset[index].items():
            holder = _holder(self._modules[index][each.path], each.name)
            # The next forward may write to the container that it finds there.
            set_or_delete(holder, each.name, copied_containers(values.get(each, before)))


def _holder(module: nn.Module, name: str) -> dict[str, Any]:
    """Returns the dictionary in which a module has an attribute, which may be a buffer."""
    return module._buffers if name in module._buffers else vars(module)


class _Now(threading.local):
    """What the layers compute now. Two micro-batches that compute beside each other have a thread each."""

    number = 0
    layer = 0
    in_chunk: tuple[Sequence[Tensor], list[BlockArguments]] | None = None
    """What travels through the chunk that runs, and what its blocks get. Both belong to the chunk's graph."""


def run_uncompiled(model: nn.Module, *positional: Any, **named: Any) -> Any:
    """Calls the model with its hooks, but not what torch.compile may have made of the call as a whole. It gets copies
    of containers, because it runs several times with the same arguments, to which it may write."""
    positional, named = copied_containers((positional, named))
    return model._call_impl(*positional, **named)
