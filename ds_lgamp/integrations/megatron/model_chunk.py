"""A chunk of a Megatron-core model at run time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import ModelParallelConfig
from megatron.core.pipeline_parallel import schedules

from ds_lgamp.runtime.chunk import Chunk, Tensors


@dataclass
class Batch:
    """What all chunks of a rank need to know of a batch, and what they add to it."""

    forward_step: Callable[..., Any]
    micro_batches: int
    config: ModelParallelConfig
    context_ranks: int
    forward_only: bool
    collect_non_loss_data: bool
    first_validation_step: bool | None
    tokens: torch.Tensor
    """How many count in the loss, where the loss function says so."""
    reports: list[Any] = field(default_factory=list)
    """What the loss function reports, by micro-batch."""

    def loss_gradient(self, loss: torch.Tensor, micro_batches: int) -> torch.Tensor:
        """Of the scaled loss; Megatron-core has divided by the number of micro-batches or will by that of tokens."""
        ones = torch.ones_like(loss)
        # A scale of shape [1] would stretch a loss without dimensions.
        return ones if self.config.grad_scale_func is None else self.config.grad_scale_func(ones).reshape(loss.shape)


class ModelChunk(Chunk):
    """One of the models that a rank has under a virtual pipeline. Recomputation is the model's own.

    Args:
        own: its number on this rank.
        iterator: of its micro-batches.
        models: all of this rank.
        is_last: whether it is the last of the whole model, which computes the loss.
    """

    def __init__(
        self,
        batch: Batch,
        own: int,
        iterator: Iterator[Any] | None,
        models: Sequence[torch.nn.Module],
        is_last: bool,
    ) -> None:
        super().__init__([])
        self._batch, self._iterator, self._model = batch, iterator, models[own]
        self._virtual_stage = own if len(models) > 1 else None
        self._is_last = is_last

    def __call__(self, inputs: Tensors | None, micro_batch: int) -> Any:
        batch = self._batch
        first = schedules.check_first_val_step(batch.first_validation_step, batch.forward_only, micro_batch == 0)
        output, tokens = schedules.forward_step(
            batch.forward_step,
            self._iterator,
            self._model,
            batch.micro_batches,
            inputs,
            batch.reports,
            batch.config,
            batch.context_ranks,
            collect_non_loss_data=batch.collect_non_loss_data,
            is_first_microbatch=first,
            current_microbatch=micro_batch,
            vp_stage=self._virtual_stage,
            is_last_stage=self._is_last,
        )
        batch.tokens += tokens
        # In evaluation it may be of any kind and size, and what counts of it is among the reports.
        return None if self._is_last and batch.forward_only else output
