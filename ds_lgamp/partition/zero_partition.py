"""The units of a pipeline rank, driven by the actions of its programs."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from ds_lgamp.cost.units import UnitSize, aligned
from ds_lgamp.partition.policy import UnitParameter, ZeroPolicy
from ds_lgamp.partition.quantised import is_packed
from ds_lgamp.partition.rank_units import RankUnits
from ds_lgamp.partition.unit import Unit


class TiedParameters(NamedTuple):
    """A module that several layers share."""

    key: str
    parameters: Sequence[UnitParameter]
    chunks: Sequence[int]
    """The chunks of this rank that use it."""
    tie_group: dist.ProcessGroup | None
    """The pipeline ranks that hold a copy; None if there is no other copy."""


class ZeroPartition(RankUnits):
    """Does for the units of a chunk what an action says, and keeps track of reductions and stores under way.

    Args:
        units: the units that every chunk of this rank uses: its own and those of tied modules. A chunk without
            parameters has none.
        device: where the parameters live.
    """

    def __init__(self, units: Mapping[int, Sequence[Unit]], device: torch.device) -> None:
        self.device = device
        self._finished: set[Unit] = set()
        """Units whose gradients are finished before the step."""
        self._accumulating: set[int] = set()
        """Chunks between their first backward and their REDUCE."""
        self._reducing: dict[int, list[Unit]] = {}
        """Units under reduction, by the chunk whose REDUCE launched it."""
        self._combining: dict[int, list[Unit]] = {}
        """The same units, once the reduction inside their nodes is over."""
        self._storing: dict[int, list[Unit]] = {}
        """Units whose gradients are under way to the host, by the chunk whose STORE launched it."""
        super().__init__(units)

    def gather(self, chunk: int) -> None:
        """Launches the gathers that ``chunk`` needs, or the loads of what the host has a copy of. A unit that is
        complete and current moves nothing."""
        for unit in self.chunk_units[chunk]:
            unit.storage.hold(chunk)

    def load(self, chunk: int) -> None:
        """Starts to load what the next gathers of ``chunk`` need from the host. The gather of a whole unit is its
        load."""
        for unit in self.chunk_units[chunk]:
            if not unit.policy.whole:
                unit.storage.start_load()

    def wait_load(self, chunk: int) -> None:
        """Waits for the loads of ``chunk`` that are under way. Raises what the updates of the units raised."""
        for unit in self.chunk_units[chunk]:
            unit.storage.finish_load()

    def wait_gather(self, chunk: int) -> None:
        """Waits for the gathers of ``chunk`` in flight, and for the loads of copies."""
        for unit in self.chunk_units[chunk]:
            unit.storage.finish_gather()

    def store_weights(self, chunk: int) -> None:
        """Starts to copy the gathered parameters of ``chunk`` to the host, as far as this rank shares them."""
        for unit in self.chunk_units[chunk]:
            unit.storage.start_copy()

    def wait_store_weights(self, chunk: int) -> None:
        """Waits for what :meth:`store_weights` started."""
        for unit in self.chunk_units[chunk]:
            if unit.storage.copy is not None:
                unit.storage.copy.finish()

    def release(self, chunk: int) -> None:
        """Frees the units that ``chunk`` held, except those that somebody else holds."""
        for unit in self.chunk_units[chunk]:
            unit.storage.drop(chunk)

    def owns(self, chunk: int, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of the parameters that ``chunk`` uses."""
        address = tensor.untyped_storage().data_ptr()
        return any(unit.storage.flat.untyped_storage().data_ptr() == address for unit in self.chunk_units[chunk])

    def begin_backward(self, chunk: int) -> None:
        """Lets the gradients of ``chunk`` accumulate, before a backward pass of it. The program has waited for the
        chunk's own reduction, but another chunk may have launched one of a tied unit."""
        if chunk in self._accumulating:
            return
        self._accumulating.add(chunk)
        reductions = [unit.reduction for unit in self.chunk_units[chunk] if unit.trains]
        beginning = [reduction for reduction in reductions if not reduction.accumulating]
        for reduction in beginning:
            reduction.finish()
        for reduction in beginning:
            reduction.begin_accumulation()

    def reduce(self, chunk: int) -> None:
        """Launches the reduction of the units whose last user is ``chunk``."""
        self._accumulating.discard(chunk)
        launched = self._reducing[chunk] = []
        for unit in self.chunk_units[chunk]:
            if unit.trains and unit.reduction.user_done():
                unit.reduction.start()
                launched.append(unit)

    def wait_reduce(self, chunk: int) -> None:
        """Waits for the reductions that :meth:`reduce` of ``chunk`` launched."""
        self._combining[chunk] = self._reducing.pop(chunk)
        for unit in self._combining[chunk]:
            unit.reduction.finish_reduction()

    def combine(self, chunk: int) -> None:
        """Lets the reductions that :meth:`wait_reduce` of ``chunk`` awaited go on between nodes."""
        for unit in self._combining[chunk]:
            unit.reduction.combine()

    def wait_combine(self, chunk: int) -> None:
        """Waits for what :meth:`combine` of ``chunk`` launched."""
        for unit in self._combining[chunk]:
            unit.reduction.finish()

    def refresh(self, chunk: int) -> None:
        """Launches, between nodes, the gathers of what the last step updated of the units that ``chunk`` uses."""
        for unit in self.chunk_units[chunk]:
            unit.storage.catch_up()
            unit.storage.slices.start()

    def wait_refresh(self, chunk: int) -> None:
        """Waits for the gathers between nodes that are still in flight."""
        for unit in self.chunk_units[chunk]:
            unit.storage.slices.finish()

    def store(self, chunk: int) -> None:
        """Starts to copy the gradients of the units that ``chunk`` alone uses to the host, after their reduction."""
        units = self._storing[chunk] = self.alone(chunk)
        for unit in units:
            unit.start_store()

    def wait_store(self, chunk: int) -> None:
        """Waits for what :meth:`store` of ``chunk`` started. The device frees these gradients."""
        units = self._storing.pop(chunk)
        for unit in units:
            unit.finish_store()
        self._finished.update(units)

    def finish_gradients(self) -> None:
        """Gives every segment its gradient, averaged over the data-parallel ranks, after all reductions. It leaves out
        the units that are finished."""
        # In the order of names: all pipeline ranks sum the copies of tied units in the same order.
        for unit in sorted(self.units, key=lambda unit: unit.name):
            if unit.trains and unit not in self._finished:
                unit.finish_gradient()
        self._finished.clear()

    def finish_gradients_of(self, chunk: int) -> list[Unit]:
        """Does what :meth:`finish_gradients` does, for the units that ``chunk`` alone uses, after their reduction.
        Returns them."""
        units = self.alone(chunk)
        for unit in units:
            if unit not in self._finished:
                unit.finish_gradient()
        self._finished.update(units)
        return units


def _kinds(
    name: str, parameters: Sequence[UnitParameter]
) -> Iterator[tuple[str, dist.ProcessGroup | None, list[UnitParameter]]]:
    """Yields the name of every unit of ``parameters``, the ranks that have it if not all do, and its parameters. Frozen
    ones may have several dtypes, such as those of packed bytes, and have a unit for each."""
    groups = dict.fromkeys([None, *(entry.sharing for entry in parameters)])
    for number, sharing in enumerate(groups):
        of = name if sharing is None else f"{name} experts{'' if number == 1 else f' {number}'}"
        own = [entry for entry in parameters if entry.sharing is sharing]
        if trained := [entry for entry in own if entry.parameter.requires_grad]:
            yield of, sharing, trained
        frozen: dict[torch.dtype, list[UnitParameter]] = {}
        for entry in own:
            if not entry.parameter.requires_grad:
                frozen.setdefault(entry.parameter.dtype, []).append(entry)
        ordinary = next((dtype for dtype in frozen if dtype.is_floating_point), None)
        for dtype, members in frozen.items():
            other = "" if dtype is ordinary else f" {str(dtype).removeprefix('torch.')}"
            yield f"{of} frozen{other}", sharing, members


def build_partition(
    chunk_parameters: Mapping[int, Sequence[UnitParameter]],
    tied: Sequence[TiedParameters],
    policy: ZeroPolicy,
    device: torch.device,
    materialise: Callable[[Sequence[UnitParameter]], Sequence[UnitParameter]] | None = None,
) -> ZeroPartition:
    """Builds one unit for every chunk's own parameters and one for every tied module, which moves beside the chunks
    that use it. Frozen parameters of a chunk or of a tied module have a unit of their own, and so have experts that not
    all data-parallel ranks have.

    Args:
        chunk_parameters: the own parameters of every chunk of this rank.
        tied: the tied modules of this rank.
        policy: what all units share.
        device: where the parameters live.
        materialise: given where parameters have no memory yet. It makes those of one unit, which is built and released
            before the next.
    """

    def build(
        name: str,
        parameters: Sequence[UnitParameter],
        policy: ZeroPolicy,
        tied: bool = False,
        tie_group: dist.ProcessGroup | None = None,
    ) -> list[Unit]:
        made = parameters if materialise is None else materialise(parameters)
        units = [
            Unit(kind, members, policy if sharing is None else policy.of_experts(sharing), tied, tie_group)
            for kind, sharing, members in _kinds(name, made)
        ]
        if materialise is not None:
            for unit in units:
                unit.storage.release()
        return units

    units = {
        chunk: build(f"chunk {chunk}", parameters, policy.of_chunk(chunk))
        for chunk, parameters in chunk_parameters.items()
    }
    for module in tied:
        members = build(f"tied {module.key}", module.parameters, policy.of_tied(), True, module.tie_group)
        for chunk in module.chunks:
            units[chunk].extend(members)
    return ZeroPartition(units, device)


def unit_sizes(partition: ZeroPartition, home_of_frozen: Literal["device", "host", "none"] = "none") -> list[UnitSize]:
    """Returns the sizes of the units of a partition, as the formula of memory takes them."""
    sizes = []
    for unit in partition.units:
        chunks = tuple(chunk for chunk, units in partition.chunk_units.items() if unit in units)
        copies = 1 if unit.tie_group is None or not unit.trains else unit.tie_group.size()
        # Experts are means over all ranks, and lie on fewer.
        divided = unit.policy.mean_ranks // unit.policy.data_group.size()
        whole_on = None if unit.trains or home_of_frozen == "none" else home_of_frozen
        packed = (entry.parameter.dtype.itemsize for entry in unit.storage.parameters if is_packed(entry.parameter))
        # Who imagines a partition has no homes, and takes one machine for that of all ranks.
        sharers = 1
        if whole_on == "host":
            loaded = unit.storage.loaded
            sharers = unit.policy.data_group.size() if loaded is None else loaded.shared_by
        sizes.append(
            UnitSize(
                *(unit.storage.end, _taken(unit), chunks, unit.tied, copies, not unit.trains),
                expert_ranks=divided,
                whole_on=whole_on,
                home_shared_by=sharers,
                packed=next(packed, None),
                alignment=unit.policy.alignment,
                in_32_bits=_taken(unit, in_32_bits=True),
            )
        )
    return sizes


def _taken(unit: Unit, in_32_bits: bool = False) -> int:
    """Returns the elements that parameters of the optimizer take in a unit: all, or those with state ``in_32_bits``."""
    entries = zip(unit.storage.parameters, unit.storage.contents())
    own = (shape for entry, (_, shape, group) in entries if group is not None and (entry.in_32_bits or not in_32_bits))
    return sum(aligned(math.prod(shape), unit.policy.alignment) for shape in own)
