"""Drops the tensors that autograd saves in a forward, and restores them by computing the forward again.

The graph of the first forward is kept without its tensors. The second forward stops when it has restored the last of
them. Anything after that, such as the product of a last linear layer, is not computed again (as in the early stop of
torch.utils.checkpoint).

The stop is inside the operation that saves the last tensor, and some operations save a tensor before they write it,
such as the noise of RReLU. They write only tensors that need no gradient, because autograd lets no operation change
what it has saved and needs the gradient of. So the second forward goes on to its end where that operation saves a
tensor that needs none and is no parameter.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._C._autograd import _get_sequence_nr as started_operations
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter


class _Slot:
    """The place of one saved tensor. The graph holds it."""

    __slots__ = ("kind", "tensor", "version")

    version: int

    def __init__(self, kind: tuple[torch.Size, torch.dtype]) -> None:
        self.kind = kind
        self.tensor: torch.Tensor | None = None


class _Stop(BaseException):
    """Signals that the last saved tensor is restored, or another one than the first forward saved. It is not an
    Exception, so layers that catch exceptions let it pass."""


class SavedTensors:
    """The saved tensors of one forward."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []

    def dropped(self) -> saved_tensors_hooks:
        """Returns a context for the first forward. Its graph saves places instead of tensors."""
        return saved_tensors_hooks(self._drop, _fetch)

    def restore(self, compute: Callable[[], Any], completely: bool) -> None:
        """Fills the places by calling ``compute``, which repeats the first forward.

        Args:
            completely: whether ``compute`` must run to its end.

        Raises RuntimeError if ``compute`` saves other tensors than the first forward did.
        """
        # From now on only the graph holds the places. It drops each one after use.
        slots, self._slots = self._slots, []
        if not slots and not completely:
            return
        filled, unsafe = 0, -1
        other: tuple[object, object] | None = None
        stopped = False

        def fill(tensor: torch.Tensor) -> None:
            nonlocal filled, unsafe, other, stopped
            if filled < len(slots):
                slot = slots[filled]
                if slot.kind != (tensor.shape, tensor.dtype):
                    other, stopped = (slot.kind, (tensor.shape, tensor.dtype)), True
                    raise _Stop
                slot.tensor, slot.version = tensor.detach() if tensor.requires_grad else tensor, tensor._version
            filled += 1
            if not tensor.requires_grad and not _is_parameter(tensor):
                unsafe = started_operations()
            if filled == len(slots) and not completely and unsafe != started_operations():
                stopped = True
                raise _Stop

        try:
            with saved_tensors_hooks(fill, _refuse_early_backward):
                compute()
        except BaseException:
            # TorchScript makes another error of the signal.
            if not stopped:
                raise
        if other is None and filled != len(slots):
            other = f"{len(slots)} tensors", filled
        if other is not None:
            raise RuntimeError(_OTHER.format(*other))

    def _drop(self, tensor: torch.Tensor) -> _Slot:
        slot = _Slot((tensor.shape, tensor.dtype))
        self._slots.append(slot)
        return slot


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Returns whether ``tensor`` is a parameter or a view of one, such as the transposed weight of a linear layer."""
    return isinstance(tensor if tensor._base is None else tensor._base, Parameter)


_OTHER = (
    "a chunk saved {} in its forward and {} when it was recomputed; let its layers do the same both times, or set "
    "ds_lgamp.recompute to 'none'"
)


def _fetch(slot: _Slot) -> torch.Tensor:
    tensor = slot.tensor
    if tensor is None:
        _refuse_early_backward()
    if tensor._version != slot.version:
        raise RuntimeError(
            "a tensor that the backward pass needs was changed in place after it was saved; let the layer that changes "
            "it work on a copy"
        )
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0:
        raise RuntimeError(
            "the memory of a tensor that the backward pass needs was freed when the chunk was recomputed; let layers "
            "not recompute parts of themselves in this way, or set ds_lgamp.recompute to 'selective'"
        )
    return tensor


def _refuse_early_backward(_: Any = None) -> NoReturn:
    raise RuntimeError(
        "gradients were asked for before the backward pass of a chunk, inside a forward or through another chunk's "
        "graph; set ds_lgamp.recompute to 'none'"
    )
