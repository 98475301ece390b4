"""Stand-ins for parts of a model while its forward runs.

A stand-in has the parameters, buffers and modules of the module whose place it takes. So code that iterates over those
of the model finds the model's own.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.call import Arguments, BlockArguments, SetAttributes, apart
from ds_lgamp.integrations.split.imagined import Imagined, Shape, UnknownShape, shapes_in
from ds_lgamp.integrations.split.parts import Blocks, Part, Result, ShapesOfCalls, full_shape, place_of
from ds_lgamp.integrations.split.reached import MISSING
from ds_lgamp.integrations.split.state import set_or_delete, version_of


class StandIn(nn.Module):
    """Stands in for a module of the model, and has its attributes, which forwards ask for."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # Not registered: it belongs to the model.
        self.__dict__["_own"] = module
        del self.training
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_own"], name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """That of the module. A forward may call blocks of several classes in different ways."""
        return self.__dict__["_own"].__class__

    def __bool__(self) -> bool:
        return bool(self.__dict__["_own"])

    def __len__(self) -> int:
        return len(self.__dict__["_own"])


Visit = Callable[[int, Tensor, BlockArguments], Any]
"""Called in place of a block, with its number, the hidden states, and what else the block gets but attributes. Returns
what the forward gets for a result."""


class BlockStandIn(StandIn):
    """The stand-in for a block. The block itself gets the attributes that are set."""

    def __init__(self, block: nn.Module, index: int, attributes: SetAttributes, visit: Visit) -> None:
        super().__init__(block)
        self._index, self._attributes, self._visit = index, attributes, visit
        self.__dict__["_is_made"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "_is_made" in self.__dict__:
            self._attributes.before_write(self._index, name)
            setattr(self._own, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if "_is_made" in self.__dict__:
            self._attributes.before_write(self._index, name)
            delattr(self._own, name)
        else:
            super().__delattr__(name)

    def forward(self, *positional: Any, **named: Any) -> Any:
        return self._visit(self._index, *apart(positional, named))

    def _refuse_parts(self, *_: Any) -> NoReturn:
        raise ConfigError(
            f"the forward of the model takes modules out of a {self.__class__.__name__} in the list of its blocks; "
            f"with a {BLOCK} block, call that module itself, or let it be an nn.ModuleList, whose modules are blocks"
        )

    __iter__ = __getitem__ = _refuse_parts


StandIns = list[tuple[dict[str, Any], str, Any]]
"""Stand-ins, each with the dictionary of a module and its name there, which may be new."""


def stand_ins_of(blocks: Blocks, attributes: SetAttributes, visit: Visit) -> StandIns:
    """Returns a :class:`BlockStandIn` for each block."""
    return [
        (*place_of(blocks.container, name), BlockStandIn(block, index, attributes, visit))
        for index, (name, block) in enumerate(blocks.named.items())
    ]


class AbsentModule(StandIn):
    """The stand-in for a module that may be on another rank. It refuses calls."""

    def __init__(self, module: nn.Module, refuse: Callable[[], NoReturn]) -> None:
        super().__init__(module)
        self._refuse = refuse

    def forward(self, *positional: Any, **named: Any) -> Any:
        self._refuse()


class AbsentTensor(Tensor):
    """The stand-in for a tensor that may be on another rank. It refuses functions."""

    refuse: Callable[[], NoReturn]

    @classmethod
    def of(cls, refuse: Callable[[], NoReturn]) -> "AbsentTensor":
        stand_in = torch.empty(0).as_subclass(cls)
        stand_in.refuse = refuse
        return stand_in

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, positional: Any = (), named: Any = None) -> Any:
        for leaf in tree_leaves((positional, named)):
            if isinstance(leaf, cls):
                leaf.refuse()


class PlaceholderUsed(Exception):
    """A forward computes with what a block returned besides hidden states. The message is for the user."""


class Placeholder(Tensor):
    """Stands in for a tensor that a block returns besides hidden states, such as attention weights. A forward may
    collect it and give it to the next block, but not compute with it."""

    block: int
    place: int

    @classmethod
    def of(cls, block: int, place: int, like: Tensor | None = None) -> "Placeholder":
        stand_in = (torch.empty(0) if like is None else like.new_empty(0)).as_subclass(cls)
        stand_in.block, stand_in.place = block, place
        return stand_in

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, positional: Any = (), named: Any = None) -> Any:
        raise PlaceholderUsed(
            "with these arguments the forward of the model computes with what a block returned besides hidden states; "
            f"with a {BLOCK} block, set {BLOCK}.dummy_inputs to arguments with which it does, or leave that out"
        )


_NO_BLOCK = -2


_KNOWN = {"device", "dtype", "layout", "requires_grad"}
_IN_PYTHON = {f"__{name}__" for name in "bool int float complex index len iter contains array format".split()}


class Unknown(Placeholder):
    """Stands in for a by-product of a block where blocks do not compute. What is computed with it belongs to none."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, positional: Any = (), named: Any = None) -> Any:
        attribute = function.__self__.__name__ if function.__name__ == "__get__" else ""
        if attribute in _KNOWN or attribute.startswith("is_") or function.__name__ in ("__hash__", "__repr__"):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*positional, **(named or {}))
        if function.__name__ in _IN_PYTHON:
            raise PlaceholderUsed(
                "between its blocks the forward of the model needs the values or the shape of what a block returned "
                f"besides hidden states, which other ranks lack; with a {BLOCK} block, compute that in the block, or "
                "after all blocks"
            )
        return cls.of(_NO_BLOCK, 0)

    @property
    def values(self) -> Any:
        """As of the tuples that ``max`` and ``topk`` return."""
        return self.of(_NO_BLOCK, 0)

    indices = values


@contextmanager
def replacing(stand_ins: StandIns) -> Iterator[None]:
    """Runs ``stand_ins`` inside the block."""
    own = [registry.get(name, MISSING) for registry, name, _ in stand_ins]
    for registry, name, stand_in in stand_ins:
        registry[name] = stand_in
    try:
        yield
    finally:
        for (registry, name, _), part in zip(stand_ins, own):
            set_or_delete(registry, name, part)


def watch_calls(
    module: nn.Module, starts: Callable[[], None], ends: Callable[[Any, Arguments], Any], undo: ExitStack
) -> None:
    """Until ``undo`` is closed, every call of a module first calls ``starts``, and then ``ends`` with its result and
    arguments. What that returns takes the place of the result, unless it is None."""
    undo.callback(module.register_forward_pre_hook(lambda *_: starts()).remove)
    ended = module.register_forward_hook(
        lambda _, positional, named, result: ends(result, (positional, named)), with_kwargs=True
    )
    undo.callback(ended.remove)


_UNKNOWN = (
    "what module '{}' before the blocks returns cannot be known on pipeline ranks that lack it ({}); with a "
    f"{BLOCK} block, let it look at the values of no tensors but integers among the arguments, or set pipeline_ranks "
    "to 1"
)
Results = dict[Result, Tensor]
NONE: Mapping[Result, Tensor] = {}
Leaves = dict[str, list[Tensor]]
"""Leaves of autograd's graph, by the name of the part whose results depend on them."""


class PartsBefore:
    """The parts before the blocks.

    Args:
        model: the model.
        parts: they may be on another rank, by their names in the model.
        starts: called with the name of a part before every call of its stand-in.
    """

    def __init__(self, model: nn.Module, parts: Mapping[str, Part], starts: Callable[[str], None]) -> None:
        self._model, self._parts, self._starts = model, parts, starts
        self._stand_ins = {path: _Imitation(part) for path, part in parts.items() if isinstance(part, nn.Module)}
        parameters = {path: part for path, part in parts.items() if isinstance(part, nn.Parameter)}
        self._parameters = {path: (part, full_shape(part)) for path, part in parameters.items()}

    @contextmanager
    def present(self) -> Iterator["PartResults"]:
        """Yields what the parts return inside the block."""
        results = PartResults()
        with ExitStack() as stack:
            for path, part in self._parts.items():
                if isinstance(part, nn.Parameter):
                    results.add(path, part)
                else:
                    watch_calls(part, partial(results.starts, path), partial(results.add, path), stack)
            yield results

    def no_leaves(self) -> Leaves:
        return {path: [] for path in self._parts}

    @contextmanager
    def absent(
        self, known: ShapesOfCalls, given: Mapping[Result, Tensor] = NONE, leaves: Leaves | None = None
    ) -> Iterator[Results]:
        """Runs stand-ins for the parts inside the block, and yields what they return.

        Args:
            known: what the parts have returned where they are. All else is imagined.
            given: the results that have numbers. All others are zeros.
            leaves: if given, zeros of a part depend on leaves that are entered under its name.

        Raises ConfigError inside the block if it cannot be imagined what a part returns.
        """
        results: Results = {}
        calls: Counter[str] = Counter()

        def returned(path: str, shapes: Any, arguments: Any = ()) -> Any:
            numbers, call = count(), calls[path]
            calls[path] += 1

            def tensor(shape: Shape) -> Tensor:
                if shape.given is not None:
                    return tree_leaves(arguments)[shape.given]
                if not shape.dtype.is_floating_point:
                    return zeros_like(shape, None)
                result = Result(path, call, next(numbers))
                known = given.get(result)
                results[result] = (
                    zeros_like(shape, None if leaves is None else leaves[path]) if known is None else known
                )
                return results[result]

            return tree_map_only(Shape, tensor, shapes)

        def called(path: str, arguments: Arguments, imagine: Callable[[], Any]) -> Any:
            self._starts(path)
            call = path, calls[path]
            try:
                return returned(path, known[call] if call in known else imagine(), arguments)
            except UnknownShape as error:
                raise ConfigError(_UNKNOWN.format(path, error)) from error

        for path, stand_in in self._stand_ins.items():
            stand_in.returned = partial(called, path)
        # Parameters may have another dtype by now.
        parameters = {path: returned(path, Shape(*each)) for path, each in self._parameters.items()}
        stand_ins = [(*place_of(self._model, path), each) for path, each in {**self._stand_ins, **parameters}.items()]
        try:
            with replacing(stand_ins):
                yield results
        finally:
            # They must not keep what was given alive.
            for stand_in in self._stand_ins.values():
                del stand_in.returned


class PartResults:
    """What parts return in a forward."""

    def __init__(self) -> None:
        self.tensors: Results = {}
        self.shapes: dict[tuple[str, int], Any] = {}
        self._versions: dict[Result, int] = {}
        self._calls: Counter[str] = Counter()
        self._running: str | None = None
        """The part that the forward has called."""

    def starts(self, path: str) -> None:
        self._running = self._running or path

    def add(self, path: str, returned: Any, arguments: Any = ()) -> None:
        if self._running not in (None, path):
            # Another part has called it, which is absent elsewhere.
            return
        self._running = None
        self.shapes[path, self._calls[path]] = shapes_in(returned, arguments)
        tensors = (leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        for number, tensor in enumerate(tensors):
            result = Result(path, self._calls[path], number)
            self.tensors[result], self._versions[result] = tensor, version_of(tensor)
        self._calls[path] += 1

    def take(self, result: Result) -> Tensor:
        """Returns a result. Raises ConfigError if the forward has changed it since."""
        tensor = self.tensors[result]
        if version_of(tensor) != self._versions[result]:
            raise ConfigError(
                f"the forward of the model changes in place what '{result.path}' returned, and uses it besides hidden "
                f"states; with a {BLOCK} block, compute a new tensor there"
            )
        return tensor


class _Imitation(StandIn):
    """The stand-in for a module of which the results are known, at least in shape."""

    returned: Callable[[Arguments, Callable[[], Any]], Any]
    """Returns the results for arguments. It may call what it gets besides them, which returns what the module would
    return, or raises UnknownShape."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._imagined = Imagined(module)

    def forward(self, *positional: Any, **named: Any) -> Any:
        return self.returned((positional, named), partial(self._imagined, positional, named))


def zeros_like(like: Tensor | Shape, leaves: list[Tensor] | None) -> Tensor:
    """Returns zeros of a shape. With a list, they depend on a leaf that is entered there."""
    zeros = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    if leaves is None:
        return zeros
    leaves.append(zeros.requires_grad_())
    # Forwards may change it in place, which is forbidden with a leaf.
    return zeros.clone()
