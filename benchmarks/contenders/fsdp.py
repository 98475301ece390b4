"""PyTorch's FSDP2 with gradient accumulation."""

from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from benchmarks.contenders import Layout
from benchmarks.contenders.bare import accumulate
from benchmarks.model import build_blocks, build_optimizer


class Accumulation:
    """FSDP2 with one ``fully_shard`` group per block.

    Args:
        layout: ranks and model.
        deferred_sync: whether to reduce gradients only after the last micro-batch; full gradients are held until then.
        kept: whether gathered parameters stay until the end of the step.
        recompute: see :class:`~benchmarks.model.Block`.
        replicas: groups of neighbouring ranks, each of which shards the parameters among its own ranks (HSDP).
        offload: whether parameters, gradients and optimizer state lie in the memory of the host.
    """

    def __init__(
        self,
        layout: Layout,
        deferred_sync: bool = False,
        kept: bool = False,
        recompute: bool = True,
        replicas: int = 1,
        offload: bool = False,
    ) -> None:
        self.layout, self.deferred_sync, self.kept = layout, deferred_sync, kept
        mesh = init_device_mesh("cpu", (layout.data_ranks,))
        if replicas > 1:
            shape = replicas, layout.data_ranks // replicas
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        blocks = build_blocks(layout.size, range(layout.size.blocks), recompute)
        self.model = nn.Sequential(*blocks)
        policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
        shard = partial(fully_shard, mesh=mesh, offload_policy=policy)
        for block in blocks:
            # The backward pass begins with the last block, so freeing it would only gather it again.
            shard(block, reshard_after_forward=not kept and block is not blocks[-1])
        shard(self.model, reshard_after_forward=not kept)
        self.optimizer = build_optimizer(self.model.parameters())

    def step(self, step: int, micro_batches: int) -> float:
        first = micro_batches * dist.get_rank()
        numbers = range(first, first + micro_batches)
        total = accumulate(self.model, self.optimizer, self.layout.size, step, numbers, self._prepare)
        dist.all_reduce(total)
        return total.item() / self.layout.data_ranks

    def _prepare(self, is_last: bool) -> None:
        assert isinstance(self.model, FSDPModule)
        if self.deferred_sync:
            self.model.set_requires_gradient_sync(is_last)
        if self.kept:
            self.model.set_reshard_after_backward(is_last)

    def held(self) -> int:
        return sum(is_gathered(block) for block in self.model)


def is_gathered(block: nn.Module) -> bool:
    """Whether the full parameters, or memory for their gather in progress, exist. Always true without sharding."""
    if not isinstance(block, FSDPModule):
        return True
    group = block._get_fsdp_state()._fsdp_param_group
    outputs = [output for parameter in group.fsdp_params for output in parameter.all_gather_outputs]
    return group._all_gather_result is not None or any(output.untyped_storage().size() > 0 for output in outputs)
