"""Refuses settings of Megatron-core that another order of work cannot honour."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.megatron.loop.batch import Batch
from ds_lgamp.integrations.megatron.loop.flags import refuse_flags, refuse_together
from ds_lgamp.integrations.megatron.loop.several_chunks import has_two_embeddings, in_common
from ds_lgamp.integrations.megatron.loop.sharded.model import partition_of


def refuse_settings(settings: Any, chunks_on_one_rank: bool) -> None:
    """Raises ConfigError for settings that need the whole model in one chunk on the only pipeline rank.

    Args:
        settings: Megatron-LM's arguments, or a TransformerConfig.
        chunks_on_one_rank: whether one pipeline rank has all chunks, and there are several.
    """
    if chunks_on_one_rank and getattr(settings, "perform_rl_step", False):
        raise ConfigError(
            "perform_rl_step is True, whose model for inference has no chunks; use more pipeline ranks, or set "
            "chunks_per_rank to 1"
        )
    if chunks_on_one_rank and getattr(settings, "mtp_num_layers", None):
        raise ConfigError(
            f"mtp_num_layers is {settings.mtp_num_layers}, whose chunk on the only pipeline rank would train an "
            "embedding of its own; use more pipeline ranks, or set chunks_per_rank to 1"
        )
    if chunks_on_one_rank and getattr(settings, "has_cond_embedder", False):
        raise ConfigError(
            "has_cond_embedder is True, whose embedders in the chunks of the only pipeline rank would differ after the "
            "first step; use more pipeline ranks, or set chunks_per_rank to 1"
        )


def refuse_unsupported(batch: Batch) -> None:
    """Raises ConfigError for settings of the model that cannot be honoured, for chunks that share one iterator, and for
    chunks of one pipeline rank that would train two embeddings although the model has one."""
    several = len(batch.models) > 1
    parts = [batch.config, getattr(batch.models[0], "ddp_config", Namespace())]
    for part in parts:
        refuse_flags(part)
    refuse_together(*parts)
    refuse_settings(batch.config, several and batch.pipeline_ranks == 1)
    if len(batch.iterators) != len(batch.models):
        raise ConfigError(
            f"data_iterator is {len(batch.iterators)} for {len(batch.models)} chunks, which would read each other's "
            "micro-batches; give a list with one for each"
        )
    if batch.pipeline_ranks == 1 and has_two_embeddings(batch.models):
        raise ConfigError(
            "share_embeddings_and_output_weights is True, but the first and the last chunk of this rank have a weight "
            "each; before DistributedDataParallel, call share_embedding of "
            "ds_lgamp.integrations.megatron.loop.several_chunks"
        )


def refuse_another_file(batch: Batch, settings: LgampConfig, zero_stage: int) -> None:
    """Raises ConfigError if a script with its own loop trains with another stage, other chunks or another recomputation
    than its configuration file names. Inside Megatron-LM's loop its flags were compared before."""
    if batch.forward_only:
        return
    distributed = getattr(getattr(batch.models[0], "ddp_config", None), "use_distributed_optimizer", None)
    if zero_stage <= 1 and distributed is not None and bool(distributed) != (zero_stage == 1):
        raise ConfigError(
            f"zero_optimization.stage is {zero_stage}, but DistributedDataParallelConfig.use_distributed_optimizer is "
            f"{distributed}; they mean the same, change one of them"
        )
    if settings.chunks_per_rank not in (None, len(batch.models)):
        raise ConfigError(
            f"{BLOCK}.chunks_per_rank is {settings.chunks_per_rank}, but the script has built {len(batch.models)} "
            "chunks on this rank; change one of them"
        )
    recompute = batch.config.recompute_granularity or "none"
    if "recompute" in settings.model_fields_set and settings.recompute != recompute:
        raise ConfigError(
            f"{BLOCK}.recompute is '{settings.recompute}', but recompute_granularity of the TransformerConfig is "
            f"{batch.config.recompute_granularity!r}; make them equal, or remove the key"
        )


def refuse_whole_models(batch: Batch, zero_stage: int) -> None:
    """Raises ConfigError if a batch trains models that are not sharded. Evaluation takes them as they are."""
    if not batch.forward_only and partition_of(batch.models) is None:
        raise ConfigError(
            f"zero_optimization.stage is {zero_stage}, but the model is in {type(batch.models[0]).__name__}; wrap the "
            "chunks in ShardedChunk of ds_lgamp.integrations.megatron.loop.sharded.model, and build the optimizer with "
            "get_megatron_optimizer"
        )


def refuse_gradients_left(batch: Batch) -> None:
    """Raises ConfigError if a batch for training would add to final gradients of sharded chunks, which the reduction
    would average once more."""
    partition = partition_of(batch.models)
    if batch.forward_only or partition is None:
        return
    if any(unit.reduction.is_final for unit in partition.units):
        raise ConfigError(
            "the last batch has left gradients, to which stages 2 and 3 cannot add those of another; call "
            "optimizer.step or zero_grad_buffer of every chunk before the next batch, or give both batches as one with "
            "more micro-batches"
        )


def refuse_common_parameters(models: Sequence[torch.nn.Module]) -> None:
    """Raises ConfigError if two chunks of this rank have a parameter that trains. Each of their
    DistributedDataParallel makes a buffer for its gradient, but the parameter refers to one of them."""
    if not all(isinstance(model, DistributedDataParallel) for model in models):
        return
    for name, parameter, number, owner in in_common(models):
        if parameter.requires_grad:
            raise ConfigError(
                f"{name} of chunk {number} on this rank is also a parameter of chunk {owner}, but "
                "DistributedDataParallel makes each of them a gradient of its own; put modules that share parameters "
                "into one chunk"
            )
