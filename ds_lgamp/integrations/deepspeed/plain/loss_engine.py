"""The engine of plain scripts that take the model's own loss. It learns from the backward passes of the losses that it
returns how the script has scaled them."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.deepspeed.plain.between_ranks import Next, agree
from ds_lgamp.integrations.deepspeed.plain.engine import ModelEngine
from ds_lgamp.integrations.split.call import Arguments
from ds_lgamp.schedule.actions import Kind


class LossEngine(ModelEngine):
    """Returns the model's loss in training, once the batch is complete.

    The engine keeps each micro-batch. The call that completes the batch runs the program, forward and backward, and
    returns the sum of this rank's losses; earlier calls return zero.
    """

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._losses = ReturnedLosses(self.gradient_accumulation_steps)
        self._calls_without_step = 0
        """Since the script called :meth:`step`, without those inside ``no_sync``, where it may not."""

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Records how the script scaled the loss of the last call. The gradients are those of the whole batch."""
        factor = 1 / self.gradient_accumulation_steps() if scale_wrt_gas else 1.0
        return self._losses.backward(loss, factor, retain_graph)

    def _would_lose_gradients(self) -> bool:
        return self._losses.any

    def load_checkpoint(self, *positional: Any, **named: Any) -> Any:
        loaded = super().load_checkpoint(*positional, **named)
        if loaded[0] is not None:
            self._losses.forget()
            self._calls_without_step = 0
        return loaded

    def _refuse_call(self) -> None:
        if self._open is not None:
            raise ConfigError(
                "engine(...) is called after a complete batch; call engine.backward and engine.step after every call"
            )
        says_boundaries = self._is_gradient_accumulation_boundary is not None or self.inside_no_sync_ctxt
        if self._calls_without_step >= self.gradient_accumulation_steps() and not says_boundaries:
            raise ConfigError(
                f"engine(...) is called again after {self._calls_without_step} micro-batches without engine.step(); "
                "call engine.backward and engine.step after every call, or engine.eval() before calls that train "
                "nothing"
            )

    def step(self, lr_kwargs: Any = None) -> None:
        self._calls_without_step = 0
        super().step(lr_kwargs)

    def _train(self, arguments: Arguments) -> Any:
        self._calls_without_step += not self.inside_no_sync_ctxt
        value = self._compute_gradients() if self._completes_batch() else self._zeros()
        return self._layers.training_output(self._losses.give(value))

    def _zeros(self, *shape: int) -> Tensor:
        # In fp32 on every rank, whatever torch.set_default_dtype says.
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def _compute_gradients(self) -> Tensor:
        """Runs the program up to its step, and returns the sum of the losses of this rank's micro-batches."""
        with self.lgamp.in_batch(training=True, ends=False):
            self._unfinished.check()
            self._refuse_other_gradients()
            self._begin(Next.TRAIN, self._unfinished.calls)
            self.micro_batches = len(self._layers.calls.all)
            self._open = self._begin_batch()
            self._open.run_up_to(Kind.STEP)
            self._unfinished.refuse_early_reading()
            self._layers.calls.all = []
            self._take_settings()
            losses = self._zeros(self.micro_batches)
            if self.lgamp.computes_loss:
                losses = torch.stack([loss.float() for loss in self.lgamp.executor.losses])
            if self.num_stages > 1:
                dist.broadcast(losses, self.lgamp.loss_source, group=self.grid.get_pipe_parallel_group())
        return losses[self.stage_id :: self.num_stages].sum()

    def _complete_batch(self) -> None:
        if self._open is None:
            # The script completes the batch only now, so it has returned zero for its losses.
            self._compute_gradients()
        assert self._open is not None
        with self.lgamp.in_batch(training=True, begins=False):
            self._refuse_other_gradients()
            self.optimizer.loss_factor = self._losses.common_factor(len(self._unfinished.calls))
            self._run_to_the_end(self._open)

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        return self._layers.loss_of(outputs) if torch.is_grad_enabled() else outputs


class ReturnedLosses:
    """The losses that the engine returned since the last step, and the factors by which the script multiplied them.

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

    @property
    def any(self) -> bool:
        """Whether the script has computed the gradient of one since the last step."""
        return bool(self._factors)

    def give(self, value: Tensor) -> Tensor:
        """Returns a loss of the given ``value``. Its backward pass records its gradient: the factor by which the script
        has multiplied it."""
        with torch.enable_grad():
            start = torch.zeros((), device=value.device, requires_grad=True)
            loss = _ReturnedLoss.apply(start, value.detach(), self._note)
        self._last = loss.grad_fn
        return loss

    def backward(self, loss: Tensor, factor: float, retain_graph: bool) -> Tensor:
        """Records by what the script multiplied the last loss that it got, and ``factor``."""
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
        """Forgets the losses that the engine returned since the last step."""
        self._factors.clear()
        self._last = None

    def common_factor(self, losses: int) -> float:
        """Returns by what the script multiplied each of the ``losses`` that it returned, times their number: the factor
        of their mean. Forgets them.

        Collective over all ranks; raises ConfigError on all if factors differ, or if a loss had no backward pass.
        """
        smallest, largest = -math.inf, math.inf
        if len(self._factors) == losses:
            # Rounded alike, whether they come from the device or not.
            factors = torch.tensor([*map(float, self._factors)], dtype=torch.float32)
            smallest, largest = (each.item() for each in factors.aminmax())
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
            "engine.backward(loss) is called with a loss that has no gradient, as in evaluation; call engine.train() "
            "before the engine, also for a model of from_pretrained, which returns it in evaluation mode"
        )


class _ReturnedLoss(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, start: Tensor, value: Tensor, note: Callable[[Tensor], None]) -> Tensor:
        context.note = note
        return value.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[None, None, None]:
        context.note(gradients[0])
        return None, None, None
