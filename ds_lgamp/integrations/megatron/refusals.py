"""What Megatron-core offers and another order of work cannot honour."""

from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.utils import get_model_type

from ds_lgamp.config import BLOCK, ConfigError

_ONLY = {
    "overlap_moe_expert_parallel_comm": (False, None),
    "hybrid_context_parallel": (False, None),
    "fine_grained_activation_offloading": (False, None),
    "num_microbatches_with_partial_activation_checkpoints": (None,),
    "cuda_graph_impl": ("none", None),
}
"""Settings that rest upon Megatron-core's own schedules, and the values they may have."""


def refuse_unsupported(model: torch.nn.Module, config: Any) -> None:
    """Raises ConfigError for settings of the model that need one of Megatron-core's own schedules."""
    for name, allowed in _ONLY.items():
        value = getattr(config, name, None)
        if value not in allowed:
            raise ConfigError(
                f"{name} is {value!r}, which needs Megatron-core's own schedules; set it to {allowed[0]!r} or remove "
                f"the {BLOCK} block"
            )
    if get_model_type(model) == ModelType.encoder_and_decoder:
        raise ConfigError(f"the model has an encoder and a decoder; remove the {BLOCK} block")
