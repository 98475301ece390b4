"""Trainings whose optimizer, and mostly parameters too, are on the host, with the bytes that cross the bus in a step.

The peers run as they are. ``benchmarks.two_pools`` sees their copies.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

from benchmarks.contenders import Contender, Layout, Training
from benchmarks.contenders.fsdp import Accumulation
from benchmarks.contenders.lgamp import Layered
from benchmarks.contenders.zero import Zero
from benchmarks.record import OURS
from benchmarks.two_pools import TwoPools
from ds_lgamp.partition.bus import Bus

OPTIMIZER, PARAMETERS = "offload_optimizer", "offload_param"
"""DeepSpeed's keys."""


class Moved(NamedTuple):
    """Bytes over the bus of one rank in one step."""

    loaded: int
    stored: int


class Ours(Layered):
    """ds_lgamp, whose bus counts.

    Args:
        layout: ranks and model.
        zero_stage, resident_chunks, recompute, micro_batch_group: as in :class:`Layered`.
        offload: keys of DeepSpeed's ``zero_optimization`` that say what lies in the memory of the host.
    """

    def __init__(
        self,
        layout: Layout,
        zero_stage: int,
        offload: Sequence[str],
        resident_chunks: int = 2,
        micro_batch_group: int | str = "all",
    ) -> None:
        zero = {key: {"device": "cpu"} for key in offload}
        super().__init__(layout, zero_stage, resident_chunks, micro_batch_group=micro_batch_group, zero=zero)
        self.bus: Bus = self.engine.optimizer.partition.host.bus
        self.moved = Moved(0, 0)
        """In the last step."""

    def step(self, step: int, micro_batches: int) -> float:
        loaded, stored = self.bus.bytes_loaded, self.bus.bytes_stored
        loss = super().step(step, micro_batches)
        self.moved = Moved(self.bus.bytes_loaded - loaded, self.bus.bytes_stored - stored)
        return loss


class Peer:
    """A peer on two pools.

    Args:
        layout: ranks and model.
        build: builds the training.
        on_host: yields the tensors that lie on the host between steps.
        stores_in: see :class:`TwoPools`.
    """

    def __init__(
        self,
        layout: Layout,
        build: Callable[[Layout], Training],
        on_host: Callable[[Training], Iterator[torch.Tensor]],
        stores_in: str | None = None,
    ) -> None:
        self.training = build(layout)
        self._on_host, self._stores_in = on_host, stores_in
        self.moved = Moved(0, 0)
        """In the last step."""

    def step(self, step: int, micro_batches: int) -> float | None:
        with two_pools(self._on_host(self.training), self._stores_in) as pools:
            loss = self.training.step(step, micro_batches)
        self.moved = Moved(pools.bytes_loaded, pools.bytes_stored)
        return loss

    def held(self) -> int:
        return self.training.held()


@contextmanager
def two_pools(on_host: Iterator[torch.Tensor], stores_in: str | None) -> Iterator[TwoPools]:
    """Inside the block, DeepSpeed too finds that what lies on the host is not on the accelerator."""
    pools = TwoPools(on_host, stores_in)
    accelerator = type(get_accelerator())
    everywhere = accelerator.on_accelerator
    accelerator.on_accelerator = lambda self, tensor: not pools.on_host(tensor)
    try:
        with pools:
            yield pools
    finally:
        accelerator.on_accelerator = everywhere


def of_zero_3(training: Zero) -> Iterator[torch.Tensor]:
    optimizer = training.engine.optimizer
    yield optimizer.grad_partitions_flat_buffer
    yield from _with_gradients(optimizer.fp32_partitioned_groups_flat)
    if optimizer.offload_param:
        yield from (parameter.ds_tensor for parameter in training.engine.module.parameters())


def of_zero_2(training: Zero) -> Iterator[torch.Tensor]:
    optimizer = training.engine.optimizer
    yield from _with_gradients(optimizer.single_partition_of_fp32_groups)
    yield from optimizer.param_buffer_of_bit16_for_cpu_offload_groups
    yield from optimizer.accumulated_grads_in_cpu.values()


def of_fsdp(training: Accumulation) -> Iterator[torch.Tensor]:
    for parameter in training.model.parameters():
        yield parameter.to_local()


def _with_gradients(masters: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    for master in masters:
        yield master
        if master.grad is not None:
            yield master.grad


def _peer(name: str, build: Callable, on_host: Callable, stores_in: str | None = None) -> Contender:
    return Contender(name, partial(Peer, build=build, on_host=on_host, stores_in=stores_in))


ALL_ON_HOST, OPTIMIZER_ON_HOST = f"{OURS}, ZeRO-3, all on the host", f"{OURS}, ZeRO-3, optimizer on the host"
OUTER = f"{OURS}, ZeRO-3, all on the host, one micro-batch after another"
OWN = (
    Contender(ALL_ON_HOST, partial(Ours, zero_stage=3, offload=[OPTIMIZER, PARAMETERS])),
    Contender(OPTIMIZER_ON_HOST, partial(Ours, zero_stage=3, offload=[OPTIMIZER])),
    Contender(
        OUTER,
        partial(Ours, zero_stage=3, offload=[OPTIMIZER, PARAMETERS], micro_batch_group=1),
    ),
)
PEERS = (
    _peer("DeepSpeed ZeRO-2, optimizer on the host", partial(Zero, stage=2, offload=[OPTIMIZER]), of_zero_2),
    _peer(
        "DeepSpeed ZeRO-3, all on the host, 2 resident",
        partial(Zero, stage=3, resident_chunks=2, offload=[OPTIMIZER, PARAMETERS]),
        of_zero_3,
    ),
    _peer("FSDP2, all on the host", partial(Accumulation, offload=True), of_fsdp, "foreach_reduce"),
    _peer(
        "FSDP2, all on the host, deferred sync",
        partial(Accumulation, offload=True, deferred_sync=True),
        of_fsdp,
        "foreach_reduce",
    ),
    _peer(
        "FSDP2, kept unsharded in a step",
        partial(Accumulation, offload=True, deferred_sync=True, kept=True),
        of_fsdp,
        "foreach_reduce",
    ),
)
