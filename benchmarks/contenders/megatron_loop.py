"""Megatron-core's training loop with the schedule and the shards of ds_lgamp, and with Megatron-FSDP."""

from typing import Any

import torch
from torch import nn

from benchmarks.contenders import Layout
from benchmarks.contenders.megatron_core import MegatronBlock, MegatronCore
from benchmarks.model import block_elements
from ds_lgamp.config import LgampConfig
from testing import cpu_shim

RESIDENT_CHUNKS = 2


class InLoop(MegatronCore):
    """ds_lgamp behind Megatron-core's schedules. Every block is a chunk.

    Args:
        layout: ranks and model.
        zero_stage: 1 with Megatron-core's distributed optimizer, or 2 or 3 with sharded chunks.
        recompute: see :class:`~benchmarks.model.Block`.
    """

    def __init__(self, layout: Layout, zero_stage: int, recompute: bool = True) -> None:
        cpu_shim.install(everywhere=False)
        from ds_lgamp.integrations.megatron.loop.arguments import Job
        from ds_lgamp.integrations.megatron.loop.install import install_schedules, uninstall

        self.zero_stage = zero_stage
        settings = LgampConfig(resident_chunks=RESIDENT_CHUNKS)
        with cpu_shim.ToCpu():
            install_schedules(Job(settings, zero_stage, {}))
        super().__init__(layout, interleaved=True, recompute=recompute)
        # The next contender in this process takes Megatron-core's own schedules.
        uninstall()

    @property
    def _distributed(self) -> bool:
        return self.zero_stage == 1

    def _wrap(self, chunk: nn.Module) -> Any:
        if self.zero_stage == 1:
            return super()._wrap(chunk)
        from megatron.core.distributed import DistributedDataParallelConfig

        from ds_lgamp.integrations.megatron.loop.sharded_model import ShardedChunk

        return ShardedChunk(self.config, DistributedDataParallelConfig(), chunk)


class MegatronFsdp(MegatronCore):
    """Megatron-FSDP, which shards parameters, gradients and states of every block. It has no pipelines.

    Args:
        layout: ranks and model.
        recompute: see :class:`~benchmarks.model.Block`.
    """

    def __init__(self, layout: Layout, recompute: bool = True) -> None:
        super().__init__(layout, recompute=recompute)

    def _wrap(self, chunk: nn.Module) -> Any:
        from megatron.core.distributed import DistributedDataParallelConfig, FullyShardedDataParallel

        # It writes the number of the current device behind "cuda:", only to compare it with the device given.
        vars(torch.cuda)["current_device"] = lambda: 0
        settings = DistributedDataParallelConfig(
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            use_distributed_optimizer=True,
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy="optim_grads_params",
            # fp32 weights need no second copy for the optimizer.
            preserve_fp32_weights=False,
            # By default it prefetches 500 million elements, which is all of a small model. These are a block ahead.
            suggested_communication_unit_size=2 * block_elements(self.layout.size),
            # gloo cannot multiply gradients while it adds them up.
            gradient_reduce_div_fusion=False,
        )
        return FullyShardedDataParallel(
            self.config, settings, chunk, fsdp_unit_modules=[MegatronBlock], device=torch.device("cpu")
        )
