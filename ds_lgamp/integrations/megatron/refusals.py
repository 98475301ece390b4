"""What Megatron-core offers and another order of work cannot honour."""

from typing import Any

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.megatron.batch import Batch
from ds_lgamp.integrations.megatron.several_chunks import has_two_embeddings

_ONLY = {
    "overlap_moe_expert_parallel_comm": (False, None),
    "hybrid_context_parallel": (False, None),
    "fine_grained_activation_offloading": (False, None),
    "cpu_offloading": (False, None),
    "num_microbatches_with_partial_activation_checkpoints": (None,),
    "cuda_graph_impl": ("none", None),
}
"""Settings that rest upon Megatron-core's own schedules, and the values they may have."""


def refuse_settings(settings: Any, chunks_on_one_rank: bool) -> None:
    """Raises ConfigError for what needs one of Megatron-core's own schedules.

    Args:
        settings: Megatron-LM's arguments, or a TransformerConfig.
        chunks_on_one_rank: whether there are several chunks, and one pipeline rank.
    """
    for name, allowed in _ONLY.items():
        value = getattr(settings, name, None)
        if value not in allowed:
            raise ConfigError(
                f"{name} is {value!r}, which needs Megatron-core's own schedules; set it to {allowed[0]!r} or remove "
                f"the {BLOCK} block"
            )
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


def refuse_unsupported(batch: Batch) -> None:
    """Raises ConfigError for settings of the model, for chunks that share one iterator, and for chunks of one pipeline
    rank that would train two embeddings where the model has one."""
    several = len(batch.models) > 1
    refuse_settings(batch.config, several and batch.pipeline_ranks == 1)
    if len(batch.iterators) != len(batch.models):
        raise ConfigError(
            f"data_iterator is {len(batch.iterators)} for {len(batch.models)} chunks, which would read each other's "
            "micro-batches; give a list with one for each"
        )
    if batch.pipeline_ranks == 1 and has_two_embeddings(batch.models):
        raise ConfigError(
            "share_embeddings_and_output_weights is True, but the first and the last chunk of this rank have a weight "
            "each; call ds_lgamp.integrations.megatron.several_chunks.share_embedding before DistributedDataParallel"
        )
