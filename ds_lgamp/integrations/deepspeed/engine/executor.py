"""Builds the executor of a pipeline rank from its module."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_lgamp.config import LgampConfig
from ds_lgamp.integrations.deepspeed.engine.seeding import SeedLayer
from ds_lgamp.integrations.deepspeed.model.module import PlacedModule
from ds_lgamp.partition.agreement import host_group
from ds_lgamp.partition.zero_partition import ZeroPartition
from ds_lgamp.runtime.chunk import Chunk
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.runtime.random_state import RandomSource
from ds_lgamp.runtime.reproducible import laid_out
from ds_lgamp.runtime.ring import ring_links
from ds_lgamp.runtime.stopwatch import Stopwatch

_SHAPES_ADVICE = (
    "where shapes change between batches, call engine.reset_activation_shape() on every rank first; where they change "
    "within one, build the PipelineModule with dynamic_shape=True"
)


def build_executor(
    module: PlacedModule,
    partition: ZeroPartition,
    settings: LgampConfig,
    seed_layer: SeedLayer | None,
    random_sources: list[RandomSource],
    loss: Callable[[Any, Any], Tensor],
    loss_gradient: Callable[[Tensor, int], Tensor],
    step: Callable[[], None],
    stopwatch: Stopwatch,
    device: torch.device,
) -> Executor:
    """Builds the executor of this pipeline rank. Collective over all ranks.

    Args:
        seed_layer: called with (layer, micro-batch) ahead of every layer.
        random_sources: the generators that layers draw from.
        loss, loss_gradient, step, stopwatch: see :class:`Executor`.
    """
    reproducible = settings.reproducible
    between_layers = laid_out if reproducible else None
    chunks = {
        chunk: Chunk(functions, module.layout.bounds[chunk], seed_layer, between_layers)
        for chunk, functions in module.chunk_functions.items()
    }
    return Executor(
        module.layout.placement,
        module.stage_id,
        chunks,
        partition,
        ring_links(module._grid.pipe_groups, device, host_group(), module.dynamic_shape, _SHAPES_ADVICE),
        loss,
        step,
        # Seeded ahead of every layer, generators need not be restored.
        [] if reproducible else random_sources,
        recompute=settings.recompute == "full",
        loss_gradient=loss_gradient,
        timing=stopwatch,
        owns=partition.owns if partition.frees_weights else None,
    )
