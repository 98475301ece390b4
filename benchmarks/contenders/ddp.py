"""PyTorch's DistributedDataParallel around the same blocks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders import Layout
from benchmarks.model import block_elements, build_blocks, build_optimizer, loss_function, micro_batch

MEGABYTE = 1 << 20


class Ddp:
    """Runs forward and backward of each micro-batch in turn. DistributedDataParallel reduces gradients during the last
    one (``no_sync`` in all others). A bucket is one block, as in all other contenders."""

    def __init__(self, layout: Layout, recompute: bool = True) -> None:
        self.layout, size = layout, layout.size
        blocks = nn.Sequential(*build_blocks(size, range(size.blocks), recompute))
        bucket = block_elements(size) * torch.float32.itemsize / MEGABYTE
        self.model = DistributedDataParallel(blocks, bucket_cap_mb=bucket)
        self.optimizer = build_optimizer(self.model.parameters())

    def step(self, step: int, micro_batches: int) -> float:
        total = torch.zeros(())
        for index in range(micro_batches):
            self.model.require_backward_grad_sync = index == micro_batches - 1
            inputs, target = micro_batch(self.layout.size, step, micro_batches * dist.get_rank() + index)
            loss = loss_function(self.model(inputs), target) / micro_batches
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / self.layout.data_ranks

    def held(self) -> int:
        return self.layout.size.blocks
