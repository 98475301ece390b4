"""Runs a program with torch and gloo calls alone, without an engine. Shows the best time this machine allows."""

import torch
import torch.distributed as dist

from benchmarks.virtual.chunk import Setting, loss_function
from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.schedule.program import build_rank_program
from ds_lgamp.schedule.spec import ProgramSpec

TAGS = {Kind.RECV_FORWARD: 0, Kind.SEND_FORWARD: 0, Kind.RECV_BACKWARD: 1, Kind.SEND_BACKWARD: 1}
"""Tags separate activations from gradients between the same ranks."""


class BareLoop:
    """Computes, posts, sends and waits in the program's order. Checks nothing, and keeps sent tensors until the end of
    the step."""

    def __init__(self, setting: Setting, spec: ProgramSpec) -> None:
        self.setting, self.rank = setting, dist.get_rank()
        self.chunks = setting.chunks_of(self.rank)
        self.program = build_rank_program(spec, self.rank)
        self.weights = [chunk.weight for chunk in self.chunks.values()]

    def step(self) -> float | None:
        self.under_way: list[tuple[dist.Work, torch.Tensor]] = []
        self.posted: dict[tuple[Kind, int, int], tuple[dist.Work, torch.Tensor]] = {}
        self.results: dict[tuple[Kind, int, int], torch.Tensor] = {}
        self.graphs: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.losses: list[torch.Tensor] = []
        for action in self.program:
            self._execute(action)
        for work, _ in self.under_way:
            work.wait()
        for weight in self.weights:
            weight.grad = None
        return torch.stack(self.losses).mean().item() if self.losses else None

    def _execute(self, action: Action) -> None:
        kind, chunk, micro_batch, *_ = action
        if kind is Kind.FORWARD:
            self._forward(chunk, micro_batch)
        elif kind is Kind.BACKWARD:
            self._backward(chunk, micro_batch)
        elif kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            computed = Kind.FORWARD if kind is Kind.SEND_FORWARD else Kind.BACKWARD
            tensor = self.results.pop((computed, chunk, micro_batch))
            peer = self.rank + (1 if kind is Kind.SEND_FORWARD else -1)
            self.under_way.append((dist.isend(tensor, peer % self.setting.pipeline_ranks, tag=TAGS[kind]), tensor))
        elif kind in TAGS:
            tensor = torch.empty(1, self.setting.elements)
            peer = self.rank + (-1 if kind is Kind.RECV_FORWARD else 1)
            work = dist.irecv(tensor, peer % self.setting.pipeline_ranks, tag=TAGS[kind])
            self.posted[kind, chunk, micro_batch] = work, tensor

    def _forward(self, chunk: int, micro_batch: int) -> None:
        if chunk == 0:
            inputs = self.setting.micro_batch(micro_batch)
        else:
            inputs = self._take(Kind.RECV_FORWARD, chunk, micro_batch).requires_grad_()
        result = self.chunks[chunk](inputs)
        if chunk == self.setting.chunks - 1:
            result = loss_function(result, result)
            self.losses.append(result.detach())
        else:
            self.results[Kind.FORWARD, chunk, micro_batch] = result.detach()
        self.graphs[chunk, micro_batch] = inputs, result

    def _backward(self, chunk: int, micro_batch: int) -> None:
        inputs, result = self.graphs.pop((chunk, micro_batch))
        if chunk == self.setting.chunks - 1:
            gradient = torch.full_like(result, 1 / self.setting.micro_batches)
        else:
            gradient = self._take(Kind.RECV_BACKWARD, chunk, micro_batch)
        torch.autograd.backward(result, gradient)
        if chunk > 0:
            assert inputs.grad is not None
            self.results[Kind.BACKWARD, chunk, micro_batch] = inputs.grad

    def _take(self, kind: Kind, chunk: int, micro_batch: int) -> torch.Tensor:
        work, tensor = self.posted.pop((kind, chunk, micro_batch))
        work.wait()
        return tensor
