"""PyTorch's pipeline schedules over FSDP2."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleLoopedBFS

from benchmarks.contenders import Layout
from benchmarks.contenders.fsdp import is_gathered
from benchmarks.model import build_blocks, build_optimizer, loss_function, micro_batch

SCHEDULES = {"looped_bfs": ScheduleLoopedBFS, "interleaved_1f1b": ScheduleInterleaved1F1B}


class Pipeline:
    """One ``fully_shard`` group per block, every block recomputed.

    A stage has one block, stage s is on rank s mod P.

    Args:
        schedule: a key of ``SCHEDULES``.
        reshard: whether the forward pass of every micro-batch frees the parameters it used.
    """

    def __init__(self, layout: Layout, schedule: str, reshard: bool) -> None:
        self.layout, self.schedule_name = layout, schedule
        shape = (layout.pipeline_ranks, layout.data_ranks)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pipeline", "data"))
        self.pipeline, self.data = mesh.get_group("pipeline"), mesh.get_group("data")
        self.modules: dict[int, nn.Sequential] = {}
        for stage in range(dist.get_rank(self.pipeline), layout.size.blocks, layout.pipeline_ranks):
            (block,) = build_blocks(layout.size, [stage], recompute=True)
            fully_shard(block, mesh=mesh["data"], reshard_after_forward=reshard)
            self.modules[stage] = fully_shard(nn.Sequential(block), mesh=mesh["data"], reshard_after_forward=reshard)
        self.optimizer = build_optimizer(nn.ModuleList(self.modules.values()).parameters())
        self.built_for = 0

    def step(self, step: int, micro_batches: int) -> float | None:
        layout = self.layout
        if self.built_for != micro_batches:
            # Only the latest is kept: its stages have receive buffers for all micro-batches.
            self.schedule, self.built_for = self._build(micro_batches), micro_batches
        first = micro_batches * dist.get_rank(self.data)
        inputs, targets = (
            torch.cat([micro_batch(layout.size, step, first + index)[part] for index in range(micro_batches)])
            if stage in self.modules
            else None
            for part, stage in enumerate((0, layout.size.blocks - 1))
        )
        losses: list[torch.Tensor] = []
        arguments = () if inputs is None else (inputs,)
        self.schedule.step(*arguments, target=targets, losses=losses, return_outputs=False)
        del arguments, inputs, targets
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not losses:
            return None
        total = torch.stack(losses).detach().sum()
        dist.all_reduce(total, group=self.data)
        return total.item() / (micro_batches * layout.data_ranks)

    def held(self) -> int:
        return sum(is_gathered(block) for module in self.modules.values() for block in module)

    def _build(self, micro_batches: int) -> Any:
        stages = [self._stage(index, module) for index, module in self.modules.items()]
        return SCHEDULES[self.schedule_name](stages, micro_batches, loss_fn=loss_function)

    def _stage(self, index: int, module: nn.Sequential) -> PipelineStage:
        size = self.layout.size
        # With these the shapes need not be found in a trial run.
        inputs, outputs = (
            torch.empty(size.samples, size.sequence, size.width, device="meta", requires_grad=needed)
            for needed in (index > 0, True)
        )
        return PipelineStage(module, index, size.blocks, torch.device("cpu"), inputs, outputs, group=self.pipeline)
