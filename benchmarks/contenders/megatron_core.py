"""Megatron-core's training loop around the same blocks: its schedules, DistributedDataParallel and optimizer."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.contenders import Layout
from benchmarks.model import ADAM_EPSILON, LEARNING_RATE, Block, block_elements, loss_function, micro_batch
from testing import cpu_shim

MicroBatch = tuple[torch.Tensor, torch.Tensor]


class MegatronCore:
    """Megatron-core with 1F1B, with the interleaved schedule, or without a pipeline.

    Data parallelism uses the distributed optimizer, whose collectives overlap with compute. A bucket is one block, as
    in all other contenders.

    Args:
        layout: ranks and model.
        interleaved: whether every block is a chunk; otherwise a pipeline rank has one chunk with all its blocks.
        one_group: whether all micro-batches pass a chunk before the next chunk; otherwise as many as there are pipeline
            ranks.
        recompute: see :class:`~benchmarks.model.Block`.
    """

    def __init__(
        self, layout: Layout, interleaved: bool = False, one_group: bool = False, recompute: bool = True
    ) -> None:
        cpu_shim.install(everywhere=False)
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        self.layout, self.one_group, self.recompute = layout, one_group, recompute
        self.virtual = layout.chunks_per_rank if interleaved else None
        with cpu_shim.ToCpu():
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(1, layout.pipeline_ranks, self.virtual)
            tensor_parallel.model_parallel_cuda_manual_seed(1)
            self.data = parallel_state.get_data_parallel_group()
            self.config = self._config()
            self.models = self._models()
            self.optimizer = self._optimizer()
            self.forward_backward = get_forward_backward_func()

    def step(self, step: int, micro_batches: int) -> float | None:
        layout, size = self.layout, self.layout.size
        self.config.microbatch_group_size_per_vp_stage = micro_batches if self.one_group else layout.pipeline_ranks
        first = micro_batches * dist.get_rank(self.data)
        iterators = [(micro_batch(size, step, first + index) for index in range(micro_batches)) for _ in self.models]
        with cpu_shim.ToCpu():
            for model in self.models:
                model.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses = self.forward_backward(
                forward_step_func=_forward_step,
                data_iterator=_one_or_all(iterators),
                model=_one_or_all(self.models),
                num_microbatches=micro_batches,
                # Megatron's tensors are [sequence, samples, width]. The blocks' tensors are [samples, sequence, width].
                seq_length=size.samples,
                micro_batch_size=size.sequence,
            )
            self.optimizer.step()
        if not losses:
            return None
        total = torch.stack(losses).sum()
        dist.all_reduce(total, group=self.data)
        return total.item() / (micro_batches * layout.data_ranks)

    def held(self) -> int:
        return self.layout.chunks_per_rank

    def _config(self) -> Any:
        from megatron.core.transformer import TransformerConfig

        layout = self.layout
        return TransformerConfig(
            num_layers=layout.size.blocks,
            hidden_size=layout.size.width,
            num_attention_heads=1,
            use_cpu_initialization=True,
            pipeline_model_parallel_size=layout.pipeline_ranks,
            virtual_pipeline_model_parallel_size=self.virtual,
            pipeline_dtype=torch.float32,
            overlap_p2p_comm=self.virtual is not None,
            batch_p2p_comm=self.virtual is None,
        )

    @property
    def _distributed(self) -> bool:
        """Whether the distributed optimizer shards the optimizer's states."""
        return self.layout.data_ranks > 1

    def _models(self) -> list[Any]:
        from megatron.core import parallel_state

        layout, chunks = self.layout, self.virtual or 1
        rank, blocks = parallel_state.get_pipeline_model_parallel_rank(), layout.chunks_per_rank // chunks
        return [
            self._wrap(_Blocks(self.config, layout, range(first, first + blocks), self.recompute, self.one_group))
            for first in range(blocks * rank, layout.size.blocks, blocks * layout.pipeline_ranks)
        ]

    def _wrap(self, chunk: nn.Module) -> Any:
        """Makes a chunk data-parallel."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        settings = DistributedDataParallelConfig(
            overlap_grad_reduce=self._distributed,
            overlap_param_gather=self._distributed,
            use_distributed_optimizer=self._distributed,
            bucket_size=block_elements(self.layout.size),
        )
        return DistributedDataParallel(self.config, settings, chunk)

    def _optimizer(self) -> Any:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        settings = OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            adam_eps=ADAM_EPSILON,
            clip_grad=0.0,
            use_distributed_optimizer=self._distributed,
            overlap_param_gather=self._distributed,
        )
        # The default overrides would turn off weight decay for norms and biases.
        optimizer = get_megatron_optimizer(settings, self.models, config_overrides={})
        for group in optimizer.param_groups:
            group["fused"] = True
        self.config.finalize_model_grads_func = finalize_model_grads
        if self._distributed:
            self.config.no_sync_func = _one_or_all([model.no_sync for model in self.models])
            if self.virtual is not None:
                self.config.grad_sync_func = [model.start_grad_sync for model in self.models]
                self.config.param_sync_func = [model.start_param_sync for model in self.models]
        return optimizer


class MegatronBlock(Block):
    """Turns off the redirection to the CPU inside a block. Only Megatron-core needs it, and it would slow the block
    down."""

    def _forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return super()._forward(inputs)


class _Blocks(nn.Module):
    """A chunk with the interface that Megatron-core's schedules expect."""

    share_embeddings_and_output_weights = False

    def __init__(self, config: Any, layout: Layout, blocks: range, recompute: bool, all_at_turn: bool) -> None:
        super().__init__()
        from megatron.core.enums import ModelType

        size = layout.size
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.pre_process, self.post_process = blocks.start == 0, blocks.stop == size.blocks
        self.blocks = nn.Sequential(*(MegatronBlock(index, size, recompute, all_at_turn) for index in blocks))

    def set_input_tensor(self, received: torch.Tensor | None) -> None:
        self.received = received[0] if isinstance(received, list) else received

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.blocks(inputs if self.pre_process else self.received)


def _forward_step(batch: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Callable]:
    inputs, target = next(batch)
    return model(inputs), partial(_loss, target)


def _loss(target: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = loss_function(output, target)
    # The schedule divides the loss in place.
    return loss, loss.detach().clone()


def _one_or_all(items: list[Any]) -> Any:
    return items[0] if len(items) == 1 else items
