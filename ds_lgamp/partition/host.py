"""What the host does for units with offloading: it holds this rank's weights, which are loaded, and its gradient, which
is stored, in memory or on a disk; and a thread updates one unit after another, beside the program."""

import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_lgamp.cost.offload import OnDisk
from ds_lgamp.partition.agreement import everyone
from ds_lgamp.partition.bus import Bus, Transfer, use_device
from ds_lgamp.partition.collectives import followed
from ds_lgamp.partition.disk import Disk
from ds_lgamp.partition.memory import common_copy, in_pool

Work = Callable[[], Callable[[], None] | None]
"""What the thread calls. It may return what waiters call in turn, such as the wait for a write to the disk, so that the
thread goes on with the next job."""


class Job:
    """A function that the thread calls, or will call."""

    def __init__(self, function: Work, thread: Thread) -> None:
        self._function: Work | None = function
        self._thread = thread
        self._settle: Callable[[], None] | None = None
        self._over = Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Blocks until the job is over. Raises what it, or an earlier job of the thread, raised. It does not block the
        thread itself, where garbage collection may destroy an engine, which waits for its jobs."""
        if current_thread() is self._thread:
            return
        self._over.wait()
        if self._error is not None:
            raise self._error
        if self._settle is not None:
            self._settle()

    def _run(self, failure: BaseException | None) -> BaseException | None:
        function, self._function = self._function, None
        assert function is not None, "a job runs once"
        if failure is None:
            try:
                self._settle = function()
            except BaseException as error:
                failure = error
        self._error = failure
        self._over.set()
        return failure


class HostThread:
    """Runs jobs in their order. It begins with the first job and ends with the object. After a failed job, all later
    ones fail with its error, because they would work on half a step.

    Args:
        device: where the jobs' events and tensors are, beside the host.
        name: the thread's.
        threads: by how many threads torch computes a job; None for as many as everywhere.
    """

    def __init__(self, device: torch.device, name: str = "ds_lgamp updates", threads: int | None = None) -> None:
        self._device, self._name, self._threads = device, name, threads
        self._queue: SimpleQueue[Job | None] | None = None
        self._thread: Thread | None = None

    def start(self, function: Work) -> Job:
        """Lets the thread call ``function`` when it has done the jobs so far."""
        if self._queue is None or self._thread is None:
            self._queue = SimpleQueue()
            weakref.finalize(self, self._queue.put, None)
            self._thread = Thread(target=_serve, args=(self._queue, self._device), name=self._name, daemon=True)
            self._thread.start()
            if self._threads is not None:
                elsewhere = torch.get_num_threads()
                self.start(partial(_compute_with, self._threads)).wait()
                # torch would use the number for threads that begin later, too, which are not this one's to change.
                torch.set_num_threads(elsewhere)
        job = Job(function, self._thread)
        self._queue.put(job)
        return job


def _compute_with(threads: int) -> None:
    # A thread that has never asked would take torch's number at its first computation.
    torch.get_num_threads()
    torch.set_num_threads(threads)


def _serve(queue: "SimpleQueue[Job | None]", device: torch.device) -> None:
    use_device(device)
    failure = None
    while (job := queue.get()) is not None:
        failure = job._run(failure)
        # The thread must not keep what the job holds alive while it waits for the next one.
        del job


class ShardUpdate:
    """An update of a unit that is still to come, or under way on the host.

    Args:
        update: changes nothing but the unit's tensors.
        thread: calls it with offloading. Without, whoever waits calls it.
        announce: is called right before the thread gets the update.
    """

    def __init__(self, update: Work, thread: HostThread | None, announce: Callable[[], None]) -> None:
        self._update: Work | None = update
        self._thread, self._announce = thread, announce
        self._job: Job | None = None

    def start(self) -> None:
        """Lets the thread begin the update, unless it has. The device begins none that nobody waits for."""
        if self._thread is not None and self._update is not None:
            update, self._update = self._update, None
            self._announce()
            self._job = self._thread.start(followed(update, "host update"))

    def wait(self) -> None:
        """Ends the update. It needs no other rank. Raises what the update raised."""
        self.start()
        if self._job is not None:
            self._job.wait()
        elif self._update is not None:
            # An evaluation may be in inference mode. State that was made in it could not be updated later.
            with torch.inference_mode(False), torch.no_grad():
                self._update()


class Host(NamedTuple):
    """What all units of a partition share with offloading."""

    bus: Bus
    updates: HostThread
    """Updates the units."""
    parameters: bool
    """Whether the device holds nothing of a unit between its uses."""
    on_disk: OnDisk = OnDisk()
    """What lies on the disk of the bus, instead of in memory."""
    on_device: tuple[int, ...] = ()
    """Chunks of which the host holds nothing. If there are any, it holds nothing of tied modules either."""

    def empty(self, size: int, dtype: torch.dtype, on_disk: bool) -> torch.Tensor:
        """Returns memory that loads and stores copy, or room on the disk."""
        return self._disk.empty(size, dtype) if on_disk else self.bus.room.empty(size, dtype)

    def master_weights(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns a copy of half-precision weights in fp32."""
        if not self.on_disk.optimizer:
            return shard.float()
        return self._disk.empty(shard.numel(), torch.float32).copy_(shard)

    def room_beside(self, home: torch.Tensor) -> torch.Tensor | None:
        """Returns room for as many values as ``home`` has, if that lies on the disk."""
        if self.bus.disk is None or not self.bus.disk.holds(home):
            return None
        return self.bus.disk.empty(home.numel(), home.dtype)

    @property
    def _disk(self) -> Disk:
        assert self.bus.disk is not None, "something lies on it"
        return self.bus.disk


class LoadedPart:
    """This rank's part of a unit's weights on the device, with its home on the host.

    Args:
        host: has the bus that carries it.
        part: on the device.
        sharing: the ranks that have the same part, and on one machine may share its home; None if each has its own.
    """

    def __init__(self, host: Host, part: torch.Tensor, sharing: dist.ProcessGroup | None = None) -> None:
        common = None if sharing is None else common_copy(part, sharing)
        self.part, self._sharing = part, None if common is None else sharing
        own = partial(host.empty, part.numel(), part.dtype, host.on_disk.parameters)
        self.home, self.shared_by = (own().copy_(part), 1) if common is None else common
        """The same part on the host or its disk, and how many ranks of this machine have it there together. Call
        :meth:`settle` before writing to it and :meth:`outdate` after."""
        self.is_current = True
        """Whether the device has the values of the home."""
        self._bus, self._frees = host.bus, host.parameters
        self._bytes = part.untyped_storage().nbytes()
        self.loading: Transfer | None = None
        """The load under way, until somebody has waited for it here."""
        self._last: Transfer | None = None

    def start(self, after: Callable[[], None] | None) -> None:
        """Starts to load what is not current, once ``after`` has returned in the transfer's thread."""
        if self.is_current or self.loading is not None:
            return
        if self._frees and not self.part.untyped_storage().nbytes():
            in_pool(self.part.device, partial(self.part.untyped_storage().resize_, self._bytes))
        self.loading = self._bus.load(self.part, self.home, after)

    def finish(self) -> None:
        """Waits for the load that is under way. Raises what ``after`` raised."""
        if self.loading is not None:
            self._last, self.loading = self.loading, None
            self._last.wait()
            self.is_current = True

    def outdate(self) -> None:
        """Lets the next :meth:`start` load the part, because its home changes."""
        self.finish()
        self.is_current = False

    def settle(self) -> None:
        """Blocks the host until no load reads the home. Collective over the ranks that share it, which then write the
        same to it."""
        self.finish()
        if self._last is not None:
            self._last.done()
        if self._sharing is not None:
            everyone(None, self._sharing)

    def free(self) -> None:
        """Frees the part after its last use, if it has no memory between uses."""
        if self._frees:
            self.finish()
            self.part.untyped_storage().resize_(0)
            self.is_current = False


class WholeCopy:
    """The copy on the host of a unit's full parameters.

    Args:
        bus: carries them there and back.
    """

    def __init__(self, bus: Bus) -> None:
        self.is_current = False
        """Whether the host has the full parameters, or will have them when the store is over."""
        self.rounded = False
        """Whether a gather has rounded them."""
        self._bus = bus
        self._home: torch.Tensor | None = None
        self._storing: Transfer | None = None

    def store(self, full: torch.Tensor, rounded: bool) -> None:
        """Starts to copy ``full`` to the host, unless the host has its values."""
        if self.is_current:
            return
        if self._home is None:
            self._home = self._bus.room.empty(full.numel(), full.dtype)
        self._storing, self.is_current, self.rounded = self._bus.store(self._home, full), True, rounded

    def finish(self) -> None:
        """Waits for the copy to the host, if one is under way."""
        if self._storing is not None:
            self._storing.wait()
            self._storing = None

    def load(self, full: torch.Tensor) -> Transfer:
        """Starts to copy the values back to ``full``. The copy to the host was waited for."""
        assert self._home is not None, "the host has the parameters"
        return self._bus.load(full, self._home)


def arriving(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Starts to copy a small tensor to the host. Returns the function that waits for it, in any thread."""
    if value.device.type == "cpu":
        return lambda: value
    arrived = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
    arrived.copy_(value, non_blocking=True)
    event = torch.get_device_module(value.device).Event()
    event.record()

    def wait() -> torch.Tensor:
        event.synchronize()
        return arrived

    return wait
