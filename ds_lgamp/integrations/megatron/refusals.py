"""What Megatron-core offers and another order of work cannot honour."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.utils import get_model_type

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.megatron.several_chunks import has_two_embeddings

_ONLY = {
    "overlap_moe_expert_parallel_comm": (False, None),
    "hybrid_context_parallel": (False, None),
    "fine_grained_activation_offloading": (False, None),
    "num_microbatches_with_partial_activation_checkpoints": (None,),
    "cuda_graph_impl": ("none", None),
}
"""Settings that rest upon Megatron-core's own schedules, and the values they may have."""


def refuse_unsupported(models: Sequence[torch.nn.Module], config: Any, pipeline_ranks: int) -> None:
    """Raises ConfigError for settings that need one of Megatron-core's own schedules, and for chunks of one pipeline
    rank that would train two embeddings where the model has one."""
    for name, allowed in _ONLY.items():
        value = getattr(config, name, None)
        if value not in allowed:
            raise ConfigError(
                f"{name} is {value!r}, which needs Megatron-core's own schedules; set it to {allowed[0]!r} or remove "
                f"the {BLOCK} block"
            )
    if get_model_type(models[0]) == ModelType.encoder_and_decoder:
        raise ConfigError(f"the model has an encoder and a decoder; remove the {BLOCK} block")
    if pipeline_ranks == 1 and has_two_embeddings(models):
        raise ConfigError(
            "share_embeddings_and_output_weights is True, but the first and the last chunk of this rank have a weight "
            "each; call ds_lgamp.integrations.megatron.several_chunks.share_embedding before DistributedDataParallel"
        )
