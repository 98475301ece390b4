"""What autograd saves of a forward, dropped at once and brought back by computing it again, as far as that is needed.

The graph of the first forward is kept, without the tensors in it; the second forward ends with the last of them. What
comes after it, such as the product of a last linear layer, is not computed again (as in torch.utils.checkpoint's early
stop).
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


class _Slot:
    """The place of one saved tensor; it lives as long as the graph needs the tensor."""

    __slots__ = ("__weakref__", "tensor", "version")

    tensor: torch.Tensor | None
    version: int

    def __init__(self) -> None:
        self.tensor = None


class _Complete(BaseException):
    """The last saved tensor is there. No Exception: layers that catch those must not catch this."""


class SavedTensors:
    """Those of one forward."""

    def __init__(self) -> None:
        self._slots: list[weakref.ref[_Slot]] = []

    def dropped(self) -> saved_tensors_hooks:
        """A context for the first forward: its graph saves places instead of tensors."""
        return saved_tensors_hooks(self._drop, _fetch)

    def restore(self, compute: Callable[[], Any], completely: bool) -> None:
        """Calls ``compute``, the same forward, for the tensors of the places.

        Args:
            completely: whether it has to run to its end.

        Raises RuntimeError if it saves fewer tensors than the first forward did.
        """
        slots, self._slots = self._slots, []
        while slots and slots[-1]() is None:
            slots.pop()
        if not slots and not completely:
            return
        filled = 0

        def fill(tensor: torch.Tensor) -> None:
            nonlocal filled
            if filled < len(slots):
                slot = slots[filled]()
                if slot is not None:
                    slot.tensor, slot.version = tensor.detach(), tensor._version
            filled += 1
            if filled == len(slots) and not completely:
                raise _Complete

        try:
            with saved_tensors_hooks(fill, _nothing):
                compute()
        except _Complete:
            pass
        if filled < len(slots):
            raise RuntimeError(
                f"a chunk saved {len(slots)} tensors in its forward and {filled} when it was recomputed; let its "
                "layers do the same in both, or set ds_lgamp.recompute to 'none'"
            )

    def _drop(self, _: torch.Tensor) -> _Slot:
        slot = _Slot()
        self._slots.append(weakref.ref(slot))
        return slot


def _fetch(slot: _Slot) -> torch.Tensor:
    tensor = slot.tensor
    assert tensor is not None, "a backward pass follows a recomputation"
    if tensor._version != slot.version:
        raise RuntimeError(
            "a tensor that the backward pass needs was changed in place after it was saved; let the layer that changes "
            "it work on a copy"
        )
    return tensor


def _nothing(_: Any) -> torch.Tensor:
    raise AssertionError("nobody runs the graph of a recomputation")
