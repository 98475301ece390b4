"""Tensors that blocks keep in attributes, such as the balancing loss of experts. What follows the blocks may run on
another rank, where they are old."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor, nn

from ds_lgamp.integrations.split.buffers import Buffers
from ds_lgamp.integrations.split.parts import restored_modes


class Kept(NamedTuple):
    """An attribute of a module in a block."""

    path: str
    """The name of the module in the block."""
    name: str


def kept_in_training(block: nn.Module, call: Callable[[], Any]) -> list[Kept]:
    """Returns the attributes of ``block`` that its ``call`` sets, in training, to tensors that depend on parameters.
    They have their old values again afterwards."""
    before = {path: dict(vars(module)) for path, module in block.named_modules()}
    with restored_modes(block), Buffers(block.named_modules()).restored(), suppress(Exception):
        block.train()
        # Training may need more than the dummy inputs have, such as several rows for BatchNorm.
        call()
    kept = []
    for path, module in block.named_modules():
        own = vars(module)
        for name, value in list(own.items()):
            if value is before[path].get(name) or not isinstance(value, Tensor):
                continue
            if value.requires_grad:
                kept.append(Kept(path, name))
            if name in before[path]:
                own[name] = before[path][name]
            else:
                del own[name]
    return kept
