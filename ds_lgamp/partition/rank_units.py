"""All units of a pipeline rank, between the actions of its programs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch

from ds_lgamp.partition.memory import outside_of_pools
from ds_lgamp.partition.policy import UnitParameter
from ds_lgamp.partition.shards import Segment
from ds_lgamp.partition.unit import Unit


class RankUnits:
    """Holds the units of a rank, and says which of its chunks use them.

    Args:
        units: the units that every chunk of this rank uses: its own and those of tied modules. A chunk without
            parameters has none.
    """

    def __init__(self, units: Mapping[int, Sequence[Unit]]) -> None:
        self._take(units)

    def _take(self, units: Mapping[int, Sequence[Unit]]) -> None:
        self.chunk_units = units
        users = Counter(unit for members in units.values() for unit in members)
        self.units = list(users)
        for unit, count in users.items():
            unit.reduction.users = count
        hosts = [(unit.policy.host, unit.policy.whole) for unit in self.units if unit.policy.host is not None]
        self.host = next((host for host, whole in hosts if not whole), None)
        """What offloading leaves to the host; None without it."""
        buses = [*(host.bus for host, _ in hosts), *(unit.policy.bus for unit in self.units)]
        self.bus = next((bus for bus in buses if bus is not None), None)
        """What carries units between device and host; None if all stay on the device."""
        self.frees_weights = any(unit.storage.frees_weights for unit in self.units)
        """Whether full parameters exist only between gather and release."""
        self._shared = {unit for unit in self.units if unit.tie_group is not None or users[unit] > 1}
        """Units that several chunks use, here or on other pipeline ranks."""

    def alone(self, chunk: int) -> list[Unit]:
        """The units that the program updates with ``chunk``; with offloading, those of the host."""
        own = (unit for unit in self.chunk_units[chunk] if unit.trains and unit not in self._shared)
        return [unit for unit in own if unit.policy.host is self.host]

    @torch.no_grad()
    def attach_parameters(self) -> None:
        """Takes over values of parameters to which user code gave another tensor. Engines call it before a batch and
        before they save weights. Parameters that are released between uses refuse such a tensor."""
        for unit in self.units:
            if not unit.storage.frees_weights:
                unit.storage.attach_parameters()

    def thawed(self) -> list[UnitParameter]:
        """Returns the parameters of frozen units that the script has unfrozen. Engines call it before a training
        batch."""
        return [entry for unit in self.units for entry in unit.thawed]

    def refuse_thawed(self) -> None:
        """Raises ValueError if parameters are :meth:`thawed`."""
        for entry in self.thawed():
            raise ValueError(f"parameter {entry.shown} was frozen when the engine was built; unfreeze it before that")

    def thaw(self) -> list[Unit]:
        """Gives the parameters that are :meth:`thawed` units that train. Returns all new units; what was frozen beside
        these parameters has new ones, too. All ranks that share units call it together, between batches."""
        self.catch_up()
        names, made = {unit.name for unit in self.units}, {}
        for unit in self.units:
            if unit.thawed:
                thawed = f"{unit.name.partition(' frozen')[0]} thawed"
                earlier = sum(name == thawed or name.startswith(f"{thawed} ") for name in names)
                made[unit] = unit.thaw(f"{thawed} {earlier + 1}" if earlier else thawed)
                names.update(new.name for new in made[unit])
        chunks = self.chunk_units.items()
        self._take({chunk: [new for unit in units for new in made.get(unit, [unit])] for chunk, units in chunks})
        return [new for units in made.values() for new in units]

    @torch.no_grad()
    def adopt_parameters(self) -> None:
        """Takes shards and master weights from the full parameters. User code changed these in the same way on all
        data-parallel ranks, inside :meth:`full_parameters` or where they are not released."""
        for unit in self.units:
            unit.adopt()

    def catch_up(self) -> None:
        """Ends the updates that were left to later."""
        for unit in self.units:
            unit.storage.catch_up()

    def counted_gradients(self) -> list[torch.Tensor]:
        """Returns the gradients that this rank counts in the norm: over all ranks, every element counts once."""
        for unit in self.units:
            unit.settle_store()
        return [gradient for unit in self.units for gradient in unit.master.counted_gradients()]

    def follow_update(self) -> None:
        """Brings the shards up to date after the optimizer changed the master weights. Gathered parameters are old
        now."""
        for unit in self.units:
            if unit.trains:
                unit.follow_update()

    def drop_gradients(self) -> None:
        """Frees the gradients after the step, except those of updates that it left to later."""
        for unit in self.units:
            if unit.trains and unit.storage.pending is None:
                unit.drop_gradient()

    def gather_stale(self) -> None:
        """Launches the gathers of all old parameters, after shards were loaded. All data-parallel ranks call it
        together."""
        for unit in self.units:
            unit.storage.refresh()

    def finish_gathers(self) -> None:
        """Waits for all gathers in flight."""
        for unit in self.units:
            unit.storage.finish_gather()

    def segments(self) -> Iterator[Segment]:
        """Yields the segments that the optimizer owns, in a fixed order."""
        for unit in self.units:
            yield from unit.master.segments

    def release_all(self) -> None:
        for unit in self.units:
            unit.storage.release()

    @contextmanager
    def full_parameters(self, chunk: int | None = None) -> Iterator[None]:
        """Inside the block, the parameters that ``chunk`` uses, by default all of this rank, are complete and current.
        All data-parallel ranks enter it together."""
        block = object()
        units = self.units if chunk is None else self.chunk_units[chunk]
        with outside_of_pools() if chunk is None else nullcontext():
            for unit in units:
                unit.storage.hold(block, exact=True)
        for unit in units:
            unit.storage.finish_gather()
        try:
            yield
        finally:
            for unit in units:
                unit.storage.drop(block)
