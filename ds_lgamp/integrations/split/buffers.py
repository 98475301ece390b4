"""The buffers of the modules that contain the blocks, whose code runs several times for every micro-batch."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.blocks import Blocks


class ContainingBuffers:
    """The buffers of the modules of ``model`` that contain its ``blocks``, without those of modules in them."""

    def __init__(self, model: nn.Module, blocks: Blocks) -> None:
        self._owners = {path: model.get_submodule(path) for path in blocks.chain}

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raises ConfigError if one is changed inside the block, which runs a part of the forward."""
        before = {name: (buffer, buffer._version) for name, buffer in self._named()}
        yield
        for name, buffer in self._named():
            own, version = before.get(name, (buffer, buffer._version))
            if buffer is not own or buffer._version != version:
                raise ConfigError(
                    f"the forward of the model changes its buffer '{name}', but with a {BLOCK} block it runs in "
                    "parts, several times for every micro-batch; change the buffer in the script, or in a block"
                )

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for path, module in self._owners.items():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield f"{path}.{name}".lstrip("."), buffer
