"""The loss that ``engine(batch)`` returns. Its backward pass tells the engine how the script has scaled it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Told(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, start: Tensor, value: Tensor, note: Callable[[Tensor], None]) -> Tensor:
        context.note = note
        return value.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[None, None, None]:
        context.note(gradients[0])
        return None, None, None


def told_loss(value: Tensor, note: Callable[[Tensor], None]) -> Tensor:
    """Returns a loss of the given ``value``. Its backward pass calls ``note`` with its gradient, which is the factor by
    which the script has multiplied it."""
    with torch.enable_grad():
        return _Told.apply(torch.zeros((), device=value.device, requires_grad=True), value.detach(), note)
