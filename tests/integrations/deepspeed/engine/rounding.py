"""The training of one process into which rounding is put by hand."""

import torch
from torch import nn

from tests.integrations.deepspeed.models import (
    MICRO_BATCHES,
    Training,
    build_layers,
    decay_groups,
    loss_of,
    warmup_factors,
)
from tests.partition.rounding import rounded


def train_rounded(training: Training, data_ranks: int, weights: int | None, gradients: int | None):
    """Trains on one process. Every data-parallel rank's gradient of a batch is rounded once, and so is every weight
    before the compute. Returns losses, norms and parameters by global name.

    Args:
        weights: in how many bits they travel; None as they are. ``gradients`` likewise.
    """
    layers, parameters = build_layers(training)
    groups = decay_groups(parameters.values(), training.decay)
    optimizer = torch.optim.SGD(groups, lr=training.learning_rate, momentum=training.momentum)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_factors(training.warmup))
    losses, norms = [], []
    for step in range(training.steps):
        exact = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        set_values(parameters, {name: rounded(value, weights) for name, value in exact.items()})
        sums, loss = {name: torch.zeros_like(value) for name, value in exact.items()}, 0.0
        for rank in range(data_ranks):
            for index in range(MICRO_BATCHES):
                part = loss_of(layers, step, rank * MICRO_BATCHES + index) / MICRO_BATCHES
                part.backward()
                loss += part.item() / data_ranks
            for name, parameter in parameters.items():
                sums[name] += rounded(parameter.grad, gradients)
                parameter.grad = None
        set_values(parameters, exact)
        for name, parameter in parameters.items():
            parameter.grad = sums[name] / data_ranks
        limit = training.clipping or float("inf")
        norms.append(nn.utils.clip_grad_norm_(parameters.values(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss)
    return losses, norms, parameters


def set_values(parameters, values):
    for name, parameter in parameters.items():
        parameter.data.copy_(values[name])
