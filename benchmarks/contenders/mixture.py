"""A mixture of experts of transformers, whose experts ranks divide by DeepSpeed's AutoEP, with a block or without."""

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import transformers
from deepspeed.utils import groups

from benchmarks.contenders import Layout
from benchmarks.contenders.door import HEAD_WIDTH, HostModel, Script, alone, batch_of, one_block_ahead, with_batch
from benchmarks.contenders.zero import by_blocks
from benchmarks.model import ModelSize

EXPERTS, CHOSEN = 8, 2
"""Experts of a block, and how many of them a token chooses."""


def deepseek(size: ModelSize) -> Any:
    """Makes a DeepSeek-V3 with experts in every block, and with the same values in every process. With transformers
    5.23, DeepSpeed's AutoEP fails for Mixtral and Qwen3-MoE."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.width,
        moe_intermediate_size=size.width,
        num_hidden_layers=size.blocks,
        num_attention_heads=size.width // HEAD_WIDTH,
        num_key_value_heads=size.width // HEAD_WIDTH,
        q_lora_rank=None,
        kv_lora_rank=HEAD_WIDTH,
        qk_rope_head_dim=HEAD_WIDTH // 2,
        qk_nope_head_dim=HEAD_WIDTH // 2,
        v_head_dim=HEAD_WIDTH,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        max_position_embeddings=size.sequence,
    )
    return transformers.DeepseekV3ForCausalLM(config)


DEEPSEEK = HostModel(deepseek, batch_of, "model.layers")


@lru_cache
def reference(size: ModelSize, data_ranks: int, steps: tuple[int, ...]) -> list[float]:
    """Mean loss of each step in one process without parallelism, a :data:`benchmarks.model.Reference`."""
    return alone(deepseek(size), size, data_ranks, steps)


def is_divided(name: str) -> bool:
    """Whether ranks divide the parameter ``name`` of the model."""
    return ".experts." in name


class DividedExperts(Script):
    """The script of :class:`Script`, with ``expert_parallel`` in the configuration at stage 3.

    Args:
        layout: one pipeline rank, and the model.
        accumulation: micro-batches of a rank per step.
        expert_ranks: among how many ranks experts are divided.
        block: the block; None for stock DeepSpeed.
    """

    def __init__(
        self, layout: Layout, accumulation: int, expert_ranks: int, block: dict[str, Any] | None = None
    ) -> None:
        self.expert_ranks = expert_ranks
        super().__init__(layout, 3, accumulation, block, DEEPSEEK)

    def configuration(self, stage: int, accumulation: int, block: dict[str, Any] | None) -> dict[str, Any]:
        elements = sum(
            parameter.numel() // (self.expert_ranks if is_divided(name) else 1)
            for name, parameter in self.blocks[0].named_parameters()
        )
        zero = {"stage": stage, **by_blocks(elements), **one_block_ahead(elements)}
        experts = {"enabled": True, "autoep_size": self.expert_ranks}
        return {**with_batch(self.layout.size, accumulation, zero, block), "expert_parallel": experts}

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """Returns the ranks that have copies of an expert, and those that exchange tokens."""
        name = f"ep_size_{self.expert_ranks}"
        copies, exchange = groups._get_expert_data_parallel_group(name), groups._get_expert_parallel_group(name)
        return {"experts": copies, "tokens": exchange}
