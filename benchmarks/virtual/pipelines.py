"""The contenders that run a pipeline of virtual chunks.

All but the bare loop end a step with a plain optimizer. Its learning rate is zero, so that every step has the same
numbers.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple, Protocol

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from benchmarks.record import OURS
from benchmarks.virtual.bare import BareLoop
from benchmarks.virtual.chunk import Setting, SleepingParts, TorchSplitChunk, VirtualChunk, loss_function, sleep_until
from ds_lgamp.cost.offload import OnDisk
from ds_lgamp.optimizers.host_updates import updates_of
from ds_lgamp.optimizers.updates import Options, postpone, start_postponed
from ds_lgamp.partition.bus import Bus
from ds_lgamp.partition.disk import Disk
from ds_lgamp.partition.host import Host, HostThread
from ds_lgamp.partition.policy import UnitParameter, ZeroPolicy
from ds_lgamp.partition.unit import Unit
from ds_lgamp.partition.zero_partition import build_partition
from ds_lgamp.runtime.batch import BatchState, Calls, Position, Storage
from ds_lgamp.runtime.chunk import Chunk
from ds_lgamp.runtime.edges import pipeline_links
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.runtime.recompute import default_sources
from ds_lgamp.schedule.orders import SINGLE_CHUNK_SCHEDULES
from ds_lgamp.schedule.program import build_rank_program
from ds_lgamp.schedule.spec import Offload, ProgramSpec
from testing.deepspeed_rank import quiet

DEVICE = torch.device("cpu")
LABELS = torch.zeros(1)
"""The losses ignore the labels."""


class Pipeline(Protocol):
    """A pipeline on this rank."""

    chunks: Mapping[int, VirtualChunk]
    """Chunks of this rank."""

    def step(self) -> float | None:
        """Runs one batch. Returns its mean loss; None if this rank does not know it."""


class Contender(NamedTuple):
    """A named pipeline. ``build`` must be picklable and is collective over all ranks."""

    name: str
    schedule: str
    """ds_lgamp's name of its order. The simulated time is that of this order."""
    build: Callable[[Setting], Pipeline]
    splits: bool = False
    """Whether its program has backwards in two parts."""

    def own(self, setting: Setting) -> Setting:
        """Returns the setting as it builds it."""
        placed = "vee" if self.schedule == "zbv" else "modular"
        return setting._replace(placed=placed, split_backward=setting.pipeline_ranks if self.splits else 0)

    def spec(self, setting: Setting) -> ProgramSpec:
        return spec_of(self.schedule, self.own(setting))

    def suits(self, setting: Setting) -> bool:
        """Whether the order suits the number of chunks per rank. Interleaved 1F1B with one chunk equals 1F1B, so it
        does not run."""
        if self.schedule == "zbv":
            return setting.chunks_per_rank == 2
        if self.schedule == "interleaved_1f1b":
            return setting.chunks_per_rank > 1 and setting.micro_batches % setting.pipeline_ranks == 0
        return self.schedule not in SINGLE_CHUNK_SCHEDULES or setting.chunks_per_rank == 1


def spec_of(
    schedule: str,
    setting: Setting,
    zero_stage: int = 0,
    resident_chunks: int = 2,
    micro_batch_group: int | None = None,
    updates: str = "step",
    offload: Offload | None = None,
) -> ProgramSpec:
    """Makes the specification of a program; ``micro_batch_group`` None means all micro-batches.

    Gathers are deferred. Behind a step they would run unseen before all ranks begin the next one together.
    """
    counts = setting.micro_batches, micro_batch_group or setting.micro_batches
    return ProgramSpec(
        setting.placement,
        schedule,
        *counts,
        zero_stage,
        resident_chunks,
        defers_gathers=True,
        updates=updates,
        offload=offload,
        recomputes=False,
        split_backward=setting.split_backward,
    )


class Executed:
    """ds_lgamp's executor without recomputation, because the simulated backward does not recompute either.

    Args:
        alone: whether each data-parallel rank runs without the others.
        updates: when the optimizer updates a chunk; see ``schedule.spec.UPDATES``.
        offload: what the host holds and updates; None if everything stays on the device.
        bytes_per_second: the speed of each direction of the bus to the host.
        disk: holds what is offloaded; None if the host does.
    """

    def __init__(
        self,
        setting: Setting,
        schedule: str,
        zero_stage: int = 0,
        resident_chunks: int = 2,
        alone: bool = False,
        micro_batch_group: int | None = None,
        updates: str = "step",
        offload: Offload | None = None,
        bytes_per_second: float | None = None,
        disk: Disk | None = None,
    ) -> None:
        rank = dist.get_rank() // setting.data_ranks
        self.setting = setting
        self.chunks = setting.chunks_of(rank)
        spec = spec_of(schedule, setting, zero_stage, resident_chunks, micro_batch_group, updates, offload)
        self.program, self.split = build_rank_program(spec, rank), spec.split_chunks
        parameters = {index: _parameters(index, chunk, setting) for index, chunk in self.chunks.items()}
        host = None
        if offload is not None:
            bus, on_disk = Bus(DEVICE, bytes_per_second, disk), OnDisk(disk is not None, disk is not None)
            host = Host(bus, HostThread(DEVICE), offload.parameters, on_disk=on_disk)
        policy = ZeroPolicy(data_group(1 if alone else setting.data_ranks), zero_stage, host=host)
        self.partition = build_partition(parameters, [], policy, DEVICE)
        self.partition.release_all()
        shards = [segment.shard for segment in self.partition.segments()]
        self._updates = updates_of(torch.optim.SGD(shards, lr=0.0), self.partition, updates, rounds=False)
        self.executor = Executor(
            Position(setting.placement, rank),
            {index: Chunk([chunk], index) for index, chunk in self.chunks.items()},
            Storage(self.partition),
            pipeline_links(_pipelines(setting), setting.placement, DEVICE),
            Calls(loss_function, self._step_optimizer, self._update),
            default_sources(DEVICE),
        )

    def step(self) -> float | None:
        parts = {"split_chunks": self.split, "second_parts": SleepingParts(self.chunks)}
        with self.executor.run_batch(BatchState(self.setting.micro_batches, self._load, **parts)):
            self.executor.run(self.program)
        losses = self.executor.losses
        return torch.stack(losses).mean().item() if losses else None

    def _step_optimizer(self) -> None:
        self.partition.finish_gradients()
        if self._updates.when == "next_step":
            self._postpone([unit for unit in self.partition.units if unit.reduction.is_final])
        elif self._updates.when == "step":
            units = [unit for unit in self.partition.units if unit.reduction.is_final]
            sleep_until(time.monotonic() + self.setting.update * len(units))
            self._updates.update(units)
        self.partition.drop_gradients()

    def _update(self, chunk: int) -> None:
        if self._updates.when == "reduction":
            self._postpone(self.partition.finish_gradients_of(chunk))
        start_postponed(self.partition.chunk_units[chunk])

    def _postpone(self, units: Sequence[Unit]) -> None:
        options = self._updates.options()
        for unit in units:
            postpone(unit, partial(self._update_alone, unit, options))

    def _update_alone(self, unit: Unit, options: Options) -> Callable[[], None] | None:
        unit.settle_store()
        self._updates.announce(unit)
        sleep_until(time.monotonic() + self.setting.update)
        return self._updates.update_alone(unit, 1, options)

    def _load(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.setting.micro_batch(index), LABELS


class Torch:
    """A schedule of ``torch.distributed.pipelining``. Shapes are given, so that stages need not infer them."""

    def __init__(self, setting: Setting, schedule: Callable) -> None:
        rank, last = dist.get_rank(), setting.chunks - 1
        if schedule in (ScheduleZBVZeroBubble, ScheduleDualPipeV):
            self.chunks = _whole_of(setting, (rank, last - rank))
        elif schedule is ScheduleInterleavedZeroBubble:
            self.chunks = _whole_of(setting, range(rank, setting.chunks, setting.pipeline_ranks))
        else:
            self.chunks = setting.chunks_of(rank)
        stages = [
            PipelineStage(
                chunk,
                index,
                setting.chunks,
                DEVICE,
                input_args=torch.zeros(1, setting.elements, requires_grad=index > 0),
                output_args=torch.zeros(1, setting.elements, requires_grad=True),
            )
            for index, chunk in self.chunks.items()
        ]
        # The loss takes the mean over micro-batches, as in all other contenders.
        self.schedule = schedule(
            stages[0] if schedule is Schedule1F1B else stages,
            setting.micro_batches,
            loss_fn=lambda output, labels: loss_function(output, labels) / setting.micro_batches,
            scale_grads=False,
        )
        self.is_first, self.is_last = 0 in self.chunks, setting.chunks - 1 in self.chunks
        self.inputs = torch.cat([setting.micro_batch(index) for index in range(setting.micro_batches)])
        self.labels = torch.cat([LABELS] * setting.micro_batches)
        self.optimizer = torch.optim.SGD([chunk.weight for chunk in self.chunks.values()], lr=0.0)

    def step(self) -> float | None:
        losses: list[torch.Tensor] = []
        self.schedule.step(
            *([self.inputs] if self.is_first else []),
            target=self.labels if self.is_last else None,
            losses=losses,
            return_outputs=False,
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).sum().item() if losses else None


class Stock:
    """DeepSpeed's own pipeline engine."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        with quiet():
            module = PipelineModule(
                [LayerSpec(VirtualChunk, index, setting.forward, setting.backward) for index in range(setting.chunks)],
                num_stages=setting.pipeline_ranks,
                loss_fn=loss_function,
                partition_method="uniform",
            )
            self.engine, *_ = deepspeed.initialize(
                model=module,
                optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
                config={
                    "train_micro_batch_size_per_gpu": 1,
                    "gradient_accumulation_steps": setting.micro_batches,
                    "gradient_clipping": 0.0,
                    "steps_per_print": 1 << 30,
                },
            )
        self.chunks = {dist.get_rank(): module.forward_funcs[0]}

    def step(self) -> float:
        batch = [(self.setting.micro_batch(index), LABELS) for index in range(self.setting.micro_batches)]
        return self.engine.train_batch(iter(batch)).item()


def bare_loop(setting: Setting) -> BareLoop:
    return BareLoop(setting, spec_of("layered", setting))


def _whole_of(setting: Setting, chunks: Iterable[int]) -> dict[int, VirtualChunk]:
    """Returns chunks for a schedule of torch with backwards in two parts."""
    return {chunk: TorchSplitChunk(chunk, setting.forward, setting.backward) for chunk in chunks}


def _parameters(index: int, chunk: VirtualChunk, setting: Setting) -> list[UnitParameter]:
    """The parameters of one chunk's unit."""
    parameters = [UnitParameter(f"{index}.weight", chunk.weight, 0)]
    if setting.parameters:
        parameters.append(UnitParameter(f"{index}.rest", torch.nn.Parameter(torch.zeros(setting.parameters)), 0))
    return parameters


def _pipelines(setting: Setting) -> list[range]:
    """The ranks of every pipeline. Data-parallel ranks have consecutive numbers."""
    ranks = setting.pipeline_ranks * setting.data_ranks
    return [range(data_rank, ranks, setting.data_ranks) for data_rank in range(setting.data_ranks)]


@cache
def data_group(ranks: int) -> dist.ProcessGroup:
    """Returns the group of this rank's ``ranks`` data-parallel ranks; it is cached.

    Its collectives run one after another, as in an NCCL communicator. gloo alone runs two at a time.
    """
    group = dist.new_subgroups(ranks)[0]
    if ranks > 1:
        options = dist.ProcessGroupGloo._Options()
        options._threads = 1
        # The interface that gloo's own groups use too.
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        options._devices = [dist.ProcessGroupGloo.create_device(interface=interface)]
        store = dist.PrefixStore(f"one after another {group.group_name}", dist.distributed_c10d._get_default_store())
        in_order = dist.ProcessGroupGloo(store, group.rank(), group.size(), options)
        group._register_backend(DEVICE, dist.ProcessGroup.BackendType.CUSTOM, in_order)
    return group


def split(name: str, schedule: str) -> Contender:
    """Returns a contender of ours with backwards in two parts."""
    return Contender(f"{OURS} {name}", schedule, partial(Executed, schedule=schedule), splits=True)


LAYERED = Contender(f"{OURS} layered", "layered", partial(Executed, schedule="layered"))
INTERLEAVED = Contender(f"{OURS} interleaved_1f1b", "interleaved_1f1b", partial(Executed, schedule="interleaved_1f1b"))
BARE_LOOP = Contender("bare loop", "layered", bare_loop)
CONTENDERS = (
    LAYERED,
    INTERLEAVED,
    Contender(f"{OURS} 1f1b", "1f1b", partial(Executed, schedule="1f1b")),
    # LoopedBFS takes the last micro-batch first in its backward. This takes the same time, because all chunks are
    # equal.
    Contender("torch LoopedBFS", "layered", partial(Torch, schedule=ScheduleLoopedBFS)),
    Contender("torch Interleaved1F1B", "interleaved_1f1b", partial(Torch, schedule=ScheduleInterleaved1F1B)),
    Contender("torch 1F1B", "1f1b", partial(Torch, schedule=Schedule1F1B)),
    Contender("DeepSpeed 1F1B", "1f1b", Stock),
    BARE_LOOP,
)
