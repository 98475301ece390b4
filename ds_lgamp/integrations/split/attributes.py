"""Attributes that forwards set: the model's own forward sets those of blocks and of its own modules, blocks set their
own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn

from ds_lgamp.integrations.split.call import Call, copied_containers
from ds_lgamp.integrations.split.parts import Attribute, restored_modes
from ds_lgamp.integrations.split.state import MISSING, Buffers, Place, Snapshot, set_or_delete


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


class OwnState:
    """The attributes of the modules whose code runs in every part of the forward.

    Args:
        modules: those modules.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self._behind: set[Place] = set()
        """What is set behind the blocks, which runs once for every micro-batch."""
        self._at_end: Snapshot | None = None

    @contextmanager
    def counted_once(self, call: Call) -> Iterator[None]:
        """Lets the attributes have the values inside the block that they had when the forward first ran for ``call`` on
        this rank. Only what that first run has set stays."""
        now = Snapshot(self.modules)
        if call.own_state is None:
            call.own_state = now
            yield
            return
        call.own_state.restore(self._behind)
        self._at_end = None
        try:
            yield
        finally:
            if self._at_end is not None:
                self._behind |= {(holder, name) for holder, name, _ in self._at_end.changed()}
            now.restore(self._behind)

    def reached_end_of_blocks(self) -> None:
        """Notes that the code behind the blocks follows."""
        self._at_end = Snapshot(self.modules)


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
