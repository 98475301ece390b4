"""What of a model a script may change between two calls: modes, frozen parameters, buffers, and what lies in attributes
or globals, such as a temperature or a rate of dropout."""

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from torch import Tensor, nn

from ds_lgamp.integrations.split.buffers import version_of
from ds_lgamp.integrations.split.named import Named, class_attributes, named_globals
from ds_lgamp.integrations.split.snapshot import CONTAINERS, has_attributes

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_MODES = "the modes or frozen parameters of the model were"


class Settings:
    """The settings of a ``model`` while a batch is given."""

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
        self._containers: list[tuple[str, Any]] = []
        self._tensors: list[tuple[str, Tensor]] = []
        self._state: list[list[Any]] = []

    def begin(self) -> None:
        """Notes the settings as a batch begins."""
        modules = list(self._model.modules())
        if modules != self._modules or self._sizes != [*map(len, self._holders)]:
            self._modules = modules
            self._watch()
        self._parameters = list(self._model.parameters())
        self.note()

    def note(self) -> None:
        """Notes the settings as they are."""
        self._state = self._read()

    def changed(self) -> str | None:
        """Returns in words what is another than it was noted; None if nothing is."""
        now = self._read()
        if _is_same(now, self._state):
            return None
        kinds = [*zip(now, self._state)]
        if kinds[0][0] != kinds[0][1]:
            return _MODES
        for (_, names), *pair in zip(self._watched, *kinds[1]):
            for name, *values in zip(names, *(each[1:] for each in pair)):
                if not _is_same(*values):
                    return _MODES if name == "training" else f"'{name}' of the model was"
        for found, (one, other) in zip((self._containers, self._tensors), kinds[2:]):
            for (name, _), *values in zip(found, one, other):
                if not _is_same(*values):
                    return f"'{name}' of the model was"
        return "an attribute of the model was"

    def _watch(self) -> None:
        """Finds what to watch."""
        objects = {id(each): each for module in self._modules for each in vars(module).values() if has_attributes(each)}
        buffers = [module._buffers for module in self._modules if module._buffers]
        self._holders = [*map(vars, self._modules), *map(vars, objects.values()), *buffers]
        self._sizes = [*map(len, self._holders)]
        own = [Named(vars(each), [*_names(each)]) for each in (*self._modules, *objects.values())]
        others = [*(Named(each, [*each]) for each in buffers), *named_globals(self._model)]
        self._watched = [each for each in (*own, *others, *class_attributes(self._model)) if each.names]
        # The first name twice: with a single one, an itemgetter returns no tuple.
        self._getters = [(itemgetter(names[0], *names), holder) for holder, names in self._watched]
        found = [(name, holder[name]) for holder, names in self._watched for name in names]
        self._containers = [each for each in found if type(each[1]) in CONTAINERS]
        self._tensors = [each for each in found if isinstance(each[1], Tensor)]

    def _read(self) -> list[list[Any]]:
        """Returns which parameters are frozen, all values, and what shows that one of them has changed in itself."""
        try:
            values = [get(holder) for get, holder in self._getters]
        except KeyError:
            values = []
        return [
            [each.requires_grad for each in self._parameters],
            values,
            [each.copy() for _, each in self._containers],
            [version_of(each) for _, each in self._tensors],
            [*map(len, self._holders)],
        ]


def _names(holder: Any) -> Iterator[str]:
    """Yields the attributes of a module, or of another object, that count. Numbers of torch's own modules are sizes,
    which are fixed."""
    is_torchs = type(holder).__module__.startswith("torch.nn.")
    for name, value in vars(holder).items():
        if name not in _OF_TORCH and (not is_torchs or isinstance(value, bool | float)):
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
