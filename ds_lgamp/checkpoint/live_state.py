"""Live states: each unit is copied to a file when its update is final, beside what the program does next.

While the state of a step is written into one slot, the state before lies whole in another. So ranks that die at
any moment leave a state that is at most one step old. All ranks must have that state before one of them gives up an
older one. Therefore each waits for its last state before the sum over all ranks that ends the next step
(:meth:`LiveState.before_step`). If units are updated after that sum, two slots suffice; if before it, three are needed.
"""

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import torch

from ds_lgamp.checkpoint.files import PIECE, CheckpointError
from ds_lgamp.checkpoint.live_slot import RUN, LiveSlot, is_written
from ds_lgamp.checkpoint.names import BUFFERS, PARAMETERS, Share, parameter_name, state_name
from ds_lgamp.checkpoint.ranges import Range, Scalars, ranges_to_write, scalars_of, spread
from ds_lgamp.partition.bus import event_now
from ds_lgamp.partition.host import HostThread, Job
from ds_lgamp.partition.memory import row_of
from ds_lgamp.partition.shards import Segment
from ds_lgamp.partition.unit import Observer, Unit

_STAGED = 1 << 26
"""Bytes to copy from a device at a time."""


class BesideUnits(NamedTuple):
    """What a state holds beside units, at the end of a step."""

    step: int
    directory: str | None
    state: dict[str, Any]
    rank_state: dict[str, Any]
    buffers: Mapping[str, torch.Tensor]
    """Copies that nobody changes."""


class _Source(NamedTuple):
    """Numbers that a slot holds in one blob."""

    key: Any
    values: torch.Tensor
    held: list[dict[str, Any]]


class LiveState(Observer):
    """Keeps the state of the last whole step in a folder.

    Args:
        folder: of the live states. The first copy of a step removes the states of runs that are over.
        header: this run and rank in all headers: ``run``, the same on all ranks, ``rank``, ``ranks``, ``places``.
        units: all units of this rank.
        optimizer: has their state.
        device: where buffers lie.
        slots: how many states the folder holds at most.
        share: this rank's share of the checkpoint's description, without scalars.
    """

    def __init__(
        self,
        folder: Path,
        header: Mapping[str, Any],
        units: Sequence[Unit],
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        slots: int,
        share: Share,
    ) -> None:
        self.folder, self._own = folder, folder / f"{RUN}{header['run']}"
        self._units, self._optimizer, self._device = units, optimizer, device
        self.header, self._share = header, share
        self._sources = _Sources(optimizer)
        self._slots = [_Contents(LiveSlot(self._own / f"{header['rank']}-{number}")) for number in range(slots)]
        self._thread = HostThread(device, "ds_lgamp live state")
        self._lock = RLock()
        self._changes = dict.fromkeys(units, 0)
        self._under_way: dict[Unit, Job] = {}
        self._last: Job | None = None
        self._sealing: Job | None = None
        self._copied: set[Unit] = set()
        """Units whose update of the current step is under way to the slot, or there."""
        self._beside: BesideUnits | None = None
        """What the current step has beside units, once it is over."""
        self._is_open = False
        """Whether the first of the slots takes the current step."""
        self.step: int | None = None
        """The step of the newest state of this rank that is whole; None without one."""
        self._staging = _Staging(device) if device.type != "cpu" else None
        for unit in units:
            unit.observers.append(self)
        optimizer.register_load_state_dict_pre_hook(lambda _, __: self._before_all())

    def take(self, units: Sequence[Unit], share: Share) -> None:
        """Goes on with these ``units`` and their ``share``, between steps and when no update is under way. The state of
        the last step stays."""
        self.wait()
        with self._lock:
            self._sources.forget(set(self._units) - set(units))
            for unit in set(units) - set(self._units):
                self._changes[unit] = 0
                unit.observers.append(self)
            self._units, self._share = units, share

    def before_change(self, unit: Unit) -> None:
        self._changes[unit] += 1
        copying = self._under_way.pop(unit, None)
        if copying is not None:
            copying.wait()

    def after_update(self, unit: Unit) -> None:
        with self._lock:
            self._copy(unit)
            self._seal_if_whole()

    def complete(self, beside: BesideUnits) -> None:
        """Called at the end of a step: the state is whole with ``beside`` and the units as they are, or will be after
        the updates that the step has postponed."""
        with self._lock:
            assert self._beside is None, "the updates of a step end before the next step does"
            self._beside = beside
            for unit in self._units:
                if unit not in self._copied and unit.storage.pending is None:
                    self._copy(unit)
            self._seal_if_whole()

    def before_step(self) -> None:
        """Waits until the state of the last step is whole on this rank. Called before the sum over all ranks that ends
        a step. Raises CheckpointError if it cannot be written."""
        if self._sealing is not None:
            self._sealing.wait()

    def wait(self) -> None:
        """Waits for the copies under way, and so until the state of the last step is in the folder, if no update of it
        is postponed. Raises CheckpointError if one has failed."""
        if self._last is not None:
            self._last.wait()

    def forget(self) -> None:
        """Drops what the slots hold, after another state was loaded."""
        self.wait()
        with self._lock:
            self._copied, self._beside, self._is_open, self.step = set(), None, False, None
            for contents in self._slots:
                contents.slot.drop()

    @property
    def bytes_here(self) -> int:
        """The bytes of the numbers of this run in the folder, as this rank sees it: of all ranks of its node."""
        size = 0
        for path in self._own.glob("*.bin"):
            # Another rank may be removing its own.
            with suppress(FileNotFoundError):
                size += path.stat().st_size
        return size

    def leave(self) -> None:
        """Leaves the files to the next run, when this rank trains no more."""
        # No job closes them: garbage collection may have ended the thread.
        with suppress(CheckpointError):
            self.wait()
        for contents in self._slots:
            contents.slot.close()

    def remove(self) -> None:
        """Removes the files of this rank, which trains no more."""
        with suppress(CheckpointError):
            self.wait()
        self.step = None
        # The folder stays as long as other ranks of the node have files there. The next run removes what stays.
        with suppress(OSError):
            for contents in self._slots:
                contents.slot.remove()
            self._own.rmdir()

    def _before_all(self) -> None:
        for unit in self._units:
            self.before_change(unit)

    def _copy(self, unit: Unit) -> None:
        contents = self._writing()
        self._copied.add(unit)
        if contents.changes.get(unit) == self._changes[unit]:
            return
        contents.changes[unit] = self._changes[unit]
        sources = list(self._sources.of(unit))
        states = [(segment, self._optimizer.state.get(segment.shard, {})) for segment in unit.master.segments]
        event = event_now(unit.master.values.device)
        self._under_way[unit] = self._start(event, self._write_unit, contents, unit, sources, states)

    def _seal_if_whole(self) -> None:
        if self._beside is not None and len(self._copied) == len(self._units):
            beside, self._beside, self._copied = self._beside, None, set()
            self._sealing = self._start(event_now(self._device), self._seal, self._writing(), beside)
            self._slots.append(self._slots.pop(0))
            self._is_open = False

    def _writing(self) -> "_Contents":
        """The slot that takes the current step."""
        contents = self._slots[0]
        if not self._is_open:
            self._is_open = True
            if contents.slot.is_gone:
                contents.changes.clear()
            event = event_now(self._device)
            self._start(event, self._open, contents, event)
        return contents

    def _start(self, event: Any, function: Callable[..., None], *arguments: Any) -> Job:
        """Lets the thread call ``function``, whose reads of the device wait for ``event``; None if everything that it
        reads is on the host."""

        def run() -> None:
            try:
                with nullcontext() if self._staging is None or event is None else self._staging.after(event):
                    function(*arguments)
            except OSError as error:
                raise CheckpointError(
                    f"the live state in {self.folder} cannot be written ({error.strerror}); make room there, or "
                    "remove live_checkpoint"
                ) from None

        self._last = self._thread.start(run)
        return self._last

    # In the thread

    def _open(self, contents: "_Contents", event: Any) -> None:
        if event is not None:
            # The host may have launched the sum over all ranks without waiting for it.
            event.synchronize()
        # All ranks of the node make it.
        self._own.mkdir(parents=True, exist_ok=True)
        for other in self.folder.glob(f"{RUN}*"):
            if other != self._own and not is_written(other):
                shutil.rmtree(other, ignore_errors=True)
        contents.slot.open()

    def _write_unit(
        self,
        contents: "_Contents",
        unit: Unit,
        sources: Sequence[_Source],
        states: Sequence[tuple[Segment, Mapping[str, Any]]],
    ) -> None:
        contents.blobs[unit] = [self._write(contents, source) for source in sources]
        contents.scalars[unit] = scalars_of(states)

    def _write(self, contents: "_Contents", source: _Source) -> Any:
        values = source.values
        pieces = _pieces(values) if self._staging is None or values.is_cpu else self._staging.pieces(values)
        return contents.slot.write(source.key, values.dtype, values.nbytes, pieces, source.held)

    def _seal(self, contents: "_Contents", beside: BesideUnits) -> None:
        buffers = [_buffer(name, values) for name, values in beside.buffers.items()]
        blobs = [blob for unit in self._units for blob in contents.blobs[unit]]
        scalars = [contents.scalars[unit] for unit in self._units]
        contents.slot.seal(
            {
                **self.header,
                "step": beside.step,
                "directory": beside.directory,
                "blobs": blobs + [self._write(contents, buffer) for buffer in buffers],
                "state": beside.state,
                "parameters": self._share.parameters,
                "scalars": {str(group): own for each in scalars for group, own in each.scalars.items()},
                "of_parameters": {name: own for each in scalars for name, own in each.of_parameters.items()},
                "extra_states": sorted(self._share.extra_states),
                "rank_state": beside.rank_state,
            }
        )
        self.step = beside.step


class _Sources:
    """Finds the numbers of units that this rank writes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._ranges: dict[Unit, list[Range]] = {}
        self._held: dict[Any, list[dict[str, Any]]] = {}
        """By key of a source. It is the same in every step."""

    def forget(self, units: Collection[Unit]) -> None:
        """Forgets ``units``, in whose place others of the same names may come."""
        names = {unit.name for unit in units}
        self._held = {key: held for key, held in self._held.items() if key[0] not in names}
        for unit in units:
            self._ranges.pop(unit, None)

    def of(self, unit: Unit) -> Iterator[_Source]:
        """Yields what this rank writes of ``unit``."""
        if unit not in self._ranges:
            self._ranges[unit] = list(ranges_to_write(unit))
        ranges = self._ranges[unit]
        if ranges:
            yield self._source((unit.name, PARAMETERS), parameter_name, unit.master.values, ranges, 0)
        for segment in unit.master.segments:
            own = [r for r in ranges if segment.start <= r.in_shard.start < segment.end]
            for key, values in spread(self._optimizer, segment).items() if own else ():
                place = unit.name, segment.start, segment.end, key
                yield self._source(place, partial(state_name, key), values, own, segment.start)

    def _source(
        self, key: Any, name_of: Callable[[str], str], values: torch.Tensor, ranges: Sequence[Range], first: int
    ) -> _Source:
        """Returns the source of ``ranges`` of ``values``, which hold the shard from element ``first`` on."""
        if key not in self._held:
            self._held[key] = _held(name_of, ranges)
        return _Source(
            key, values[ranges[0].in_shard.start - first : ranges[-1].in_shard.stop - first], self._held[key]
        )


class _Contents:
    """A slot and what it holds."""

    def __init__(self, slot: LiveSlot) -> None:
        self.slot = slot
        self.changes: dict[Unit, int] = {}
        """How often a unit had changed when it was copied."""
        self.blobs: dict[Unit, list[Any]] = {}
        self.scalars: dict[Unit, Scalars] = {}


class _Staging:
    """Brings numbers from a device to the host, through pinned memory and on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._memory: torch.Tensor | None = None

    @contextmanager
    def after(self, event: Any) -> Iterator[None]:
        """What the block reads from the device, single numbers too, waits for ``event``. It does not wait for what the
        program has launched since."""
        with self._module.stream(self._stream):
            self._stream.wait_event(event)
            yield

    def pieces(self, values: torch.Tensor) -> Iterator[memoryview]:
        """Yields the bytes of ``values``. Only called inside :meth:`after`."""
        if self._memory is None:
            self._memory = torch.empty(_STAGED, dtype=torch.uint8, device="cpu", pin_memory=True)
        for part in values.detach().view(torch.uint8).split(_STAGED):
            staged = self._memory[: part.numel()]
            staged.copy_(part, non_blocking=True)
            self._stream.synchronize()
            yield from _pieces(staged)


def _pieces(values: torch.Tensor) -> Iterator[memoryview]:
    """Yields the bytes of ``values`` [numel] on the host."""
    whole = memoryview(values.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]
    for first in range(0, len(whole), PIECE):
        yield whole[first : first + PIECE]


def _held(name_of: Callable[[str], str], ranges: Sequence[Range]) -> list[dict[str, Any]]:
    """Describes ``ranges``, which follow one another in the shard, from the first one on."""
    return [
        {
            "name": name_of(r.part.name),
            "first": r.in_shard.start - ranges[0].in_shard.start,
            "numel": r.in_shard.stop - r.in_shard.start,
            "start": r.start,
            "shape": list(r.part.shape),
            "whole_shape": list(r.part.whole_shape),
            "slice_offsets": list(r.part.slice_offsets),
        }
        for r in ranges
    ]


def _buffer(name: str, values: torch.Tensor) -> _Source:
    shape = list(values.shape)
    entry = {"name": f"{BUFFERS}/{name}", "first": 0, "numel": values.numel(), "start": 0}
    shapes = {"shape": shape, "whole_shape": shape, "slice_offsets": [0] * len(shape)}
    return _Source((name, BUFFERS), row_of(values), [{**entry, **shapes}])
