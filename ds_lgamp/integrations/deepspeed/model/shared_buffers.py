"""Buffers that several layers share, such as a table of rotations. Every pipeline rank has a copy of its own, so no
forward may change them."""

from collections.abc import Iterable

from torch import Tensor, nn

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.split.state import version_of


class SharedBuffers:
    """Notices changes of buffers that several layers share.

    Args:
        layers: the layers of the model that this rank has built.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        users: dict[int, list[tuple[nn.Module, str]]] = {}
        # The first and the last layer may be one module.
        for layer in {id(layer): layer for layer in layers}.values():
            for tensor, place in {id(tensor): (module, name) for module, name, tensor in _buffers(layer)}.items():
                users.setdefault(tensor, []).append(place)
        shared = (place for places in users.values() if len(places) > 1 for place in places)
        # A cast gives modules that share a tensor, and not themselves, one each.
        self._places = list({(id(module), name): (module, name) for module, name in shared}.values())
        self._before: list[tuple[Tensor | None, int]] = []

    def look(self) -> None:
        """Begins to notice changes."""
        self._before = [_state(module._buffers[name]) for module, name in self._places]

    def check(self) -> None:
        """Raises ConfigError if one has changed since the last look. A table may grow."""
        for (module, name), (own, version) in zip(self._places, self._before):
            now, changes = _state(module._buffers[name])
            if own is None or now is None or (now is not own and now.shape != own.shape):
                continue
            if now is not own or changes != version:
                raise ConfigError(
                    f"several layers share the buffer '{name}' of a {type(module).__name__}, and a forward changes it, "
                    "but every pipeline rank has a copy of its own; give each layer its own buffer"
                )


def _buffers(layer: nn.Module) -> Iterable[tuple[nn.Module, str, Tensor]]:
    for module in layer.modules():
        for name, tensor in module._buffers.items():
            if tensor is not None:
                yield module, name, tensor


def _state(tensor: Tensor | None) -> tuple[Tensor | None, int]:
    """Returns a buffer, and how often it was changed in place."""
    return tensor, 0 if tensor is None else version_of(tensor)
