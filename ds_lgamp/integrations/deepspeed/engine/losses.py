"""Losses of a batch: sums over micro-batches, and averages that the rank of the loss sends to the others."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor

from ds_lgamp.runtime.messages import laid_out

Losses = Mapping[str, Tensor]
"""By name."""


def scaled_mean_gradient(optimizer: Any, loss: Tensor, micro_batches: int) -> Tensor:
    """Returns the gradient of the scaled mean over micro-batches with regard to the ``loss`` of one of them.

    A product, because a half-precision loss may not hold the scale of ``optimizer``: then the gradient is infinite,
    which the step finds. Filling a tensor with such a number may be an error.
    """
    return torch.ones_like(loss) * (optimizer.loss_scale / micro_batches)


def add_losses(totals: Losses | None, module: PipelineModule) -> Losses | None:
    """Adds the additional losses that ``module`` reports for a micro-batch to ``totals``, as stock DeepSpeed does.
    Returns ``totals`` if it reports none."""
    reported = module.get_additional_losses()
    if reported is None:
        return totals
    before = totals or {}
    return OrderedDict((name, before.get(name, 0) + value.detach()) for name, value in reported.items())


def loss_of(engine: Any, outputs: Any, labels: Any) -> Any:
    """Returns the loss of a micro-batch from what the last layer returned; ``outputs`` themselves if the module has no
    loss function or the script asks for them only. Adds the additional losses that the module reports."""
    if engine.eval_return_logits:
        engine.outputs = outputs
    labels = laid_out(labels) if engine.lgamp_settings.reproducible else labels
    computes = engine._compute_loss and engine.placed.loss_fn is not None
    loss = engine.placed.loss_fn(outputs, labels) if computes else outputs
    if not engine.executor.recomputing:
        engine.total_additional_losses = add_losses(engine.total_additional_losses, engine.placed)
    return loss


@torch.no_grad()
def average_loss(engine: Any) -> Tensor:
    """Returns the loss of the batch, averaged over all ranks. Sets the loss of the data-parallel rank, the mean over
    its own micro-batches. Collective over all ranks."""
    losses = engine.executor.losses
    if losses:
        engine.total_loss = torch.stack(losses).sum(0)
    average = PipelineEngine._aggregate_total_loss(engine) if engine.is_last_stage() else _receive_loss(engine)
    own = engine.own_spec.micro_batches
    if own != engine.micro_batches:
        engine.dp_group_loss *= engine.micro_batches / own
    return average


def _receive_loss(engine: Any) -> Tensor:
    """Receives what the rank of the loss broadcasts to its pipeline, and returns the loss averaged over all ranks.

    As stock does, it also sets the loss of the data-parallel rank and the averages of additional losses by name, but
    the host does not wait for the device.
    """
    additional = engine.placed.get_additional_losses()
    names = None if additional is None else list(additional)
    received = torch.zeros(2 + len(names or ()), device=engine.device)
    dist.broadcast(received, src=engine._loss_stage_global_rank(), group=engine.grid.get_pipe_parallel_group())
    engine.dp_group_loss, average, *others = (member.clone() for member in received)
    if names is not None:
        engine.agg_additional_losses = OrderedDict(zip(names, others))
    return average
