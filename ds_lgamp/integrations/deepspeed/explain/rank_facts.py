"""Computes what a pipeline rank would hold and do in a step, by the formulas of ``ds_lgamp/cost``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepspeed.accelerator import get_accelerator

from ds_lgamp.cost.activations import ActivationBytes
from ds_lgamp.cost.disk import DiskUse, LiveUse, OnDisk, disk_use, host_beside_disk, live_use
from ds_lgamp.cost.memory import Memory, rank_memory
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
from ds_lgamp.integrations.deepspeed.explain.facts import RankFacts
from ds_lgamp.integrations.deepspeed.explain.imagined import ImaginedRank, unit_sizes
from ds_lgamp.integrations.deepspeed.explain.updates import Update
from ds_lgamp.schedule.actions import Action
from ds_lgamp.schedule.spec import ProgramSpec


@dataclass(frozen=True)
class Step:
    """A training step of an imagined engine, on the data-parallel ranks with the most micro-batches."""

    spec: ProgramSpec
    data_ranks: int
    tensor_ranks: int
    size: ElementBytes
    activations: ActivationBytes | None
    """None if they are unknown."""
    in_rank_order: bool
    """Whether sums over data-parallel ranks are taken in the order of the ranks."""
    update: Update
    on_disk: OnDisk
    leaves_live_states: bool

    @property
    def _sharding(self) -> Sharding:
        all_to_all = self.in_rank_order or get_accelerator().communication_backend_name() == "gloo"
        spec = self.spec
        return Sharding(spec.zero_stage, self.data_ranks, spec.hierarchy, all_to_all, self.in_rank_order)

    def facts(self, rank: int, held: ImaginedRank, actions: Sequence[Action]) -> RankFacts:
        """Returns what a pipeline rank does in a step, its ``actions``, with what it holds."""
        chunks, tied, units = held.chunks, held.tied, unit_sizes(held.partition)
        if self.activations is not None:
            chunks = [replace(facts, forward_flops=self.activations.flops[facts.chunk]) for facts in chunks]
        stage, sharing = self.spec.zero_stage, self._sharing_ranks
        step = self.update.memory(held.partition, stage, sharing) if self.tensor_ranks == 1 else None
        memory, disk = self._memory_and_disk(actions, units, step)
        update = self.update.traffic(held.partition, stage, sharing, self.in_rank_order)
        loaded, stored = self._bus_bytes(actions, units)
        return RankFacts(
            pipeline_rank=rank,
            chunks=chunks,
            tied=tied,
            parameters=sum(facts.parameters for facts in chunks) + sum(facts.parameters for facts in tied),
            traffic=self._traffic(actions, units),
            tied_sums=sum(unit.copies > 1 for unit in units),
            collective_bytes_sent=self._collective_bytes(actions, units),
            bytes_between_nodes=self._bytes_between_nodes(actions, units),
            update_collectives=update.collectives,
            update_bytes_sent=update.sent,
            memory=memory,
            bus_bytes_loaded=loaded,
            bus_bytes_stored=stored,
            disk=disk,
            live=self._live(units),
            hop_bytes=self._hop_bytes(rank),
        )

    @property
    def _sharing_ranks(self) -> int:
        """How many data-parallel ranks share one copy of the state."""
        hierarchy = self.spec.hierarchy
        return hierarchy.node_ranks if hierarchy is not None and hierarchy.replicated else self.data_ranks

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

    def _collective_bytes(self, actions: Sequence[Action], units: Sequence[UnitSize]) -> int:
        return sum(collective_bytes(actions, unit, self._sharding, self.size) for unit in units)

    def _bytes_between_nodes(self, actions: Sequence[Action], units: Sequence[UnitSize]) -> int | None:
        if self.spec.hierarchy is None:
            return None
        return sum(bytes_between_nodes(actions, unit, self._sharding, self.size) for unit in units)

    def _bus_bytes(self, actions: Sequence[Action], units: Sequence[UnitSize]) -> tuple[int | None, int | None]:
        """Returns the bytes that are loaded and stored; None without offloading."""
        if self.spec.offload is None:
            return None, None
        return bus_bytes(actions, units, self.spec.offload, self._sharding, self.size)

    def _memory_and_disk(
        self, actions: Sequence[Action], units: Sequence[UnitSize], step: int | None
    ) -> tuple[Memory, DiskUse | None]:
        offload, sharding = self.spec.offload, self._sharding
        memory = rank_memory(actions, units, sharding, self.size, self.activations, step, offload)
        if not any(self.on_disk):
            return memory, None
        disk = disk_use(actions, units, offload, self.on_disk, sharding, self.size, self.activations)
        if memory.host is not None:
            memory = replace(memory, host=host_beside_disk(memory.host, self.on_disk, self.size, disk.buffers))
        return memory, disk

    def _live(self, units: Sequence[UnitSize]) -> LiveUse | None:
        if not self.leaves_live_states:
            return None
        return live_use(units, self._sharding, self.size, self.spec.updates)

    def _hop_bytes(self, rank: int) -> int | None:
        if self.activations is None:
            return None
        return hop_bytes(rank, self.spec.placement, self.spec.micro_batches, self.activations)


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
