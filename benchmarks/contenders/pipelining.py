"""PyTorch's pipeline schedules, with FSDP2 for data parallelism."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleLoopedBFS

from benchmarks.contenders import Layout
from benchmarks.contenders.fsdp import is_gathered
from benchmarks.model import build_blocks, build_optimizer, loss_function, micro_batch

SCHEDULES = {"looped_bfs": ScheduleLoopedBFS, "interleaved_1f1b": ScheduleInterleaved1F1B, "1f1b": Schedule1F1B}


class Pipeline:
    """PyTorch's pipeline with one ``fully_shard`` group per block.

    Stage s is on rank s mod P and has one block. 1F1B has one stage per rank, with an equal share of the blocks.

    Args:
        layout: ranks and model.
        schedule: a key of ``SCHEDULES``.
        reshard: whether every micro-batch's forward pass frees the parameters after use.
        recompute: see :class:`~benchmarks.model.Block`.
    """

    def __init__(self, layout: Layout, schedule: str, reshard: bool, recompute: bool = True) -> None:
        self.layout, self.schedule_name = layout, schedule
        self.stages = layout.pipeline_ranks if schedule == "1f1b" else layout.size.blocks
        blocks_per_stage = layout.size.blocks // self.stages
        shape = (layout.pipeline_ranks, layout.data_ranks)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pipeline", "data"))
        self.pipeline, self.data = mesh.get_group("pipeline"), mesh.get_group("data")
        all_at_turn = schedule == "looped_bfs"
        self.modules: dict[int, nn.Sequential] = {}
        for stage in range(dist.get_rank(self.pipeline), self.stages, layout.pipeline_ranks):
            first = stage * blocks_per_stage
            blocks = build_blocks(layout.size, range(first, first + blocks_per_stage), recompute, all_at_turn)
            module = nn.Sequential(*blocks)
            for sharded in (*blocks, module) if layout.data_ranks > 1 else ():
                fully_shard(sharded, mesh=mesh["data"], reshard_after_forward=reshard)
            self.modules[stage] = module
        self.optimizer = build_optimizer(nn.ModuleList(self.modules.values()).parameters())
        self.built_for = 0

    def step(self, step: int, micro_batches: int) -> float | None:
        layout = self.layout
        if self.built_for != micro_batches:
            # Keeps only the latest schedule, because its stages have receive buffers for all micro-batches.
            self.schedule, self.built_for = self._build(micro_batches), micro_batches
        first = micro_batches * dist.get_rank(self.data)
        inputs, targets = (
            torch.cat([micro_batch(layout.size, step, first + index)[part] for index in range(micro_batches)])
            if stage in self.modules
            else None
            for part, stage in enumerate((0, self.stages - 1))
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
        stages: Any = [self._stage(index, module) for index, module in self.modules.items()]
        if self.schedule_name == "1f1b":
            (stages,) = stages
        return SCHEDULES[self.schedule_name](stages, micro_batches, loss_fn=loss_function)

    def _stage(self, index: int, module: nn.Sequential) -> PipelineStage:
        size = self.layout.size
        hidden = torch.empty(size.samples, size.sequence, size.width, device="meta", requires_grad=True)
        # Given shapes save a trial run.
        inputs = hidden if index else micro_batch(size, 0, 0)[0].to("meta")
        outputs = hidden
        if size.vocabulary and index == self.stages - 1:
            outputs = torch.empty(size.samples, size.sequence, size.vocabulary, device="meta", requires_grad=True)
        return PipelineStage(module, index, self.stages, torch.device("cpu"), inputs, outputs, group=self.pipeline)
