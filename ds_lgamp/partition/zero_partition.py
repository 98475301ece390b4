"""All flat units of a pipeline rank, driven by the program's GATHER, RELEASE and REDUCE."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
        device: where the parameters live.
    """

    def __init__(self, units: Mapping[int, Sequence[Unit]], device: torch.device) -> None:
        self.chunk_units = units
        self.units = list(dict.fromkeys(unit for members in units.values() for unit in members))
        for members in units.values():
            for unit in members:
                unit.users += 1
        self.device = device
        self.frees_weights = any(unit.frees_weights for unit in self.units)
        """Whether full parameters exist only between gather and release."""
        self._reducing: dict[int, list[Unit]] = {}
        """Units under reduction, by the chunk whose REDUCE launched it."""

    def gather(self, chunk: int) -> None:
        """Launches the gathers ``chunk`` needs. A unit that is complete and current, as at stages 1 and 2 before the
        first step, moves nothing."""
        for unit in self.chunk_units[chunk]:
            unit.holders.add(chunk)
            unit.start_gather()

    def wait_gather(self, chunk: int) -> None:
        """Waits for the gathers of ``chunk`` that are still in flight."""
        for unit in self.chunk_units[chunk]:
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
        """Somebody changed the parameters, inside :meth:`full_parameters` or where they are not released, alike on all
        data-parallel ranks; shards and master weights follow."""
        for unit in self.units:
            unit.adopt()

    def begin_backward(self, chunk: int) -> None:
        """Before a backward of ``chunk``: lets its gradients accumulate. The program has waited for those of the chunk;
        a tied unit may still be under reduction, launched by another chunk."""
        beginning = [unit for unit in self.chunk_units[chunk] if unit.trains and not unit.accumulating]
        for unit in beginning:
            unit.finish_reduce()
        for unit in beginning:
            unit.begin_accumulation()

    def reduce(self, chunk: int) -> None:
        """Launches the reduction of the units whose last user is ``chunk``."""
        launched = self._reducing[chunk] = []
        for unit in self.chunk_units[chunk]:
            if not unit.trains:
                _refuse_thawed(unit)
            elif unit.user_done():
                unit.start_reduce()
                launched.append(unit)

    def wait_reduce(self, chunk: int) -> None:
        """Waits for the reductions that :meth:`reduce` of ``chunk`` launched."""
        for unit in self._reducing.pop(chunk):
            unit.finish_reduce()

    def finish_gradients(self) -> None:
        """After all reductions: every segment gets its gradient, averaged over the data-parallel ranks."""
        # By name: copies of tied units are summed in the same order on all pipeline ranks.
        for unit in sorted(self.units, key=lambda unit: unit.name):
            if unit.trains:
                unit.finish_gradient()

    def counted_gradients(self) -> list[torch.Tensor]:
        """This rank's share of the gradient of what the optimizer owns: all ranks' together are the whole, copies
        once."""
        return [gradient for unit in self.units for gradient in unit.counted_gradients()]

    def scale_gradients(self, factor: torch.Tensor) -> None:
        for unit in self.units:
            if unit.shard_gradient is not None:
                unit.shard_gradient.mul_(factor)

    def follow_update(self) -> None:
        """The optimizer has changed the master weights: weights follow, and what is gathered counts as old."""
        for unit in self.units:
            if unit.trains:
                unit.follow_update()

    def after_update(self) -> None:
        """The step is over: gradients are done with."""
        for unit in self.units:
            if unit.trains:
                unit.drop_gradient()

    def gather_stale(self) -> None:
        """Launches the gathers of all old values, after shards were loaded. All data-parallel ranks call it
        together."""
        for unit in self.units:
            if unit.stale:
                unit.start_gather()

    def finish_gathers(self) -> None:
        """Waits for all gathers in flight."""
        for unit in self.units:
            unit.finish_gather()

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
        block = object()
        for unit in self.units:
            unit.holders.add(block)
            unit.start_gather()
        for unit in self.units:
            unit.finish_gather()
        try:
            yield
        finally:
            for unit in self.units:
                unit.holders.discard(block)
                if not unit.holders:
                    unit.release()


def build_partition(
    chunk_parameters: Mapping[int, Sequence[UnitParameter]],
    tied: Sequence[TiedParameters],
    data_group: dist.ProcessGroup,
    zero_stage: int,
    device: torch.device,
    gradient_dtype: torch.dtype | None = None,
    in_rank_order: bool = False,
    communication_dtype: torch.dtype | None = None,
    tensor_group: dist.ProcessGroup | None = None,
    materialise: Callable[[Sequence[UnitParameter]], Sequence[UnitParameter]] | None = None,
) -> ZeroPartition:
    """One unit for every chunk's own parameters and one for every tied module, which travels beside its users; the
    frozen ones among the parameters of either have a unit of their own.

    ``materialise`` is given where parameters have no memory yet: it makes those of one unit, which is built and
    released before the next.
    """

    def build(
        name: str, parameters: Sequence[UnitParameter], tied: bool = False, tie_group: dist.ProcessGroup | None = None
    ) -> list[Unit]:
        made = parameters if materialise is None else materialise(parameters)
        kinds = (
            (name, [entry for entry in made if entry.parameter.requires_grad], tie_group),
            (f"{name} frozen", [entry for entry in made if not entry.parameter.requires_grad], None),
        )
        units = [
            Unit(
                kind,
                members,
                data_group,
                zero_stage,
                gradient_dtype,
                tied,
                group,
                in_rank_order,
                communication_dtype,
                tensor_group,
            )
            for kind, members, group in kinds
            if members
        ]
        if materialise is not None:
            for unit in units:
                unit.release()
        return units

    units = {chunk: build(f"chunk {chunk}", parameters) for chunk, parameters in chunk_parameters.items()}
    for module in tied:
        members = build(f"tied {module.key}", module.parameters, True, module.tie_group)
        for chunk in module.chunks:
            units[chunk].extend(members)
    return ZeroPartition(units, device)


def _refuse_thawed(unit: Unit) -> None:
    for entry in unit.parameters:
        if entry.parameter.requires_grad:
            raise ValueError(f"parameter {entry.name} was frozen when the engine was built; unfreeze it before that")
