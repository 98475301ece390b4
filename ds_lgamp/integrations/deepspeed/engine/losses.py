"""Losses of a batch: sums over micro-batches, and the averages that the rank of the loss sends to others."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Losses = Mapping[str, Tensor]
"""By name."""


def scaled_mean_gradient(optimizer: Any, loss: Tensor, micro_batches: int) -> Tensor:
    """Returns the gradient of the scaled mean over micro-batches with regard to the ``loss`` of one of them.

    A product, because a half-precision loss may not hold the scale of ``optimizer``: then the gradient is infinite,
    which the step finds. Filling a tensor with such a number may be an error.
    """
    return torch.ones_like(loss) * (optimizer.loss_scale / micro_batches)


def add_losses(totals: Losses | None, reported: Losses | None) -> Losses | None:
    """Adds the additional losses that the module ``reported`` for a micro-batch to ``totals``, as stock DeepSpeed does.
    Returns ``totals`` if it reported none."""
    if reported is None:
        return totals
    before = totals or {}
    return OrderedDict((name, before.get(name, 0) + value.detach()) for name, value in reported.items())


def receive_loss(engine: Any) -> Tensor:
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
