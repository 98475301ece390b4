"""The micro-batches that a script has given to the engine since its last step."""

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.deepspeed.engine.versions import Versions
from ds_lgamp.integrations.transformers.call import Arguments


class Kept:
    """Keeps micro-batches until the batch is complete, by reference. So the script must leave their tensors alone."""

    def __init__(self) -> None:
        self.calls: list[Arguments] = []
        self._versions = Versions()

    def add(self, call: Arguments) -> None:
        self.calls.append(call)
        self._versions.add(call)

    def clear(self) -> None:
        self.calls.clear()
        self._versions.clear()

    def check(self) -> None:
        """Raises ConfigError if a tensor was changed since it was given."""
        changed = self._versions.changed()
        if changed is not None:
            raise ConfigError(
                f"micro-batch {changed} of {len(self.calls)} was changed after engine(...) got it, but a {BLOCK} "
                "block computes all micro-batches when the last one is there; give the engine new tensors"
            )
