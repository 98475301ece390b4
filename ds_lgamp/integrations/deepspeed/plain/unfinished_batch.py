"""The batch of a plain script before its step: the micro-batches that the engine has got, which the script must leave
alone, as it must the model; and how far the program has run."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial
from inspect import signature
from itertools import islice, takewhile
from operator import itemgetter
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.deepspeed.engine.data import Versions
from ds_lgamp.integrations.deepspeed.engine.training import Training
from ds_lgamp.integrations.deepspeed.plain.model_methods import is_array, is_own, mark_of, parts_of
from ds_lgamp.integrations.split.call import Arguments, BatchCalls
from ds_lgamp.integrations.split.state import (
    CONTAINERS,
    MISSING,
    OF_TORCH,
    Named,
    Variables,
    copied_containers,
    differing,
    global_names,
    has_attributes,
)
from ds_lgamp.integrations.transformers.models import whole_to_layers
from ds_lgamp.partition.agreement import raise_everywhere
from ds_lgamp.runtime.batch import BatchState
from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.schedule.orders import chunks_of
from ds_lgamp.schedule.placement import Placement


class UnfinishedBatch:
    """The micro-batches of a batch that is not complete yet: copies of lists and dictionaries, and tensors and other
    objects by reference. So the script must leave these alone, and the ``model`` as it is."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[Arguments] = []
        self._versions, self._settings = Versions(), ModelSettings(model)
        self._objects: list[tuple[int, Any, dict[str, Any]]] = []
        """Other objects among the arguments, each with the number of its micro-batch and a copy of its attributes."""
        self._changed: tuple[str, int] | None = None
        """What of the model was changed, and after which micro-batch; None if nothing was."""
        self.is_read = False
        """Whether the script has evaluated the model inside the batch, or has read its state, here or, as far as is
        known, on another rank."""

    def add(self, call: Arguments) -> Arguments:
        """Adds a micro-batch. Returns its copy."""
        if self.calls:
            self._compare_settings()
        else:
            self._settings.begin()
        call = copied_containers(call)
        objects = (leaf for leaf in tree_leaves(call) if has_attributes(leaf))
        self._objects += [(len(self.calls), each, dict(vars(each))) for each in objects]
        self.calls.append(call)
        self._versions.add(call)
        return call

    def computed(self) -> None:
        """Called once the model has computed all micro-batches so far. It may have changed its own attributes."""
        self._settings.remember()

    def refuse_early_reading(self) -> None:
        """Called once forwards that were put off have run. Raises ConfigError if the script should have read inside the
        batch what they changed. Collective over all ranks, which know of each other's :attr:`is_read`."""
        if not self.is_read:
            return
        complaint = None
        if (what := self._settings.changed()) is not None:
            complaint = (
                f"{what} changed by forwards in training, which a {BLOCK} block computes when the batch is complete, "
                "but the model was evaluated, or its state read, inside the batch; do so between batches"
            )
        raise_everywhere(complaint, ConfigError)

    def clear(self) -> None:
        for each in (self.calls, self._versions, self._objects):
            each.clear()
        self._changed, self.is_read = None, False

    def check(self) -> None:
        """Raises ConfigError if a tensor or another object was changed since it was given, or if the model is another
        than it was."""
        changed = self._versions.changed()
        if changed is None:
            changed = next((number for number, each, before in self._objects if differing(vars(each), before)), None)
        if changed is not None:
            raise ConfigError(
                f"micro-batch {changed} of {len(self.calls)} was changed after engine(...) got it, but a {BLOCK} "
                "block computes with it until the batch is complete; give the engine new tensors"
            )
        if self.calls:
            self._compare_settings()
        if self._changed is not None:
            what, number = self._changed
            raise ConfigError(
                f"{what} changed after micro-batch {number} of {len(self.calls)} was given to engine(...), but a "
                f"{BLOCK} block computes with the model until the batch is complete; switch adapters and modes, "
                "freeze, and set attributes between batches"
            )

    def _compare_settings(self) -> None:
        if self._changed is None and (what := self._settings.changed()) is not None:
            self._changed = what, len(self.calls) - 1


class OpenBatch:
    """A batch whose program has begun. The program may change after what has run."""

    def __init__(self, training: Training, state: BatchState, calls: BatchCalls) -> None:
        self.state = state
        self._training, self._executor, self._calls = training, training.executor, calls
        self._measuring = ExitStack()
        # A batch that fails never leaves it.
        self._measuring.enter_context(training.monitored())

    def run_up_to(self, kind: Kind) -> None:
        """Executes the next actions, without the first one of ``kind``."""
        executor = self._executor
        last_compute = _last_compute(executor.placement, self.state.first_trained, executor.rank)
        with self._training.restoring_random_states(), whole_to_layers(), executor.run_batch(self.state):
            for action in takewhile(lambda action: action.kind is not kind, self._rest()):
                executor.execute(action)
                if action[:2] == last_compute:
                    # Masks of long sequences are large.
                    self._calls.all[action.micro_batch].blocks = None

    def run_next(self) -> None:
        """Executes the next action."""
        with self._executor.run_batch(self.state):
            self._executor.execute(next(self._rest()))

    def run_to_the_end(self) -> None:
        """Executes all that is left."""
        with self._measuring, self._executor.run_batch(self.state):
            self._executor.run(self._rest())

    def _rest(self) -> Iterator[Action]:
        """Returns the actions of which none has run."""
        return islice(self.state.program, self.state.row + 1, None)


def _last_compute(placement: Placement, first_trained: int, rank: int) -> tuple[Kind, int]:
    """Returns with which compute, of which chunk, a rank is done with a micro-batch."""
    own = chunks_of(placement, rank)
    trained = [chunk for chunk in own if chunk >= first_trained]
    return (Kind.BACKWARD, trained[0]) if trained else (Kind.FORWARD, own[-1])


_MODES, _OTHERS = "the modes or frozen parameters of the model were", "an attribute of the model was"


class ModelSettings:
    """What of a ``model`` a script may change between two calls: modes, frozen parameters, buffers, and what lies in
    attributes or globals, such as a temperature or a rate of dropout. Values may be replaced by equal ones."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []
        self._watched: list[Named] = []
        self._getters: list[tuple[Any, Any]] = []
        """What reads the watched values, and where."""
        self._holders: list[Any] = []
        """Dictionaries in which new values count, too."""
        self._sizes: list[int] = []
        self._containers: list[Any] = []
        self._tensors: list[Any] = []
        """And arrays."""
        self._words: list[str] = []
        """What to say of each value that :meth:`_read` returns, but the first ones and the last."""
        self._state: list[Any] = []

    def begin(self) -> None:
        """Remembers the settings as a batch begins."""
        modules = list(self._model.modules())
        if modules != self._modules or self._sizes != [*map(len, self._holders)]:
            self._modules = modules
            self._watch()
        self._parameters = list(self._model.parameters())
        self.remember()

    def remember(self) -> None:
        self._state = self._read()

    def changed(self) -> str | None:
        """Returns in words what has changed since they were remembered; None if nothing has."""
        now = self._read()
        if _is_same(now, self._state):
            return None
        words = [_MODES for _ in self._parameters] + self._words
        return next((each for each, *pair in zip(words, now, self._state) if not _is_same(*pair)), _OTHERS)

    def _watch(self) -> None:
        objects = {id(each): each for module in self._modules for each in vars(module).values() if has_attributes(each)}
        parts: list[Any] = [
            each for module in self._modules for each in (module._buffers, module._modules) if _holds(each)
        ]
        self._holders = [*map(vars, self._modules), *map(vars, objects.values()), *parts]
        self._sizes = [*map(len, self._holders)]
        own = [Named(vars(each), [*_names(each)]) for each in (*self._modules, *objects.values())]
        reached = Reached(self._modules, self._model.parameters())
        others = [*(Named(each, [*each]) for each in parts), *reached.named()]
        self._watched = [each for each in (*own, *others) if each.names]
        # The first name twice: with a single one, an itemgetter returns no tuple.
        self._getters = [(itemgetter(names[0], *names), holder) for holder, names in self._watched]
        found = [(_said_of(name), holder[name]) for holder, names in self._watched for name in names]
        found += [(_said_of(name), value) for name, value in reached.values()]
        containers = [each for each in found if type(each[1]) in CONTAINERS]
        tensors = [each for each in found if isinstance(each[1], Tensor) or is_array(each[1])]
        self._containers, self._tensors = ([value for _, value in each] for each in (containers, tensors))
        watched = [_said_of(name) for _, names in self._watched for name in names]
        self._words = [*watched, *(words for words, _ in (*containers, *tensors))]

    def _read(self) -> list[Any]:
        """Returns which parameters are frozen, all values, and what shows that one of them has changed in itself."""
        try:
            values = [value for get, holder in self._getters for value in get(holder)[1:]]
        except KeyError:
            # Somebody has deleted one, perhaps the forward.
            values = [holder.get(name, MISSING) for holder, names in self._watched for name in names]
        return [
            *(each.requires_grad for each in self._parameters),
            *values,
            *(each.copy() for each in self._containers),
            *map(mark_of, self._tensors),
            [key for module in self._modules for kind in _HOOKS if (hooks := vars(module).get(kind)) for key in hooks],
            [*map(len, self._holders)],
        ]


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_MOST = 1000
"""Elements of the largest container that is searched for others."""


class Reached:
    """What forwards and hooks of ``modules``, and hooks of ``parameters``, can read besides these.

    Follows the names in their code: globals, functions and their closures, defaults and attributes, classes, methods,
    objects and what is in them.
    """

    def __init__(self, modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> None:
        self._names = {"forward", "backward", "__call__", "__getattr__", "__getitem__"}
        """In code that was found."""
        self._seen: dict[int, Any] = {}
        """Keeps objects, whose ids would come again otherwise."""
        self._globals: dict[int, tuple[Any, dict[str, None]]] = {}
        self._variables: list[Named] = []
        self._attributes: list[Any] = []
        """Dictionaries and others in which only names count that are in code."""
        self._values: list[tuple[str, Any]] = []
        own = [*modules]
        for module in own:
            self._seen[id(module)] = module
            self._attributes += [vars(module)] if is_own(type(module)) else []
        for owner in (*own, *parameters):
            for hook in [hook for kind in _HOOKS for hook in (getattr(owner, kind, None) or {}).values()]:
                self._visit("hook", hook)
        for kind in dict.fromkeys(map(type, own)):
            if kind.__module__.partition(".")[0] != "torch":
                self._function(getattr(kind, "forward", None))
                self._attributes += map(vars, kind.__mro__[: kind.__mro__.index(nn.Module)])
        for module in own:
            self._visit("forward", vars(module).get("forward"))
        before = None
        while before != (before := (len(self._seen), len(self._names))):
            for holder, names in self.named():
                for name in names:
                    self._visit(name, holder[name])

    def named(self) -> list[Named]:
        """Returns what holds values by name."""
        of_globals = [Named(held, [*names]) for held, names in self._globals.values()]
        attributes = [Named(each, [name for name in [*each] if name in self._names]) for each in self._attributes]
        return [each for each in (*of_globals, *self._variables, *attributes) if each.names]

    def values(self) -> list[tuple[str, Any]]:
        """Returns containers, tensors and arrays, each with the name under which it was found."""
        return self._values

    def _visit(self, name: str, value: Any) -> None:
        if value is None or isinstance(value, (str, int, float, nn.Parameter)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor) or is_array(value):
            self._values.append((name, value))
        elif type(value) in (*CONTAINERS, tuple):
            self._values.append((name, value))
            for each in [*(value.values() if isinstance(value, dict) else value)] if len(value) <= _MOST else ():
                self._visit(name, each)
        elif isinstance(value, ContextVar):
            self._variables.append(Named(_Getting(lambda _: value.get(None)), [name]))
        elif isinstance(value, (FunctionType, type, ModuleType)):
            if is_own(value):
                self._function(value) if isinstance(value, FunctionType) else self._add(value)
        else:
            for each in parts_of(value):
                self._visit(name, each)
            if hasattr(value, "__dict__") or hasattr(type(value), "__slots__"):
                self._add(value)
                self._visit(name, type(value))

    def _add(self, value: Any) -> None:
        if isinstance(getattr(value, "__dict__", None), dict) or isinstance(value, type):
            self._attributes.append(vars(value))
        for kind in type(value).__mro__ if is_own(type(value)) else ():
            if slots := [name for name in vars(kind).get("__slots__", ()) if hasattr(value, name)]:
                self._attributes.append(_Getting(partial(getattr, value), slots))
        for kind in value.__bases__ if isinstance(value, type) else ():
            self._visit(kind.__name__, kind)
        if isinstance(value, nn.Module):
            for part in (value._buffers, value._modules):
                self._visit("buffer", {**part} if _holds(part) else None)

    def _function(self, function: Any) -> None:
        if not isinstance(function, FunctionType):
            return
        self._names |= {*global_names(function.__code__, attributes=True)}
        held = function.__globals__
        names = self._globals.setdefault(id(held), (held, {}))[1]
        names.update(dict.fromkeys(name for name in global_names(function.__code__) if name in held))
        variables = Variables(function).named()
        self._variables += [variables] if variables.names else []
        self._attributes.append(vars(function))
        for name, each in signature(function, follow_wrapped=False).parameters.items():
            self._visit(name, None if each.default is each.empty else each.default)


def _holds(part: Any) -> bool:
    """Whether a dictionary of a module holds something. Modules in TorchScript have others, which do not change."""
    return isinstance(part, dict) and bool(part)


class _Getting:
    """Values by name, from a function."""

    def __init__(self, get: Any, names: Iterable[str] = ()) -> None:
        self._get, self._names = get, [*names]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> Any:
        return self._get(name)


def _said_of(name: str) -> str:
    return _MODES if name == "training" else f"'{name}' of the model was"


def _names(holder: Any) -> Iterator[str]:
    """Yields the attributes of a module, or of another object, that count. Numbers of torch's own modules are sizes,
    which are fixed."""
    is_torchs = type(holder).__module__.startswith("torch.nn.")
    for name, value in vars(holder).items():
        counts = not is_torchs or isinstance(value, bool | float) or name == "forward"
        if (name == "training" or name not in OF_TORCH) and counts:
            yield name


def _is_same(one: Any, other: Any) -> bool:
    """Whether values are the same object, or equal."""
    if one is other:
        return True
    try:
        return bool(one == other)
    except Exception:
        # Tensors give no such answer.
        return False
