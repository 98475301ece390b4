"""Attributes of blocks that the model's own forward sets, such as the height and width of an image. Every micro-batch
has its own, as if they were arguments."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ds_lgamp.integrations.split.call import copied_containers
from ds_lgamp.integrations.split.parts import Attribute
from ds_lgamp.integrations.split.snapshot import MISSING, Snapshot, set_or_delete


class SetAttributes:
    """Finds the attributes that forwards set, and their values for a micro-batch.

    Args:
        blocks: the blocks. None runs while a forward sets attributes.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._modules = [dict(block.named_modules()) for block in blocks]
        self._unset: list[dict[Attribute, Any]] = [{} for _ in blocks]
        """By block: its attributes that forwards set, with the values ahead of the first time."""
        self._looks: list[Snapshot] = []

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Looks for attributes in all modules of all blocks, in the forward that runs inside the block."""
        self._looks = [Snapshot(modules.values()) for modules in self._modules]
        try:
            yield
        finally:
            self._looks = []

    def of(self, index: int, written: Mapping[str, Any]) -> Mapping[Attribute, Any]:
        """Returns what the forward has set for block ``index``, which it calls now.

        Args:
            written: the attributes of the block itself that forwards have set, with the values ahead of the first time.
        """
        unset, modules = self._unset[index], self._modules[index]
        for name, before in written.items():
            unset.setdefault(Attribute("", name), before)
        if self._looks:
            paths = {id(vars(module)): path for path, module in modules.items()}
            for holder, name, before in self._looks[index].changed():
                unset.setdefault(Attribute(paths[holder], name), before)
        now = {each: _holder(modules[each.path], each.name).get(each.name, MISSING) for each in unset}
        return {each: copied_containers(value) for each, value in now.items()}

    def set(self, index: int, values: Mapping[Attribute, Any]) -> None:
        """Gives the modules of block ``index`` the ``values`` that :meth:`of` returned."""
        for each, before in self._unset[index].items():
            holder = _holder(self._modules[index][each.path], each.name)
            # The next forward may write to the container that it finds there.
            set_or_delete(holder, each.name, copied_containers(values.get(each, before)))


def _holder(module: nn.Module, name: str) -> dict[str, Any]:
    """Returns the dictionary in which a module has an attribute, which may be a buffer."""
    return module._buffers if name in module._buffers else vars(module)
