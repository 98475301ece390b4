"""The micro-batches that a script has given to the engine since its last step."""

from torch import nn

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.deepspeed.engine.versions import Versions
from ds_lgamp.integrations.split.call import Arguments


class Kept:
    """Keeps micro-batches until the batch is complete, by reference. So the script must leave their tensors alone, and
    the ``model`` as it is."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[Arguments] = []
        self._versions = Versions()
        self._model = model
        self._modules: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []
        """Those of the model when the batch began: a walk through the model takes long."""
        self._states: list[tuple[bool, ...]] = []
        """The state of the model at each call."""

    def add(self, call: Arguments) -> None:
        if not self.calls:
            self._modules, self._parameters = list(self._model.modules()), list(self._model.parameters())
        self.calls.append(call)
        self._versions.add(call)
        self._states.append(self._state())

    def clear(self) -> None:
        for kept in (self.calls, self._versions, self._states, self._modules, self._parameters):
            kept.clear()

    def check(self) -> None:
        """Raises ConfigError if a tensor was changed since it was given, or if the model is in another state."""
        changed = self._versions.changed()
        if changed is not None:
            raise ConfigError(
                f"micro-batch {changed} of {len(self.calls)} was changed after engine(...) got it, but a {BLOCK} "
                "block computes with it until the batch is complete; give the engine new tensors"
            )
        state = self._state()
        for number, given in reversed([*enumerate(self._states)]):
            if given != state:
                raise ConfigError(
                    f"the modes or frozen parameters of the model were changed after micro-batch {number} of "
                    f"{len(self.calls)} was given to engine(...), but a {BLOCK} block computes with the model until "
                    "the batch is complete; switch adapters and modes, and freeze, between batches"
                )

    def _state(self) -> tuple[bool, ...]:
        """Returns which modules train and which parameters are frozen. Adapters of peft freeze when they are
        switched."""
        return *(each.training for each in self._modules), *(each.requires_grad for each in self._parameters)
