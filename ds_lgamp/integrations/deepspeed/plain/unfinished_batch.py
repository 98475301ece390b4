"""The batch of a plain script before its step: the micro-batches that the engine has got, which the script must leave
alone, as it must the model; and how far the program has run."""

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain, islice, takewhile
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.deepspeed.engine.data import FEW, Versions
from ds_lgamp.integrations.deepspeed.engine.training import Training
from ds_lgamp.integrations.split.call import Arguments, BatchCalls
from ds_lgamp.integrations.split.parts import modules_in, own_parameters
from ds_lgamp.integrations.split.reached import (
    CONTAINERS,
    HOOKS,
    MISSING,
    NO_VALUE,
    Named,
    Reached,
    filled,
    is_array,
)
from ds_lgamp.integrations.split.state import (
    OF_TORCH,
    Snapshot,
    copied_containers,
    has_attributes,
    snapshot_of_arguments,
    version_of,
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
        self._objects: list[Snapshot] = []
        """What lies in other objects among the arguments, by micro-batch."""
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
        self._objects.append(snapshot_of_arguments(call))
        self.calls.append(call)
        self._versions.add(call, self._objects[-1].tensors)
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
            changed = next((number for number, each in enumerate(self._objects) if any(each.changed())), None)
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
        modules = modules_in(self._model)
        if modules != self._modules or self._sizes != [*map(len, self._holders)]:
            self._modules = modules
            self._watch()
        self._parameters = own_parameters(modules)
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
        attributes = [item for module in self._modules for item in vars(module).items()]
        objects = {id(each): each for name, each in attributes if name not in OF_TORCH and has_attributes(each)}
        parts = [each for module in self._modules for each in filled(module)]
        self._holders = [*map(vars, self._modules), *map(vars, objects.values()), *parts]
        self._sizes = [*map(len, self._holders)]
        own = [Named(vars(each), [*_names(each)]) for each in (*self._modules, *objects.values())]
        reached = Reached(self._modules, own_parameters(self._modules))
        others = [*(Named(each, [*each]) for each in parts), *reached.named()]
        self._watched = [each for each in (*own, *others) if each.names]
        # The first name twice: with a single one, an itemgetter returns no tuple.
        self._getters = [(itemgetter(each.names[0], *each.names), each.holder) for each in self._watched]
        found = [(_said_of(name), value) for each in self._watched for name, value in each.values().items()]
        found += [(_said_of(name), value) for name, value in reached.values()]
        containers = [each for each in found if isinstance(each[1], CONTAINERS)]
        tensors = [each for each in found if isinstance(each[1], Tensor) or is_array(each[1])]
        self._containers, self._tensors = ([value for _, value in each] for each in (containers, tensors))
        watched = [_said_of(name) for each in self._watched for name in each.names]
        self._words = [*watched, *(words for words, _ in (*containers, *tensors))]

    def _read(self) -> list[Any]:
        """Returns which parameters are frozen, all values, and what shows that one of them has changed in itself."""
        try:
            values = [value for get, holder in self._getters for value in get(holder)[1:]]
        except NO_VALUE:
            # Somebody has deleted one, perhaps the forward.
            values = [each.holder.get(name, MISSING) for each in self._watched for name in each.names]
        # Most modules have none.
        hooks = chain.from_iterable(map(_hooks_in, self._holders[: len(self._modules)]))
        return [
            *(each.requires_grad for each in self._parameters),
            *values,
            *map(_copy_of, self._containers),
            *map(_mark_of, self._tensors),
            [key for each in hooks if each for key in each],
            [*map(len, self._holders)],
        ]


_hooks_in = itemgetter(*HOOKS)
_KINDS: Any = (list, set, deque)


def _copy_of(container: Any) -> Any:
    """Returns a copy of a list, dictionary, set or deque. Asks no class that derives from these."""
    if isinstance(container, dict):
        # Its copy would ask an OrderedDict's class for each value, and transformers' ACT2FN makes a new one each time.
        return dict(dict.items(container))
    return next(kind.copy(container) for kind in _KINDS if isinstance(container, kind))


def _mark_of(value: Any) -> Any:
    """Returns what shows that a tensor or an array has changed in itself."""
    if not isinstance(value, Tensor):
        return repr(value.tolist()) if value.size <= FEW else value.copy()
    if type(value) is not Tensor or value.layout is not torch.strided:
        return version_of(value)
    few = value.device.type == "cpu" and value.numel() <= FEW
    return version_of(value), value.data_ptr(), repr(value.tolist()) if few else None


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
