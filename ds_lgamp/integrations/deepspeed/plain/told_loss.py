"""The losses that ``engine(batch)`` returns. Their backward passes tell the engine how the script has scaled them."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.deepspeed.plain.agreement import Next, agree


class ToldLosses:
    """The losses that the engine told since the last step, and the factors by which the script multiplied them.

    Args:
        accumulation: returns by what the engine divides losses, also those whose ``loss.backward()`` the script calls
            itself.
    """

    def __init__(self, accumulation: Callable[[], int]) -> None:
        self._accumulation = accumulation
        self._through_engine = False
        self._factors: list[Tensor | float] = []
        self._last: Any = None
        """The node of the last loss in autograd's graph."""

    def tell(self, value: Tensor) -> Tensor:
        """Returns a loss of the given ``value``. Its backward pass notes its gradient, which is the factor by which the
        script has multiplied it."""
        with torch.enable_grad():
            start = torch.zeros((), device=value.device, requires_grad=True)
            loss = _Told.apply(start, value.detach(), self._note)
        self._last = loss.grad_fn
        return loss

    def backward(self, loss: Tensor, factor: float, retain_graph: bool) -> Tensor:
        """Notes by what the script multiplied the last loss that it was told, and ``factor``."""
        if self._last is not None and loss.grad_fn is self._last:
            # The script left the loss as it is: then the host need not ask the device for the factor.
            self._factors.append(factor)
            return loss.detach() * factor
        refuse_evaluated(loss)
        loss = loss * factor
        self._through_engine = True
        try:
            loss.backward(retain_graph=retain_graph)
        finally:
            self._through_engine = False
        return loss

    def _note(self, gradient: Tensor) -> None:
        self._factors.append(gradient if self._through_engine else gradient / self._accumulation())

    def forget(self) -> None:
        """Forgets the losses that the engine told since the last step."""
        self._factors.clear()
        self._last = None

    def common_factor(self, losses: int) -> float:
        """Returns by what the script multiplied each of the ``losses`` that it was told, times their number: the factor
        of their mean. Forgets them.

        Collective over all ranks; raises ConfigError on all if factors differ, or if a loss had no backward pass.
        """
        smallest, largest = -math.inf, math.inf
        if len(self._factors) == losses:
            # Rounded alike, whether they come from the device or not.
            smallest, largest = (each.item() for each in torch.tensor([*map(float, self._factors)]).aminmax())
            if not (math.isfinite(smallest) and math.isfinite(largest)):
                # NaN differs from itself.
                smallest = largest = math.inf
        self._factors.clear()
        agree(Next.STEP, smallest, largest)
        if smallest == math.inf:
            raise ConfigError(
                "a loss of the batch was multiplied by NaN or infinity; multiply losses by finite numbers, and check "
                "what the script divides them by"
            )
        if math.isinf(largest):
            raise ConfigError(
                "engine.step() is called before every loss of the batch went through engine.backward(loss) once"
            )
        if smallest != largest:
            raise ConfigError(
                f"the losses of one batch were multiplied by factors from {smallest:g} to {largest:g}; with a {BLOCK} "
                "block, multiply all losses of a batch by the same factor"
            )
        return largest * losses


def refuse_evaluated(loss: Tensor) -> None:
    """Raises ConfigError if nothing that trains has made ``loss``."""
    if not loss.requires_grad:
        raise ConfigError(
            "engine.backward(loss) is called with a loss of evaluation; call engine.train() before the engine, "
            "also for a model of from_pretrained, which returns it in evaluation mode"
        )


class _Told(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, start: Tensor, value: Tensor, note: Callable[[Tensor], None]) -> Tensor:
        context.note = note
        return value.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[None, None, None]:
        context.note(gradients[0])
        return None, None, None
