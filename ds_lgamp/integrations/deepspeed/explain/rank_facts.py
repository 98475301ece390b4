"""Computes what a pipeline rank would hold and do in a step, by the formulas of ``ds_lgamp/cost``."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from deepspeed.accelerator import get_accelerator

from ds_lgamp.config import LgampConfig
from ds_lgamp.cost.activations import ActivationBytes
from ds_lgamp.cost.memory import Memory, rank_memory
from ds_lgamp.cost.offload import DiskUse, disk_use, host_beside_disk, live_use
from ds_lgamp.cost.traffic import (
    Traffic,
    bus_bytes,
    bytes_between_nodes,
    collective_bytes,
    hop_bytes,
    predict_traffic,
)
from ds_lgamp.cost.units import ElementBytes, Sharding, UnitSize
from ds_lgamp.integrations.deepspeed.config.precision import accumulation_dtype, parameter_dtype
from ds_lgamp.integrations.deepspeed.config.zero import on_disk_of
from ds_lgamp.integrations.deepspeed.explain.facts import RankFacts
from ds_lgamp.integrations.deepspeed.explain.imagined import ImaginedRank, unit_sizes
from ds_lgamp.integrations.deepspeed.explain.updates import Update
from ds_lgamp.schedule.actions import Action
from ds_lgamp.schedule.spec import ProgramSpec


class Step(NamedTuple):
    """A training step of an imagined engine, on the data-parallel ranks with the most micro-batches."""

    spec: ProgramSpec
    settings: LgampConfig
    config: Any
    """The DeepSpeedConfig."""
    data_ranks: int
    tensor_ranks: int
    activations: ActivationBytes | None
    """None if they are unknown."""
    update: Update

    @property
    def _sharding(self) -> Sharding:
        all_to_all = self.settings.reproducible or get_accelerator().communication_backend_name() == "gloo"
        spec = self.spec
        return Sharding(spec.zero_stage, self.data_ranks, spec.hierarchy, all_to_all, self.settings.reproducible)

    def facts(self, rank: int, held: ImaginedRank, actions: Sequence[Action]) -> RankFacts:
        """Returns what a pipeline rank does in a step, its ``actions``, with what it holds."""
        spec, activations, size = self.spec, self.activations, element_bytes(self.config, self.update)
        stage, hierarchy, offload, sharding = spec.zero_stage, spec.hierarchy, spec.offload, self._sharding
        chunks, units = held.chunks, unit_sizes(held.partition)
        if activations is not None:
            chunks = [replace(facts, forward_flops=activations.flops[facts.chunk]) for facts in chunks]
        sharing = hierarchy.node_ranks if hierarchy is not None and hierarchy.replicated else self.data_ranks
        step = self.update.memory(held.partition, stage, sharing) if self.tensor_ranks == 1 else None
        memory, disk = self._memory_and_disk(actions, units, size, step)
        update = self.update.traffic(held.partition, stage, sharing, self.settings.reproducible)
        bus = None if offload is None else bus_bytes(actions, units, offload, sharding, size)
        leaves_live_states = self.settings.live_checkpoint is not None
        return RankFacts(
            pipeline_rank=rank,
            chunks=chunks,
            tied=held.tied,
            parameters=sum(facts.parameters for facts in chunks) + sum(facts.parameters for facts in held.tied),
            traffic=self._traffic(actions, units),
            tied_sums=sum(unit.copies > 1 for unit in units),
            collective_bytes_sent=sum(collective_bytes(actions, unit, sharding, size) for unit in units),
            bytes_between_nodes=None
            if hierarchy is None
            else sum(bytes_between_nodes(actions, unit, sharding, size) for unit in units),
            update_collectives=update.collectives,
            update_bytes_sent=update.sent,
            memory=memory,
            bus_bytes_loaded=None if bus is None else bus.loaded,
            bus_bytes_stored=None if bus is None else bus.stored,
            disk=disk,
            live=live_use(units, sharding, size, spec.updates) if leaves_live_states else None,
            hop_bytes=None if activations is None else hop_bytes(rank, spec.placement, spec.micro_batches, activations),
        )

    def _traffic(self, actions: Sequence[Action], units: Sequence[UnitSize]) -> Traffic:
        training = [unit for unit in units if not unit.frozen]
        traffic = predict_traffic(
            actions,
            self.spec.zero_stage,
            [chunk for unit in training if not unit.tied for chunk in unit.chunks],
            [unit.chunks for unit in training if unit.tied],
            [unit.chunks for unit in units if unit.frozen],
        )
        return Traffic(sends=traffic.sends, receives=traffic.receives) if self.data_ranks == 1 else traffic

    def _memory_and_disk(
        self, actions: Sequence[Action], units: Sequence[UnitSize], size: ElementBytes, step: int | None
    ) -> tuple[Memory, DiskUse | None]:
        offload, on_disk = self.spec.offload, on_disk_of(self.config, self.settings)
        memory = rank_memory(actions, units, self._sharding, size, self.activations, step, offload)
        if not any(on_disk):
            return memory, None
        disk = disk_use(actions, units, offload, on_disk, self._sharding, size, self.activations)
        if memory.host is not None:
            memory = replace(memory, host=host_beside_disk(memory.host, on_disk, size, disk.buffers))
        return memory, disk


def element_bytes(config: Any, update: Update) -> ElementBytes:
    """Returns the bytes per element under a DeepSpeedConfig."""
    weights, gradients = parameter_dtype(config), accumulation_dtype(config)
    travelling = config.communication_data_type or gradients
    size = ElementBytes(
        weights.itemsize, gradients.itemsize, communication=None if travelling == gradients else travelling.itemsize
    )
    state, temporary = (
        None if tensors is None else tensors * size.master
        for tensors in (update.state_tensors, update.temporary_tensors)
    )
    return replace(size, optimizer=state, update=temporary)
