"""Steps a torch optimizer in the host's thread beside the program, for one unit after another. State lies in the memory
of the host, or on a disk.

From a disk, a unit is updated in a buffer of the host, while another buffer is written and then read for the next unit.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import Parameter

from ds_lgamp.cost.offload import room
from ds_lgamp.optimizers.rounding import RoundedSteps
from ds_lgamp.optimizers.updates import Options, Updates, twin_of
from ds_lgamp.partition.disk import Disk, aligned
from ds_lgamp.partition.host import HostThread, Job
from ds_lgamp.partition.policy import UnitParameter
from ds_lgamp.partition.shards import Segment, is_elementwise
from ds_lgamp.partition.unit import Unit
from ds_lgamp.partition.zero_partition import ZeroPartition
from ds_lgamp.schedule.spec import BLOCK_ON_HOST, UPDATE_BUFFERS


class HostUpdateError(RuntimeError):
    """An update on the host failed; the message names the rank and the unit."""


class HostUpdates(Updates):
    """Updates for shards on the host.

    :meth:`update_alone` runs in the host's thread, while schedulers and scripts read and write the optimizer's groups.
    So it steps a twin, which has groups of its own and shares the state.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, partition: ZeroPartition, when: str, rounds: bool = False
    ) -> None:
        super().__init__(optimizer, partition, when, rounds)
        self._twin = twin_of(optimizer)
        self._twin.found_inf = None
        self._rounded_on_host = RoundedSteps(self._twin, BLOCK_ON_HOST) if rounds else None

    def cannot_take(self, unit: Unit, thawed: UnitParameter) -> str | None:
        # A host that takes units takes others, too.
        return None

    def skip_if(self, found_inf: torch.Tensor | None) -> None:
        self._twin.found_inf = found_inf

    def learn_of_skip(self) -> None:
        super().learn_of_skip()
        if self._rounded_on_host is not None:
            # Loads of the step have waited for all updates of the one before.
            self._rounded_on_host.forget_counts()

    def update_alone(self, unit: Unit, factor: Any, options: Options) -> Callable[[], None] | None:
        with self._named(unit):
            unit.scale_gradient(factor)
            unit.before_change()
            self._step_twin(unit, options, self.optimizer.state)
            unit.round_weights()
            unit.drop_gradient()
            unit.after_update()
        return None

    def _step_twin(
        self,
        unit: Unit,
        options: Options,
        state: dict,
        copies: Mapping[torch.Tensor, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """Steps the twin on the shards of ``unit``, or on their ``copies``, whose ``state`` it has then."""
        if self._rounded_on_host is not None:
            self._rounded_on_host.step(unit, options, state, copies, self._twin.found_inf)
            return
        self._twin.state = state
        self._twin.param_groups = [
            {**group, "params": [copies.get(shard, shard) for shard in self.shards_of(unit, index)]}
            for index, group in enumerate(options)
        ]
        self._twin.step()

    @contextmanager
    def _named(self, unit: Unit) -> Iterator[None]:
        """Lets errors of an update name rank and unit."""
        try:
            yield
        except Exception as error:
            raise HostUpdateError(
                f"rank {dist.get_rank()} failed to update {unit.name} on the host ({type(error).__name__}: {error})"
            ) from error


class Contents(NamedTuple):
    """What of a unit lies on the disk."""

    homes: Sequence[torch.Tensor]
    """All tensors that the update reads or writes."""
    read: Sequence[torch.Tensor]
    """Those that have values for it."""

    @property
    def bytes(self) -> int:
        """What the unit takes of a buffer."""
        return sum(room(home.nbytes) for home in self.homes)


class UpdateBuffers:
    """Reads units as soon as a buffer is free, in the order in which one thread announces them. Another thread fetches
    and puts back one unit after the other, in the same order.

    Args:
        disk: holds the units.
        size: bytes of the largest unit.
    """

    def __init__(self, disk: Disk, size: int) -> None:
        self._disk, self._size = disk, size
        self._free: deque[_Buffer] | None = None
        self._announced: deque[tuple[Hashable, Contents]] = deque()
        self._ahead: dict[Hashable, _Buffer] = {}
        """Buffers by the unit that they are for."""
        self._lock = Lock()

    def announce(self, unit: Hashable, contents: Contents) -> None:
        """Lets ``unit`` be read as soon as a buffer is free. Nobody else writes to it until it was put back."""
        with self._lock:
            if self._free is None:
                # Taken with the first update, not while the model is built.
                self._free = deque(_Buffer(self._size) for _ in range(UPDATE_BUFFERS))
            self._announced.append((unit, contents))
            self._read_ahead(self._free)

    def fetch(self, unit: Hashable) -> dict[int, torch.Tensor]:
        """Returns memory for each tensor of ``unit``, by the tensor's id. What was to be read is there.

        Raises:
            OSError: the unit cannot be read, or what was in its buffer could not be written.
        """
        with self._lock:
            buffer = self._ahead[unit]
        assert buffer.under_way is not None, "the unit was announced"
        buffer.under_way.wait()
        return {key: memory[: home.nbytes].view(home.dtype) for key, (home, memory) in buffer.places.items()}

    def put(self, unit: Hashable, written: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Begins to write tensors of ``unit`` back. Returns what waits for the end of that, and raises OSError if the
        disk fails."""
        with self._lock:
            assert self._free is not None, "the unit was announced"
            buffer = self._ahead.pop(unit)
            over = buffer.start(self._disk.write, written)
            self._free.append(buffer)
            self._read_ahead(self._free)
        return over.wait

    def _read_ahead(self, free: "deque[_Buffer]") -> None:
        while self._announced and free:
            unit, contents = self._announced.popleft()
            self._ahead[unit] = buffer = free.popleft()
            buffer.lay_out(contents.homes)
            buffer.start(self._disk.read, contents.read)


class _Buffer:
    """Memory of one unit, with a thread that reads and writes it in the order of the calls."""

    def __init__(self, size: int) -> None:
        self._memory, self._thread = aligned(size), HostThread(torch.device("cpu"))
        self.under_way: Job | None = None
        self.places: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Tensors on the disk and their bytes in the buffer, by the tensor's id."""

    def lay_out(self, homes: Sequence[torch.Tensor]) -> None:
        parts = self._memory[: sum(room(home.nbytes) for home in homes)].split([room(home.nbytes) for home in homes])
        self.places = {id(home): (home, part) for home, part in zip(homes, parts)}

    def start(self, move: Callable, homes: Sequence[torch.Tensor]) -> Job:
        """Lets the thread ``move`` tensors, as ``Disk.read`` or ``Disk.write`` does."""
        self.under_way = self._thread.start(partial(_run, move, [self.places[id(home)] for home in homes]))
        return self.under_way


def _run(move: Callable, places: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    moving = [move(home, memory) for home, memory in places]
    for each in moving:
        each.settle()
    for each in moving:
        each.wait()


class DiskUpdates(HostUpdates):
    """Updates for units that lie on the disk, or parts of them.

    The optimizer's shards and states are tensors on the disk, so that other code, such as a step of the whole
    optimizer, reads and writes them like any tensor. :meth:`update_alone` steps on copies in buffers instead.

    The host of the partition says what lies on the disk.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, partition: ZeroPartition, when: str, rounds: bool) -> None:
        super().__init__(optimizer, partition, when, rounds)
        host = partition.host
        assert host is not None and host.bus.disk is not None, "state lies on the disk of the host's bus"
        disk = host.bus.disk
        self._disk, self._holds_states = disk, host.on_disk.optimizer
        units = [unit for unit in partition.units if unit.trains and unit.policy.host is not None]
        self._segments = [segment for unit in units for segment in unit.master.segments]
        self._states: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        """Room on the disk for the states of each shard."""
        self._take_room()
        self._buffers = UpdateBuffers(disk, max((self._contents(unit).bytes for unit in units), default=0))
        self._move_states(self._segments)
        # A state that is loaded is a tensor in memory.
        optimizer.register_load_state_dict_post_hook(lambda _: self._move_states(self._segments))

    def _take_room(self) -> None:
        """Takes the space of the states, before the optimizer makes them. Raises ValueError if the disk is full."""
        if not self._holds_states:
            return
        made = [self._states_made_for(options) for options in self.options()]
        for segment in self._segments:
            size, dtype = segment.end - segment.start, segment.shard.dtype
            self._states[segment.shard] = {key: self._disk.empty(size, dtype) for key in made[segment.group]}

    def _states_made_for(self, options: dict[str, Any]) -> list[str]:
        """Returns the names of the states with a value for every element, from a step on two elements. They have the
        type of the weights."""
        trial = Parameter(torch.zeros(2))
        trial.grad = torch.zeros(2)
        group = {**options, "params": [trial]}
        self._twin.param_groups, self._twin.state = [group], defaultdict(dict)
        if isinstance(self.optimizer, torch.optim.Adagrad):
            # It makes its state in its constructor.
            self._twin.state[trial] = {"step": torch.zeros(()), "sum": torch.zeros(2)}
        self._twin.step()
        return [key for key, value in self._twin.state[trial].items() if is_elementwise(value, trial)]

    def cannot_take(self, unit: Unit, thawed: UnitParameter) -> str | None:
        # Its rooms and buffers are for the segments that it has begun with.
        return "state of the optimizer lies on a disk"

    def cut(self, unit: Unit, frozen: UnitParameter) -> None:
        """Raises ValueError for a unit of the host: its rooms and buffers are for whole segments."""
        if unit.policy.host is not None:
            raise ValueError(
                f"parameter {frozen.shown} was frozen after deepspeed.initialize, but state of the optimizer lies on "
                "a disk, where it cannot be left out; freeze it before, or offload to the device cpu"
            )
        super().cut(unit, frozen)

    def announce(self, unit: Unit) -> None:
        """Lets ``unit`` be read before its update. Its gradient is final."""
        self._buffers.announce(unit, self._contents(unit))

    def _contents(self, unit: Unit) -> Contents:
        """Returns what the update of ``unit`` reads and writes on the disk."""
        shards = [segment.shard for segment in unit.master.segments]
        own = [value for shard in shards for value in self._states.get(shard, {}).values()]
        made = {id(value) for shard in shards for value in self.optimizer.state.get(shard, {}).values()}
        gradient = unit.stored_gradient
        assert gradient is not None, "the host updates the unit"
        read = [gradient, unit.master.values, *(home for home in own if id(home) in made)]
        weights = [unit.storage.shard] if unit.master.is_copy else []
        on_disk = self._disk.holds
        return Contents(
            [home for home in (gradient, unit.master.values, *weights, *own) if on_disk(home)],
            [home for home in read if on_disk(home)],
        )

    def update_alone(self, unit: Unit, factor: Any, options: Options) -> Callable[[], None]:
        with self._named(unit):
            places = self._buffers.fetch(unit)
            written = self._update(unit, factor, options, places)
            unit.drop_gradient()
        return self._buffers.put(unit, written)

    def _update(self, unit: Unit, factor: Any, options: Options, places: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Updates the copies of ``unit`` in ``places`` and what of it lies in memory. Returns the tensors whose copies
        have changed."""

        def near(tensor: torch.Tensor) -> torch.Tensor:
            return places.get(id(tensor), tensor)

        assert unit.stored_gradient is not None, "the host updates the unit"
        gradient, values = near(unit.stored_gradient), near(unit.master.values)
        unit.scale_gradient(factor, gradient)
        copies: dict[torch.Tensor, torch.Tensor] = {
            segment.shard: _copy_of(segment, values, gradient) for segment in unit.master.segments
        }
        state = self.optimizer.state
        on_copies: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        for shard, copy in copies.items():
            if shard in state:
                on_copies[copy] = {
                    key: near(value) if isinstance(value, torch.Tensor) else value
                    for key, value in state[shard].items()
                }
        self._step_twin(unit, options, on_copies, copies)
        written = [unit.master.values]
        for shard, copy in copies.items():
            if copy in on_copies:
                state[shard] = dict(on_copies[copy])
                written += self._to_disk(shard, state[shard], near)
        if unit.master.is_copy:
            near(unit.storage.shard).copy_(values)
            written.append(unit.storage.shard)
        return [home for home in written if id(home) in places]

    def _to_disk(
        self, shard: torch.Tensor, state: dict[str, Any], near: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Puts tensors on the disk into the ``state`` of ``shard``, in place of what a step or somebody else made in
        memory. Returns them. They have the values, or their copies ``near`` have."""
        homes = []
        for key, value in state.items() if self._holds_states else ():
            if is_elementwise(value, shard):
                state[key] = home = self._home(shard, key, value)
                homes.append(home)
                if near(home) is not value:
                    near(home).copy_(value)
        return homes

    def _home(self, shard: torch.Tensor, key: str, value: torch.Tensor) -> torch.Tensor:
        """Returns the room of a state on the disk. What the first step did not make gets some now."""
        homes = self._states[shard]
        if key not in homes or homes[key].dtype != value.dtype:
            homes[key] = self._disk.empty(value.numel(), value.dtype)
        return homes[key]

    def _move_states(self, segments: list[Segment]) -> None:
        """Moves states that somebody made in memory to the disk."""
        for segment in segments:
            self._to_disk(segment.shard, self.optimizer.state.get(segment.shard, {}), lambda home: home)

    def _follow(self, *_: Any) -> None:
        lagging = [unit for unit in self._lagging if unit.policy.host is not None]
        super()._follow()
        self._move_states([segment for unit in lagging for segment in unit.master.segments])


def updates_of(optimizer: torch.optim.Optimizer, partition: ZeroPartition, when: str, rounds: bool) -> Updates:
    """Returns the updates for where the shards of ``partition`` lie. With ``rounds``, they round by chance."""
    kind: type[Updates] = Updates
    host = partition.host
    if host is not None:
        kind = DiskUpdates if host.bus.disk is not None and host.on_disk.state else HostUpdates
    return kind(optimizer, partition, when, rounds)


def _copy_of(segment: Segment, values: torch.Tensor, gradient: torch.Tensor) -> Parameter:
    """Returns a parameter that takes the place of the shard of ``segment``, with its gradient."""
    copy = Parameter(values[segment.start : segment.end])
    copy.grad = gradient[segment.start : segment.end]
    return copy
