"""Megatron-LM's evaluation for scripts that ask a model for more than its loss."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from inspect import signature
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.megatron.loop.sharded.model import partition_of


def collecting(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Megatron-LM's ``evaluate`` with complete weights if the script collects more than losses: its
    ``process_non_loss_data_func`` runs a batch on the last rank alone, where no other rank would gather, and its
    ``non_loss_data_func`` may read weights.

    It raises ConfigError if ranks that do not run the batch of the last one share the model with it.
    """

    @wraps(evaluate)
    def with_complete_weights(*positional: Any, **options: Any) -> Any:
        given = signature(evaluate).bind(*positional, **options).arguments
        asks, processes = (given.get(name) is not None for name in ("non_loss_data_func", "process_non_loss_data_func"))
        if processes and not asks:
            _refuse_partners()
        partition = partition_of(given["model"]) if processes or asks else None
        with nullcontext() if partition is None else partition.full_parameters():
            return evaluate(*positional, **options)

    return with_complete_weights


def _refuse_partners() -> None:
    ranks = dist.get_world_size() // parallel_state.get_data_parallel_world_size()
    if ranks > 1:
        raise ConfigError(
            f"process_non_loss_data_func is given, for which the last rank evaluates alone, but {ranks} "
            "ranks share the model and would wait for each other; give non_loss_data_func, which all ranks call"
        )
