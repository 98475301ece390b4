"""PyTorch's DistributedDataParallel around the same blocks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders import Layout
from benchmarks.contenders.bare import accumulate
from benchmarks.model import block_elements, build_blocks, build_optimizer

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
        first = micro_batches * dist.get_rank()
        numbers = range(first, first + micro_batches)
        total = accumulate(self.model, self.optimizer, self.layout.size, step, numbers, self._reduce_if)
        dist.all_reduce(total)
        return total.item() / self.layout.data_ranks

    def _reduce_if(self, is_last: bool) -> None:
        self.model.require_backward_grad_sync = is_last

    def held(self) -> int:
        return self.layout.size.blocks
