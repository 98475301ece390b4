"""Partitions the parameters of a rank's chunks: a unit for each chunk, and one for a tied embedding."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.megatron.loop.batch import device_of
from ds_lgamp.integrations.megatron.loop.several_chunks import in_common
from ds_lgamp.integrations.megatron.loop.sharded.flags import EXPERTS
from ds_lgamp.integrations.megatron.loop.sharded.model import ShardedChunk
from ds_lgamp.partition.agreement import everyone
from ds_lgamp.partition.flat_storage import UnitParameter
from ds_lgamp.partition.policy import ZeroPolicy
from ds_lgamp.partition.unit import Unit
from ds_lgamp.partition.zero_partition import TiedParameters, ZeroPartition, build_partition

EMBEDDING = "embedding"
"""The key of the tied embedding."""


def shard(models: Sequence[ShardedChunk], groups: Sequence[Mapping[str, Any]], zero_stage: int) -> ZeroPartition:
    """Partitions the parameters of ``models`` over the data-parallel ranks, and hands the models their units.

    Args:
        models: the chunks of this rank, in the order of the model.
        groups: the optimizer's groups of whole parameters.
        zero_stage: 2 or 3.

    Raises ConfigError if a model has experts, parameters that chunks or pipeline ranks have in common, or a tied
    embedding of which one copy is frozen and another is not.
    """
    for model in models:
        _refuse_experts(model)
    pipeline = models[0].groups.pp
    if pipeline.size() > 1 and getattr(models[0].config, "has_cond_embedder", False):
        raise ConfigError(
            "has_cond_embedder is True beside zero_optimization.stage 2 or 3, which do not sum the gradients of these "
            "embedders over pipeline ranks; set stage 1"
        )
    numbers = range(pipeline.rank(), pipeline.size() * len(models), pipeline.size())
    group_of = {id(parameter): index for index, group in enumerate(groups) for parameter in group["params"]}
    chunks: dict[int, list[UnitParameter]] = {number: [] for number in numbers}
    embedding = _tied_embedding(models, pipeline.size())
    _refuse_common(models, embedding)
    tied: list[UnitParameter] = []
    users: list[int] = []
    for number, model in zip(numbers, models):
        for name, parameter in unwrap_model(model).named_parameters():
            entry = _entry(f"{number}.{name}", parameter, group_of.get(id(parameter)), model)
            if parameter is embedding:
                tied, users = tied or [entry], users or [number]
            else:
                chunks[number].append(entry)
    tie_group = None
    if pipeline.size() > 1:
        tie_group = models[0].groups.embd
        if embedding is not None:
            _refuse_half_frozen(embedding, tie_group)
    elif tied:
        users.append(numbers[-1])
    partition = build_partition(
        chunks,
        [TiedParameters(EMBEDDING, tied, users, tie_group)] if tied else [],
        _policy(models[0], zero_stage),
        device_of(models),
    )
    partition.release_all()
    _hand_out(partition, dict(zip(numbers, models)))
    return partition


def _refuse_experts(model: ShardedChunk) -> None:
    experts = getattr(model.config, "num_moe_experts", None)
    # So Megatron-core marks parameters that data-parallel ranks do not have in common.
    if experts is not None or not all(getattr(parameter, "allreduce", True) for parameter in model.parameters()):
        raise ConfigError(f"num_moe_experts is {experts} beside zero_optimization.stage 2 or 3: {EXPERTS}")


def _refuse_common(models: Sequence[ShardedChunk], embedding: torch.nn.Parameter | None) -> None:
    """Raises ConfigError if two chunks have a parameter in common, other than the tied ``embedding``. Each would have a
    copy that the other does not see."""
    for name, parameter, number, owner in in_common(models):
        if parameter is not embedding:
            raise ConfigError(
                f"{name} of chunk {number} on this rank is also a parameter of chunk {owner}, but stages 2 and 3 "
                "partition each chunk by itself; put modules that share parameters into one chunk"
            )


def _refuse_half_frozen(embedding: torch.nn.Parameter, tie_group: dist.ProcessGroup) -> None:
    """Raises ConfigError if only some copies of the tied ``embedding`` train. Collective over ``tie_group``, whose
    ranks would wait for the gradients of those that have none."""
    if len(set(everyone(embedding.requires_grad, tie_group))) > 1:
        raise ConfigError(
            "requires_grad of the tied embedding is False on one pipeline rank, but True on another; freeze the weight "
            "of the embedding in the first chunk and that of output_layer in the last, or neither"
        )


def _hand_out(partition: ZeroPartition, models: Mapping[int, ShardedChunk]) -> None:
    given: set[Unit] = set()
    for number, model in models.items():
        own = [unit for unit in partition.chunk_units[number] if unit.trains and unit not in given]
        given.update(own)
        model.shard(partition, own)


def _tied_embedding(models: Sequence[ShardedChunk], pipeline_ranks: int) -> torch.nn.Parameter | None:
    """The weight of this rank that computes at both ends of the model; None if there is none or if one chunk has both
    ends."""
    first, last = unwrap_model(models[0]), unwrap_model(models[-1])
    if pipeline_ranks == 1:
        tied = len(models) > 1 and getattr(last, "share_embeddings_and_output_weights", False)
        return first.shared_embedding_or_output_weight() if tied else None
    marked = (
        parameter
        for model in models
        for parameter in model.parameters()
        if getattr(parameter, "shared_embedding", False)
    )
    return next(marked, None)


def _entry(name: str, parameter: torch.nn.Parameter, group: int | None, model: ShardedChunk) -> UnitParameter:
    """Describes how tensor-parallel ranks share a parameter, as ``finalize_model_grads`` of Megatron-core sees it."""
    config, ranks = model.config, model.tp_group.size()
    if ranks == 1:
        return UnitParameter(name, parameter, group)
    marked: Any = parameter
    sliced = marked.partition_dim if getattr(marked, "tensor_model_parallel", False) else None
    of_heads = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
    partial = of_heads or (config.sequence_parallel and getattr(marked, "sequence_parallel", False))
    if parameter.requires_grad and getattr(marked, "average_gradients_across_tp_domain", False):
        # The partition only sums what tensor-parallel ranks compute.
        parameter.register_hook(lambda gradient: gradient / ranks)
        partial = True
    return UnitParameter(name, parameter, group, sliced, partial)


def _policy(model: ShardedChunk, zero_stage: int) -> ZeroPolicy:
    """The policy of all units. Gradients accumulate and travel in the same dtype, as in Megatron-core."""
    return ZeroPolicy(
        model.dp_cp_group,
        zero_stage,
        gradient_dtype=torch.float32 if model.ddp_config.grad_reduce_in_fp32 else None,
        tensor_group=model.tp_group if model.tp_group.size() > 1 else None,
    )
