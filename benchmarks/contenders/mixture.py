"""A mixture of experts of transformers: ranks divide the experts by DeepSpeed's AutoEP, with a block or without, or
FSDP2 shards them as everything else."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.utils import groups
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ds_lgamp
from benchmarks.contenders import Layout
from benchmarks.contenders.door import HEAD_WIDTH, HostModel, Script, batch_of
from benchmarks.contenders.fsdp import is_gathered
from benchmarks.contenders.zero import by_blocks
from benchmarks.model import ModelSize, build_optimizer, losses_alone
from testing.deepspeed_rank import is_ours, quiet

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
    model = deepseek(size)
    return losses_alone(model, lambda tokens, _: model(input_ids=tokens, labels=tokens).loss, size, data_ranks, steps)


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
        self.layout, self.host, self.expert_ranks = layout, DEEPSEEK, expert_ranks
        model = deepseek(layout.size)
        self.blocks = model.get_submodule(DEEPSEEK.blocks)
        elements = sum(
            parameter.numel() // (expert_ranks if is_divided(name) else 1)
            for name, parameter in self.blocks[0].named_parameters()
        )
        config = {
            "train_micro_batch_size_per_gpu": layout.size.samples,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 0.0,
            "zero_optimization": {
                "stage": 3,
                **by_blocks(elements),
                "stage3_param_persistence_threshold": 0,
                "stage3_max_live_parameters": 2 * elements,
                "stage3_max_reuse_distance": 2 * elements,
                "stage3_prefetch_bucket_size": elements,
                "sub_group_size": elements,
            },
            "expert_parallel": {"enabled": True, "autoep_size": expert_ranks},
            **({} if block is None else {"ds_lgamp": block}),
        }
        if block is not None:
            ds_lgamp.install()
        with quiet():
            self.engine, *_ = deepspeed.initialize(
                model=model, optimizer=build_optimizer(model.parameters()), config=config
            )
        assert is_ours(self.engine) == (block is not None)

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """Returns the ranks that have copies of an expert, and those that exchange tokens."""
        name = f"ep_size_{self.expert_ranks}"
        copies, exchange = groups._get_expert_data_parallel_group(name), groups._get_expert_parallel_group(name)
        return {"experts": copies, "tokens": exchange}


class ShardedExperts:
    """FSDP2 with one ``fully_shard`` group per block, experts included.

    Args:
        layout: one pipeline rank, and the model.
        deferred_sync: whether to reduce gradients only after the last micro-batch; full gradients are held until then.
    """

    def __init__(self, layout: Layout, deferred_sync: bool = False) -> None:
        self.layout, self.deferred_sync = layout, deferred_sync
        self.model = deepseek(layout.size)
        self.blocks = self.model.get_submodule(DEEPSEEK.blocks)
        shard: Callable[..., Any] = partial(fully_shard, mesh=init_device_mesh("cpu", (layout.data_ranks,)))
        for block in self.blocks:
            shard(block, reshard_after_forward=block is not self.blocks[-1])
        shard(self.model)
        self.optimizer = build_optimizer(self.model.parameters())

    def step(self, step: int, micro_batches: int) -> float:
        total = torch.zeros(())
        for number in range(micro_batches):
            if self.deferred_sync:
                self.model.set_requires_gradient_sync(number == micro_batches - 1)
            batch = batch_of(self.layout.size, step, micro_batches * dist.get_rank() + number)
            loss = self.model(**batch).loss / micro_batches
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / self.layout.data_ranks

    def held(self) -> int:
        return sum(map(is_gathered, self.blocks))
