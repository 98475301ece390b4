"""Tensors that blocks keep in attributes, such as the balancing loss of experts. What follows the blocks may run on
another rank, where they are old."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from ds_lgamp.integrations.split.buffers import Buffers
from ds_lgamp.integrations.split.parts import Attribute, restored_modes
from ds_lgamp.integrations.split.snapshot import Snapshot


def kept_in_training(block: nn.Module, call: Callable[[], Any]) -> list[Attribute]:
    """Returns the attributes of ``block`` that its ``call`` sets, in training, to tensors that depend on parameters.
    They have their old values again afterwards."""
    before, kept = Snapshot(block.modules()), []
    paths = {id(vars(module)): (path, vars(module)) for path, module in block.named_modules()}
    with restored_modes(block), Buffers(block.named_modules()).restored(), suppress(Exception):
        block.train()
        # Training may need more than the dummy inputs have, such as several rows for BatchNorm.
        call()
    for holder, name, _ in before.changed():
        path, attributes = paths[holder]
        value = attributes.get(name)
        if isinstance(value, Tensor) and value.requires_grad:
            kept.append(Attribute(path, name))
    before.restore()
    return kept
