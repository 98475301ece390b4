"""A chunk of a Megatron-core model at run time."""

from collections.abc import Callable
from typing import Any

from megatron.core.pipeline_parallel import schedules

from ds_lgamp.integrations.megatron.loop.batch import Batch
from ds_lgamp.runtime.chunk import Chunk, Tensors


class DataEndError(Exception):
    """``forward_step`` found no micro-batch. A StopIteration would lose the action on its way."""


class ModelChunk(Chunk):
    """One of the models that a rank has under a virtual pipeline. The model does its own recomputation.

    Args:
        own: the number of the chunk on this rank.
        batch: gives the batch that runs.
    """

    def __init__(self, own: int, batch: Callable[[], Batch]) -> None:
        super().__init__([])
        self._own, self._batch = own, batch

    def __call__(self, inputs: Tensors | None, micro_batch: int) -> Any:
        batch = self._batch()
        is_last = batch.on_last_rank and self._own == len(batch.models) - 1
        first = schedules.check_first_val_step(batch.first_validation_step, batch.forward_only, micro_batch == 0)
        try:
            output, tokens = schedules.forward_step(
                batch.forward_step,
                batch.iterators[self._own],
                batch.models[self._own],
                batch.micro_batches,
                inputs,
                batch.reports,
                batch.config,
                batch.groups.cp.size(),
                collect_non_loss_data=batch.collect_non_loss_data,
                is_first_microbatch=first,
                current_microbatch=micro_batch,
                vp_stage=self._own if len(batch.models) > 1 else None,
                is_last_stage=is_last,
            )
        except StopIteration as error:
            raise DataEndError(
                "an iterator has no micro-batch left; give all pipeline ranks as many, or run fewer batches"
            ) from error
        if batch.config.calculate_per_token_loss:
            batch.tokens += tokens
        # In evaluation the output may be of any kind and size. The reports hold whatever the loop needs of it.
        return None if is_last and batch.forward_only else output
