"""What a model's forward sets in its configuration, as heads of classification set ``problem_type`` by their labels."""

from collections.abc import Mapping
from typing import Any

Setting = str | int | float | bool | None


class ForwardSettings:
    """The plain values of a configuration that a forward sets. Only ranks that run the code behind the blocks see it do
    so.

    Args:
        config: the configuration, ahead of any forward.
    """

    def __init__(self, config: Any) -> None:
        self._config, self._before = config, _plain(config)

    def changed(self) -> dict[str, Setting]:
        """Returns the values by name that were set since this object was made."""
        missing = object()
        return {name: value for name, value in _plain(self._config).items() if self._before.get(name, missing) != value}

    def take(self, changed: Mapping[str, Setting]) -> None:
        """Sets what a forward has set on another rank."""
        for name, value in changed.items():
            setattr(self._config, name, value)


def _plain(config: Any) -> dict[str, Setting]:
    return {
        name: value for name, value in vars(config).items() if not name.startswith("_") and isinstance(value, Setting)
    }
