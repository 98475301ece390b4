"""The micro-batches that a script has given to the engine since its last step."""

from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.deepspeed.engine.versions import Versions
from ds_lgamp.integrations.deepspeed.plain.settings import Settings
from ds_lgamp.integrations.split.call import Arguments, copied_containers
from ds_lgamp.integrations.split.snapshot import differing, has_attributes


class Kept:
    """Keeps micro-batches until the batch is complete: copies of lists and dictionaries, and tensors and other objects
    by reference. So the script must leave these alone, and the ``model`` as it is."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[Arguments] = []
        self._versions, self._settings = Versions(), Settings(model)
        self._objects: list[tuple[int, Any, dict[str, Any]]] = []
        """Other objects among the arguments, each with the number of its micro-batch and a copy of its attributes."""
        self._changed: tuple[str, int] | None = None
        """What of the model was changed, and after which micro-batch; None if nothing was."""

    def add(self, call: Arguments) -> Arguments:
        """Keeps a micro-batch. Returns it as it is kept."""
        if self.calls:
            self._look_at_settings()
        else:
            self._settings.begin()
        call = copied_containers(call)
        objects = (leaf for leaf in tree_leaves(call) if has_attributes(leaf))
        self._objects += [(len(self.calls), each, dict(vars(each))) for each in objects]
        self.calls.append(call)
        self._versions.add(call)
        return call

    def computed(self) -> None:
        """Notes that the model has computed all that was given. It may have changed its own attributes."""
        self._settings.note()

    def clear(self) -> None:
        for kept in (self.calls, self._versions, self._objects):
            kept.clear()
        self._changed = None

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
            self._look_at_settings()
        if self._changed is not None:
            what, number = self._changed
            raise ConfigError(
                f"{what} changed after micro-batch {number} of {len(self.calls)} was given to engine(...), but a "
                f"{BLOCK} block computes with the model until the batch is complete; switch adapters and modes, "
                "freeze, and set attributes between batches"
            )

    def _look_at_settings(self) -> None:
        if self._changed is None and (what := self._settings.changed()) is not None:
            self._changed = what, len(self.calls) - 1
