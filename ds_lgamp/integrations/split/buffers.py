"""Buffers that a forward changes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.blocks import Blocks
from ds_lgamp.partition.memory import write


def version_of(tensor: Tensor) -> int:
    """Returns how often a tensor was changed in place; 0 for those of torch.inference_mode, which do not count it."""
    return 0 if tensor.is_inference() else tensor._version


class Buffers:
    """Notices changes of the buffers of some modules.

    Args:
        owners: the modules, without those in them, by the names that their buffers shall have.
    """

    def __init__(self, owners: Iterable[tuple[str, nn.Module]]) -> None:
        self._owners = list(owners)
        self._before: dict[str, tuple[Tensor, int]] = {}

    def look(self) -> None:
        """Begins to notice changes."""
        self._before = {name: (buffer, version_of(buffer)) for name, buffer in self._named()}

    def changed(self) -> str | None:
        """Returns the name of a buffer that has changed since the last look; None if there is none."""
        for name, buffer in self._named():
            own, version = self._before.get(name, (buffer, version_of(buffer)))
            if buffer is not own or version_of(buffer) != version:
                return name
        return None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Gives the modules their buffers back after the block, with the values from ahead of it."""
        own = [(module, name, buffer) for _, module, name, buffer in self._all()]
        values = [buffer.clone() for *_, buffer in own]
        try:
            yield
        finally:
            for (module, name, buffer), value in zip(own, values):
                write(buffer, value)
                module._buffers[name] = buffer

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for path, _, name, buffer in self._all():
            yield f"{path}.{name}".lstrip("."), buffer

    def _all(self) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
        for path, module in self._owners:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield path, module, name, buffer


@contextmanager
def unchanged_tensors(arguments: Any) -> Iterator[None]:
    """Raises ConfigError if a tensor among the ``arguments`` of a call is changed in place inside the block, which runs
    a part of the forward."""
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    versions = [*map(version_of, tensors)]
    yield
    if versions != [*map(version_of, tensors)]:
        raise ConfigError(
            f"the forward of the model changes in place a tensor that it gets, but with a {BLOCK} block it runs in "
            "parts, several times for every micro-batch; compute a new tensor there"
        )


class ContainingBuffers:
    """The buffers of the modules of ``model`` that contain its ``blocks``, whose code runs several times for every
    micro-batch."""

    def __init__(self, model: nn.Module, blocks: Blocks) -> None:
        self._buffers = Buffers((path, model.get_submodule(path)) for path in blocks.chain)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raises ConfigError if one is changed inside the block, which runs a part of the forward."""
        self._buffers.look()
        yield
        if (name := self._buffers.changed()) is not None:
            raise ConfigError(
                f"the forward of the model changes its buffer '{name}', but with a {BLOCK} block it runs in parts, "
                "several times for every micro-batch; change the buffer in the script, or in a module beside the blocks"
            )
