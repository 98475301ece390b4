"""The engine of plain scripts that take the model's own loss."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.plain.agreement import Next
from ds_lgamp.integrations.deepspeed.plain.engine import ModelEngine
from ds_lgamp.integrations.deepspeed.plain.told_loss import ToldLosses
from ds_lgamp.integrations.split.call import Arguments
from ds_lgamp.schedule.actions import Kind


class LossEngine(ModelEngine):
    """Returns the model's loss in training, once the batch is complete.

    A micro-batch given to the engine is kept. The one that completes the batch runs the program, forward and backward.
    It returns the sum of this rank's losses; earlier ones return zero.
    """

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._told = ToldLosses(self.gradient_accumulation_steps)
        self._calls_without_step = 0
        """Since the script called :meth:`step`, without those inside ``no_sync``, where it may not."""

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Notes how the script scaled the loss of the last call. The gradients are those of the whole batch."""
        factor = 1 / self.gradient_accumulation_steps() if scale_wrt_gas else 1.0
        return self._told.backward(loss, factor, retain_graph)

    def load_checkpoint(self, *positional: Any, **named: Any) -> Any:
        loaded = super().load_checkpoint(*positional, **named)
        if loaded[0] is not None:
            self._told.forget()
            self._calls_without_step = 0
        return loaded

    def _refuse_call(self) -> None:
        if self._open is not None:
            raise ConfigError(
                "engine(...) is called after a complete batch; call engine.backward and engine.step behind every call"
            )
        says_boundaries = self._is_gradient_accumulation_boundary is not None or self.inside_no_sync_ctxt
        if self._calls_without_step >= self.gradient_accumulation_steps() and not says_boundaries:
            raise ConfigError(
                f"engine(...) is called again after {self._calls_without_step} micro-batches without engine.step(); "
                "call engine.backward and engine.step behind every call, or engine.eval() ahead of calls that train "
                "nothing"
            )

    def step(self, lr_kwargs: Any = None) -> None:
        self._calls_without_step = 0
        super().step(lr_kwargs)

    def _train(self, arguments: Arguments) -> Any:
        self._calls_without_step += not self.inside_no_sync_ctxt
        value = self._compute_gradients() if self._completes_batch() else torch.zeros((), device=self.device)
        return self._layers.training_output(self._told.tell(value))

    def _compute_gradients(self) -> Tensor:
        """Runs the program up to its step, and returns the sum of the losses of this rank's micro-batches."""
        with self.lgamp.in_batch(training=True, ends=False):
            self._kept.check()
            self._refuse_other_gradients()
            self._begin(Next.TRAIN, self._kept.calls)
            self.micro_batches = len(self._layers.calls.all)
            self._open = self._begin_batch()
            self._open.run_up_to(Kind.STEP)
            self._layers.calls.all = []
            self._take_settings()
            losses = torch.zeros(self.micro_batches, device=self.device)
            if self.lgamp.computes_loss:
                losses = torch.stack([loss.float() for loss in self.lgamp.executor.losses])
            if self.num_stages > 1:
                dist.broadcast(losses, self.lgamp.loss_source, group=self.grid.get_pipe_parallel_group())
        return losses[self.stage_id :: self.num_stages].sum()

    def _complete_batch(self) -> None:
        if self._open is None:
            # The script completes the batch only now, so its losses were told as zero.
            self._compute_gradients()
        assert self._open is not None
        with self.lgamp.in_batch(training=True, begins=False):
            self._refuse_other_gradients()
            self.optimizer.loss_factor = self._told.common_factor(len(self._kept.calls))
            self._run_to_the_end(self._open)

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        return self._layers.loss_of(outputs) if torch.is_grad_enabled() else outputs
