"""PyTorch's FSDP2 with gradient accumulation."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.contenders import Layout
from benchmarks.model import build_blocks, build_optimizer, loss_function, micro_batch


class Accumulation:
    """FSDP2 with one ``fully_shard`` group per block.

    Args:
        layout: ranks and model.
        deferred_sync: whether to reduce gradients only after the last micro-batch; full gradients are held until then.
        kept: whether gathered parameters stay until the end of the step.
        recompute: whether to recompute every block in the backward pass.
    """

    def __init__(self, layout: Layout, deferred_sync: bool = False, kept: bool = False, recompute: bool = True) -> None:
        self.layout, self.deferred_sync, self.kept = layout, deferred_sync, kept
        mesh = init_device_mesh("cpu", (layout.data_ranks,))
        blocks = build_blocks(layout.size, range(layout.size.blocks), recompute)
        self.model = nn.Sequential(*blocks)
        for block in blocks:
            # The backward pass begins with the last block, so freeing it would only gather it again.
            fully_shard(block, mesh=mesh, reshard_after_forward=not kept and block is not blocks[-1])
        fully_shard(self.model, mesh=mesh, reshard_after_forward=not kept)
        self.optimizer = build_optimizer(self.model.parameters())

    def step(self, step: int, micro_batches: int) -> float:
        assert isinstance(self.model, FSDPModule)
        total = torch.zeros(())
        first = micro_batches * dist.get_rank()
        for index in range(micro_batches):
            last = index == micro_batches - 1
            if self.deferred_sync:
                self.model.set_requires_gradient_sync(last)
            if self.kept:
                self.model.set_reshard_after_backward(last)
            inputs, target = micro_batch(self.layout.size, step, first + index)
            loss = loss_function(self.model(inputs), target) / micro_batches
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / self.layout.data_ranks

    def held(self) -> int:
        return sum(is_gathered(block) for block in self.model)


def is_gathered(block: nn.Module) -> bool:
    """Whether the full parameters, or memory for their gather in progress, exist. Always true without sharding."""
    if not isinstance(block, FSDPModule):
        return True
    group = block._get_fsdp_state()._fsdp_param_group
    outputs = [output for parameter in group.fsdp_params for output in parameter.all_gather_outputs]
    return group._all_gather_result is not None or any(output.untyped_storage().size() > 0 for output in outputs)
