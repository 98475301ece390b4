"""Bytes per element under a configuration and an optimizer."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DtypeEnum

from ds_lgamp.cost.state import ElementBytes
from ds_lgamp.integrations.deepspeed.config.optimizer_choice import (
    choose_optimizer,
    counterpart,
    kernels_of,
    state_tensors,
    updates_in_place,
)
from ds_lgamp.integrations.deepspeed.config.precision import accumulation_dtype, parameter_dtype
from ds_lgamp.optimizers.lamb import Lamb


@dataclass(frozen=True)
class OptimizerFacts:
    """What is known of an optimizer before it takes a step."""

    name: str
    state_tensors: int | None = None
    """How many tensors of a parameter's shape it keeps; None if unknown."""
    temporary_tensors: int | None = None
    """How many tensors of the shape of one unit's part its step takes for a moment; None if unknown."""


def optimizer_facts(optimizer: Any, config: Any) -> OptimizerFacts:
    """Returns the facts of the user's ``optimizer``, or of the one that ``config``, a DeepSpeedConfig, names."""
    if isinstance(optimizer, torch.optim.Optimizer):
        kind, options = type(optimizer), optimizer.param_groups
    elif optimizer is not None:
        return OptimizerFacts("made by a function")
    else:
        device = torch.device(get_accelerator().current_device_name())
        named = config.optimizer_params or {}
        choice = choose_optimizer(config.optimizer_name, named, device, kernels_of(device))
        kind, options = choice.kind, [choice.options]
    counts = [state_tensors(kind, group) for group in options]
    return OptimizerFacts(
        kind.__name__,
        None if None in counts else max(count for count in counts if count is not None),
        _temporary_tensors(kind, options),
    )


def element_bytes(config: Any, optimizer: OptimizerFacts) -> tuple[str, ElementBytes]:
    """Returns the name of the precision and the bytes per element."""
    weights, gradients = parameter_dtype(config), accumulation_dtype(config)
    travelling = config.communication_data_type or gradients
    size = ElementBytes(
        weights.itemsize, gradients.itemsize, communication=None if travelling == gradients else travelling.itemsize
    )
    state = None if optimizer.state_tensors is None else optimizer.state_tensors * size.master
    temporary = optimizer.temporary_tensors
    update = None if temporary is None else temporary * size.master
    return DtypeEnum(weights).name, replace(size, optimizer=state, update=update)


def _temporary_tensors(kind: type, options: list[dict[str, Any]]) -> int | None:
    if counterpart(kind) is Lamb:
        return 1
    return 0 if all(updates_in_place(kind, group) for group in options) else None
