"""Builds the executor of a pipeline rank from its module."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_lgamp.config import LgampConfig
from ds_lgamp.integrations.deepspeed.engine.seeding import before_layers
from ds_lgamp.integrations.deepspeed.model.module import PlacedModule
from ds_lgamp.integrations.split.state import leave_out_hosts
from ds_lgamp.partition.agreement import host_group
from ds_lgamp.partition.bus import Bus
from ds_lgamp.partition.disk import Disk
from ds_lgamp.partition.zero_partition import ZeroPartition
from ds_lgamp.runtime.chunk import Chunk
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.runtime.random_state import RandomSource
from ds_lgamp.runtime.reproducible import laid_out
from ds_lgamp.runtime.ring import ring_links
from ds_lgamp.runtime.stopwatch import Stopwatch
from ds_lgamp.runtime.stored_inputs import StoredInputs

_SHAPES_ADVICE = (
    "where shapes change between batches, call engine.reset_activation_shape() on every rank first; where they change "
    "within one, build the PipelineModule with dynamic_shape=True"
)


def build_executor(
    module: PlacedModule,
    partition: ZeroPartition,
    settings: LgampConfig,
    disk: Disk | None,
    global_step: Callable[[], int],
    random_sources: list[RandomSource],
    loss: Callable[[Any, Any], Tensor],
    loss_gradient: Callable[[Tensor, int], Tensor],
    step: Callable[[], None],
    update: Callable[[int], None],
    stopwatch: Stopwatch,
    device: torch.device,
    after_layer: Callable[[int, int, Any], None] | None = None,
) -> Executor:
    """Builds the executor of this pipeline rank. Collective over all ranks.

    Args:
        disk: where inputs of chunks may wait; None if nothing lies on one.
        global_step: returns the number of the training step.
        random_sources: the generators that layers draw from.
        loss, loss_gradient, step, update, stopwatch: see :class:`Executor`.
        after_layer: see :class:`Chunk`.
    """
    reproducible = settings.reproducible
    between_layers = laid_out if reproducible else None
    before_layer = before_layers(module, reproducible, random_sources, global_step)
    leave_out_hosts()
    chunks = {
        chunk: Chunk(functions, module.layout.bounds[chunk], before_layer, between_layers, after_layer)
        for chunk, functions in module.chunk_functions.items()
    }
    stored_inputs = None
    if settings.offload_activations != "none":
        bus = Bus(device, disk=disk) if partition.host is None else partition.host.bus
        stored_inputs = StoredInputs(bus, on_disk=settings.offload_activations == "nvme")
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
        update=update,
        stored_inputs=stored_inputs,
        alike=dist.get_process_group_ranks(module._grid.get_data_parallel_group()),
    )
