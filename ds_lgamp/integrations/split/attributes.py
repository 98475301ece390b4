"""Attributes that the model's own forward sets, of blocks and of its own modules."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ds_lgamp.integrations.split.call import Call, copied_containers
from ds_lgamp.integrations.split.parts import Attribute
from ds_lgamp.integrations.split.state import MISSING, Place, Snapshot, set_or_delete


class SetAttributes:
    """Finds the attributes of blocks that the model's own forward sets, and their values for a micro-batch.

    Args:
        blocks: the blocks. None runs while a forward sets attributes.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._modules = [dict(block.named_modules()) for block in blocks]
        self._unset: list[dict[Attribute, Any]] = [{} for _ in blocks]
        """By block: its attributes that forwards set, with the values from before the first time."""
        self._snapshots: list[Snapshot] = []

    @contextmanager
    def all_watched(self) -> Iterator[None]:
        """Watches the attributes of all modules of all blocks, in the forward that runs inside the block."""
        self._snapshots = [Snapshot(modules.values()) for modules in self._modules]
        try:
            yield
        finally:
            self._snapshots = []

    def before_write(self, index: int, name: str) -> None:
        """Called before a forward sets or deletes an attribute of block ``index`` itself."""
        self._unset[index].setdefault(Attribute("", name), vars(self._modules[index][""]).get(name, MISSING))

    def of(self, index: int) -> Mapping[Attribute, Any]:
        """Returns what the forward has set for block ``index``, which it calls now."""
        unset, modules = self._unset[index], self._modules[index]
        if self._snapshots:
            paths = {id(vars(module)): path for path, module in modules.items()}
            for holder, name, before in self._snapshots[index].changed():
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


class OwnState:
    """The attributes of the modules whose code runs in every part of the forward, such as counters. Each part runs the
    code before the blocks again, so what that sets counts once."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self._after: set[Place] = set()
        """What is set after the blocks. That code runs once for every micro-batch."""
        self._last: Snapshot | None = None
        """As the last part of the forward began."""
        self._end_of_blocks: Snapshot | None = None

    @contextmanager
    def counted_once(self, call: Call) -> Iterator[None]:
        """Lets the attributes have the values inside the block that they had when the forward first ran for ``call`` on
        this rank. Only what that first run has set stays."""
        now = self._last = self._current()
        if call.own_state is None:
            call.own_state = now
            yield
            return
        if call.own_state is not now:
            call.own_state.restore(self._after)
        self._end_of_blocks = None
        try:
            yield
        finally:
            end = self._end_of_blocks
            after: set[Place] = set() if end is None else {(holder, name) for holder, name, _ in end.changed()}
            self._after |= after
            if after or end is not now:
                now.restore(self._after)

    def reached_end_of_blocks(self) -> None:
        """Called before the code after the blocks runs."""
        self._end_of_blocks = self._current()

    def _current(self) -> Snapshot:
        """Returns a snapshot, which is the last one of :meth:`counted_once` if nothing has changed since."""
        return Snapshot(self.modules) if self._last is None or any(self._last.changed()) else self._last
