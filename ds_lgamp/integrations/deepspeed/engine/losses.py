"""Losses of a batch: sums over micro-batches, and the averages that the rank of the loss sends to others."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
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


def receive_losses(
    additional: Iterable[str] | None, source: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[Tensor, Tensor, Losses | None]:
    """Receives what the rank of the loss broadcasts: the loss of its data-parallel rank, the average over all, and the
    averages of ``additional`` losses by name.

    Stock DeepSpeed receives the same, but lets the host wait for the device.

    Args:
        source: the global rank that computes the loss.
        group: the ranks of this pipeline.
    """
    names = None if additional is None else list(additional)
    received = torch.zeros(2 + len(names or ()), device=device)
    dist.broadcast(received, src=source, group=group)
    of_data_rank, average, *others = (member.clone() for member in received)
    return of_data_rank, average, None if names is None else OrderedDict(zip(names, others))
