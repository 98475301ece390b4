"""What stages 2 and 3 replace in Megatron-core and in Megatron-LM's training loop."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from megatron.core import optimizer
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.utils import get_model_config

from ds_lgamp.integrations.megatron.loop.sharded.model import ShardedChunk, partition_of, whole
from ds_lgamp.integrations.megatron.loop.sharded.optimizer import sharding

Replacements = dict[Callable[..., Any], Callable[..., Any]]


def replacements(zero_stage: int) -> Replacements:
    """What takes the place of functions of Megatron-core."""
    build = optimizer.get_megatron_optimizer
    return {build: sharding(build, zero_stage)}


def training_replacements() -> Replacements:
    """What takes the place of functions of Megatron-LM that read all weights."""
    save = import_module("megatron.training.checkpointing").save_checkpoint
    norm = import_module("megatron.training.utils").calc_params_l2_norm
    return {save: with_whole_weights(save), norm: with_whole_weights(norm)}


def with_whole_weights(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which reads all chunks of a rank, its argument ``model``, with complete weights."""

    @wraps(function)
    def complete(*positional: Any, **options: Any) -> Any:
        partition = partition_of(signature(function).bind(*positional, **options).arguments["model"])
        # Shards need not follow: it changes nothing.
        with nullcontext() if partition is None else partition.full_parameters():
            return function(*positional, **options)

    return complete


def into_shards(load: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron-LM's ``load_checkpoint`` for sharded chunks: it loads complete weights, from which shards are taken."""

    @wraps(load)
    def load_checkpoint(ddp_model: list[torch.nn.Module], *positional: Any, **options: Any) -> Any:
        with whole(ddp_model):
            return load(ddp_model, *positional, **options)

    return load_checkpoint


def sharded_model(get_model: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron-LM's ``get_model`` with ShardedChunk in the place of DistributedDataParallel."""

    @wraps(get_model)
    def build(*positional: Any, **options: Any) -> list[torch.nn.Module]:
        call = signature(get_model).bind(*positional, **options)
        call.apply_defaults()
        wraps_chunks, call.arguments["wrap_with_ddp"] = call.arguments["wrap_with_ddp"], False
        models = get_model(*call.args, **call.kwargs)
        return _wrapped(models) if wraps_chunks else models

    return build


def _wrapped(models: list[torch.nn.Module]) -> list[torch.nn.Module]:
    args = import_module("megatron.training").get_args()
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        check_for_nan_in_grad=args.check_for_nan_in_loss_and_grad,
    )
    chunks = [ShardedChunk(get_model_config(models[0]), ddp_config, model) for model in models]
    if args.data_parallel_random_init:
        for chunk in chunks:
            chunk.broadcast_params()
    return list[torch.nn.Module](chunks)
