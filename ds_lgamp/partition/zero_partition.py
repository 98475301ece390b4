"""All flat units of a pipeline rank, driven by the program's GATHER, RELEASE and REDUCE."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_lgamp.partition.unit import Segment, Unit, UnitParameter


class TiedParameters(NamedTuple):
    """A module that several layers share."""

    key: str
    parameters: Sequence[UnitParameter]
    chunks: Sequence[int]
    """The chunks of this rank that use it."""
    tie_group: dist.ProcessGroup | None
    """The pipeline ranks that hold a copy; None if there is no other."""


class ZeroPartition:
    """Maps chunks to the units they use and keeps track of what is gathered and what is being reduced.

    Args:
        units: for every chunk of this rank, the units it uses: its own and those of tied modules. A chunk without
            parameters has none.
        gradient_buffers: at stages 2 and 3, a reduction is awaited when another chunk's backward would begin with so
            many full gradients held already.
        device: where the parameters live.
        trace: where waits are recorded; None records nothing.
    """

    def __init__(
        self,
        units: Mapping[int, Sequence[Unit]],
        gradient_buffers: int,
        device: torch.device,
        trace: list[str] | None = None,
    ) -> None:
        self.chunk_units = units
        self.units = list(dict.fromkeys(unit for members in units.values() for unit in members))
        for members in units.values():
            for unit in members:
                unit.users += 1
        self.trace = trace
        self.device = device
        self.frees_weights = any(unit.frees_weights for unit in self.units)
        """Whether full parameters exist only between gather and release."""
        self._gradient_buffers = gradient_buffers
        self._reducing: deque[Unit] = deque()

    def gather(self, chunk: int) -> None:
        """Launches the gathers ``chunk`` needs. A unit that is complete, as at stages 1 and 2 after a pure evaluation,
        moves nothing."""
        for unit in self.chunk_units[chunk]:
            unit.holders.add(chunk)
            unit.start_gather()

    def wait_gathered(self, chunk: int) -> None:
        """Waits for the gathers of ``chunk`` that are still in flight."""
        for unit in self.chunk_units[chunk]:
            if unit.gathering is not None:
                self._record("WAIT_GATHER", unit)
                unit.finish_gather()

    def release(self, chunk: int) -> None:
        """Frees what ``chunk`` held, except units another resident chunk uses."""
        for unit in self.chunk_units[chunk]:
            unit.holders.discard(chunk)
            if not unit.holders:
                unit.release()

    def owns(self, chunk: int, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of the parameters ``chunk`` uses."""
        address = tensor.untyped_storage().data_ptr()
        return any(unit.flat.untyped_storage().data_ptr() == address for unit in self.chunk_units[chunk])

    @torch.no_grad()
    def adopt_parameters(self) -> None:
        """Inside :meth:`full_parameters`: somebody changed the parameters, alike on all data-parallel ranks; shards and
        master weights follow."""
        for unit in self.units:
            unit.adopt()

    def wait_room(self, chunk: int) -> None:
        """Before a backward of ``chunk``: awaits reductions until there is room for its gradients."""
        for unit in self.chunk_units[chunk]:
            if not unit.accumulating:
                self._make_room(unit)

    def begin_backward(self, chunk: int) -> None:
        """Before a backward of ``chunk``: lets its gradients accumulate."""
        for unit in self.chunk_units[chunk]:
            if not unit.accumulating:
                unit.begin_accumulation()

    def reduce(self, chunk: int) -> None:
        """Launches the reduction of the units whose last user is ``chunk``."""
        for unit in self.chunk_units[chunk]:
            if unit.user_done():
                unit.start_reduce()
                self._reducing.append(unit)

    def wait_reductions(self) -> None:
        while self._reducing:
            self._finish_oldest_reduction()

    def finish_gradients(self) -> None:
        """After all reductions: every segment gets its gradient, averaged over the data-parallel ranks."""
        # By name: copies of tied units are summed in the same order on all pipeline ranks.
        for unit in sorted(self.units, key=lambda unit: unit.name):
            unit.finish_gradient()

    def squared_norm(self) -> torch.Tensor:
        """This rank's share of the squared norm of what the optimizer owns, in fp64: the shares of all pipeline and
        data-parallel ranks add up to the whole, tied units counted once."""
        shares = [
            torch.linalg.vector_norm(segment.shard.grad, dtype=torch.float64) ** 2
            / (1 if unit.partitioned else unit.data_group.size())
            for unit in self.units
            if unit.counts_in_norm
            for segment in unit.segments
        ]
        if not shares:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack(shares).sum()

    def scale_gradients(self, factor: torch.Tensor) -> None:
        for unit in self.units:
            if unit.shard_gradient is not None:
                unit.shard_gradient.mul_(factor)

    def after_update(self) -> None:
        """The optimizer has changed the shards: gradients are done with, gathered weights are out of date."""
        for unit in self.units:
            unit.finish_update()

    def segments(self) -> Iterator[Segment]:
        """What the optimizer owns, in a fixed order."""
        for unit in self.units:
            yield from unit.segments

    def release_all(self) -> None:
        for unit in self.units:
            unit.holders.clear()
            unit.release()

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Holds every parameter of this rank complete and current inside the block; all data-parallel ranks enter it
        together."""
        for unit in self.units:
            unit.start_gather()
        for unit in self.units:
            unit.finish_gather()
        try:
            yield
        finally:
            for unit in self.units:
                if not unit.holders:
                    unit.release()

    def _make_room(self, unit: Unit) -> None:
        if unit in self._reducing:
            self._finish_reductions_until(unit)
        if unit.zero_stage >= 2 and not unit.tied:
            while self._reducing and self._gradients_held() >= self._gradient_buffers:
                self._finish_oldest_reduction()

    def _gradients_held(self) -> int:
        return sum(unit.holds_gradient for unit in self.units if unit.partitioned and not unit.tied)

    def _finish_reductions_until(self, unit: Unit) -> None:
        while unit in self._reducing:
            self._finish_oldest_reduction()

    def _finish_oldest_reduction(self) -> None:
        unit = self._reducing.popleft()
        self._record("WAIT_REDUCE", unit)
        unit.finish_reduce()

    def _record(self, event: str, unit: Unit) -> None:
        if self.trace is not None:
            self.trace.append(f"{event} {unit.name}")


def build_partition(
    chunk_parameters: Mapping[int, Sequence[UnitParameter]],
    tied: Sequence[TiedParameters],
    data_group: dist.ProcessGroup,
    zero_stage: int,
    gradient_buffers: int,
    device: torch.device,
    gradient_dtype: torch.dtype | None = None,
    trace: list[str] | None = None,
    communication_dtype: torch.dtype | None = None,
) -> ZeroPartition:
    """One unit for every chunk's own parameters and one for every tied module, which travels beside its users."""
    make = partial(
        Unit,
        data_group=data_group,
        zero_stage=zero_stage,
        gradient_dtype=gradient_dtype,
        communication_dtype=communication_dtype,
    )
    units = {
        chunk: [make(f"chunk {chunk}", parameters)] if parameters else []
        for chunk, parameters in chunk_parameters.items()
    }
    for module in tied:
        unit = make(f"tied {module.key}", module.parameters, tied=True, tie_group=module.tie_group)
        for chunk in module.chunks:
            units[chunk].append(unit)
    return ZeroPartition(units, gradient_buffers, device, trace)


def global_norm(partition: ZeroPartition, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The 2-norm of the whole model's gradient (fp64, no elements copied to the host); ``group`` holds all pipeline and
    data-parallel ranks, None if this rank is alone."""
    total = partition.squared_norm()
    if group is not None and group.size() > 1:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def clip_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """What gradients are multiplied with so that their norm is at most ``limit`` (as torch's clip_grad_norm_)."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)
