"""What of a model a script may change between two calls: modes, frozen parameters, and numbers, strings and switches in
attributes, such as a temperature or a rate of dropout."""

from operator import itemgetter
from typing import Any

from torch import nn

from ds_lgamp.integrations.split.snapshot import has_attributes

_PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_MODES = "the modes or frozen parameters of the model were"


class _Holder:
    """A module, or another object of the model, with attributes."""

    def __init__(self, holder: Any) -> None:
        self.attributes = vars(holder)
        self._size = len(self.attributes)
        # Numbers of torch's own modules are sizes, which are fixed.
        kinds: Any = (bool, float) if type(holder).__module__.startswith("torch.nn.") else _PLAIN
        self.names = [
            name for name, value in self.attributes.items() if isinstance(value, kinds) and name not in _OF_TORCH
        ]
        # The first one twice: with a single name, an itemgetter returns no tuple.
        self._get = itemgetter(self.names[0], *self.names) if self.names else lambda _: ()

    @property
    def has_others(self) -> bool:
        """Whether it has more or fewer attributes than when it was made."""
        return len(self.attributes) != self._size

    def read(self) -> tuple[Any, ...]:
        """Returns the number of its attributes, and the values of those that count."""
        try:
            return len(self.attributes), *self._get(self.attributes)
        except KeyError:
            return ()

    def difference(self, before: tuple[Any, ...]) -> str:
        """Returns the name of what is another than ``before``."""
        now = dict(zip(self.names, self.read()[2:]))
        return next((name for name, value in zip(self.names, before[2:]) if now.get(name) != value), "...")


class Settings:
    """The settings of a ``model`` while a batch is given."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []
        self._holders: list[_Holder] = []
        self._frozen: list[bool] = []
        self._values: list[tuple[Any, ...]] = []

    def begin(self) -> None:
        """Notes the settings as a batch begins."""
        modules = list(self._model.modules())
        if modules != self._modules or any(each.has_others for each in self._holders):
            self._modules = modules
            objects = {id(each): each for module in modules for each in vars(module).values() if has_attributes(each)}
            self._holders = [_Holder(each) for each in (*modules, *objects.values())]
        self._parameters = list(self._model.parameters())
        self.note()

    def note(self) -> None:
        """Notes the settings as they are."""
        self._frozen = [not each.requires_grad for each in self._parameters]
        self._values = [each.read() for each in self._holders]

    def changed(self) -> str | None:
        """Returns in words what is another than it was noted; None if nothing is."""
        if self._frozen != [not each.requires_grad for each in self._parameters]:
            return _MODES
        for holder, before in zip(self._holders, self._values):
            if holder.read() != before:
                name = holder.difference(before)
                return _MODES if name == "training" else f"the attribute '{name}' of the model was"
        return None
