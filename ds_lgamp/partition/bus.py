"""The bus copies tensors between the memory of the host and that of the device, beside compute.

Each direction has a thread and copies one tensor after the other. On an accelerator, the thread issues the copy on a
stream of the direction, between pinned memory and the device. On a CPU, host and device are two pools of main memory,
the thread copies itself, and the bus may be as slow as the caller wants.

A tensor on the disk travels in pieces, through a few buffers of the host, whatever its size. The disk moves some of the
pieces while another one crosses the bus.
"""

import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch

from ds_lgamp.cost.offload import room
from ds_lgamp.partition import disk as disks
from ds_lgamp.partition.collectives import Flight, launched
from ds_lgamp.partition.disk import Disk, Moving, aligned
from ds_lgamp.partition.memory import HostRoom

Copy = Callable[[torch.Tensor, torch.Tensor, Any], Any]
"""Copies to a target from a source, on a device after an event. Returns the event of its end; None on a CPU."""


class Transfer:
    """A copy that is under way. It keeps both tensors alive until somebody has waited for it."""

    def __init__(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Callable[[], None] | None,
        now: Any,
        flight: Flight | None,
    ) -> None:
        self.tensors: tuple[torch.Tensor, torch.Tensor] | None = (target, source)
        """Target and source."""
        self._device = source.device if target.device.type == "cpu" else target.device
        self._after, self._now = after, now
        """What to wait for: on the host, and on the device (an event; None on a CPU)."""
        self._issued = Event()
        self._over: Any = None
        """The end of the copy on the device; None on a CPU, where the copy is over when it is issued."""
        self._flight = flight
        """The recorder of the copy."""
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Makes the device's current stream wait for the end of the copy, and then it may read the target and reuse the
        source. The host waits only until the copy is issued, on a CPU until it is over; before it uses a target of its
        own, it calls :meth:`done`. Raises what ``after`` or the copy raised."""
        self._issued.wait()
        if self._error is not None:
            raise self._error
        if self._over is not None:
            torch.get_device_module(self._device).current_stream(self._device).wait_event(self._over)
        self.tensors = None

    def done(self) -> None:
        """Blocks the host until the copy is over, and raises what :meth:`wait` raises."""
        self.wait()
        if self._over is not None:
            self._over.synchronize()

    def _run(self, copy: "Copy", stream: Any) -> None:
        """Copies in the direction's thread; on a device, in the direction's ``stream``."""
        assert self.tensors is not None, "nobody has waited for it yet"
        try:
            if self._after is not None:
                self._after()
            with self._recorded(stream), torch.no_grad():
                self._over = copy(*self.tensors, self._now)
        except BaseException as error:
            self._error = error
        self._issued.set()

    @contextmanager
    def _recorded(self, stream: Any) -> Iterator[None]:
        """Tells the recorder when the copy begins and ends, on a device by the clock of its stream."""
        if self._flight is None:
            yield
            return
        there = nullcontext if stream is None else partial(torch.get_device_module(self._device).stream, stream)
        with there():
            if stream is not None:
                # A free stream would record the beginning before the copy may start.
                stream.wait_event(self._now)
            self._flight.begin()
        try:
            yield
        finally:
            with there():
                self._flight.end()


def event_now(device: torch.device) -> Any:
    """Returns an event after all work of the device's current stream; None on a CPU."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    event = module.Event()
    event.record(module.current_stream(device))
    return event


def use_device(device: torch.device) -> None:
    """Makes ``device`` the current one of the calling thread. A new thread begins with the node's first device, where
    every rank of the node would take some memory."""
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)


class Bus:
    """Copies tensors between host and device and counts the bytes.

    Args:
        device: where loads go to and stores come from.
        bytes_per_second: the speed of each direction, for tests and benchmarks on a CPU: a copy takes at least the time
            of its bytes. None copies as fast as the memory does.
        disk: the home of tensors that are copied through buffers of the host; None if there is none.

    Raises:
        ValueError: ``bytes_per_second`` is not positive, or is given for an accelerator.
    """

    def __init__(self, device: torch.device, bytes_per_second: float | None = None, disk: Disk | None = None) -> None:
        if bytes_per_second is not None and (bytes_per_second <= 0 or device.type != "cpu"):
            raise ValueError(
                f"bytes_per_second is {bytes_per_second} on {device}; use a positive number on a CPU, None elsewhere"
            )
        self.device, self.disk = device, disk
        self.room = HostRoom(pinned=device.type != "cpu")
        """The memory of the host that copies read and write."""
        self.bytes_loaded = self.bytes_stored = 0
        """Bytes of all copies that have begun."""
        module = torch.get_device_module(device)
        streams = [None if device.type == "cpu" else module.Stream(device) for _ in range(2)]
        copies = [
            _copy_here(bytes_per_second) if stream is None else _copy_beside(module, stream) for stream in streams
        ]
        if disk is not None:
            load, store = (InPieces(disk, device.type != "cpu", copy) for copy in copies)
            copies = [load.load, store.store]
        self._loads, self._stores = (_Lane(device, *pair) for pair in zip(copies, streams))

    def load(self, target: torch.Tensor, source: torch.Tensor, after: Callable[[], None] | None = None) -> Transfer:
        """Starts the copy of ``source`` on the host to ``target`` on the device, after all loads so far and all work of
        the device's current stream. The caller leaves both alone until it has waited.

        Args:
            target: on the device.
            source: on the host, from ``room``, or on the disk; of the target's shape and dtype.
            after: what the transfer's thread calls before the copy. It returns when the source is final.

        Raises:
            ValueError: shapes or dtypes differ.
        """
        _require_alike(target, source)
        self.bytes_loaded += target.nbytes
        flight = launched("load", target.nbytes)
        return self._loads.start(Transfer(target, source, after, event_now(self.device), flight))

    def store(self, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        """Starts the copy of ``source`` on the device to ``target`` on the host, as :meth:`load` does the other way."""
        _require_alike(target, source)
        self.bytes_stored += target.nbytes
        flight = launched("store", target.nbytes)
        return self._stores.start(Transfer(target, source, None, event_now(self.device), flight))


class _Lane:
    """One direction: a thread that runs transfers in order. It begins with the first and ends with the lane."""

    def __init__(self, device: torch.device, copy: Copy, stream: Any) -> None:
        self._device, self._copy, self._stream = device, copy, stream
        self._queue: SimpleQueue[Transfer | None] | None = None

    def start(self, transfer: Transfer) -> Transfer:
        if self._queue is None:
            self._queue = SimpleQueue()
            weakref.finalize(self, self._queue.put, None)
            served = self._queue, self._device, self._copy, self._stream
            Thread(target=_serve, args=served, name="ds_lgamp bus", daemon=True).start()
        self._queue.put(transfer)
        return transfer


def _serve(queue: "SimpleQueue[Transfer | None]", device: torch.device, copy: Copy, stream: Any) -> None:
    use_device(device)
    while (transfer := queue.get()) is not None:
        transfer._run(copy, stream)
        # The thread must not keep the tensors alive while it waits for the next transfer.
        del transfer


def _copy_here(bytes_per_second: float | None) -> Copy:
    """Returns the function that copies from one pool of main memory to the other."""

    def copy(target: torch.Tensor, source: torch.Tensor, _: Any) -> None:
        start = time.perf_counter()
        target.copy_(source)
        if bytes_per_second is not None:
            end = start + target.nbytes / bytes_per_second
            time.sleep(max(0.0, end - time.perf_counter()))

    return copy


def _copy_beside(module: Any, stream: Any) -> Copy:
    """Returns the function that copies on a stream of the device."""

    def copy(target: torch.Tensor, source: torch.Tensor, now: Any) -> Any:
        with module.stream(stream):
            stream.wait_event(now)
            target.copy_(source, non_blocking=True)
            over = module.Event()
            over.record(stream)
        return over

    return copy


def _require_alike(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.shape != source.shape or target.dtype != source.dtype:
        raise ValueError(
            f"the target has {list(target.shape)} elements of {target.dtype}, the source {list(source.shape)} of "
            f"{source.dtype}; copy between tensors of one shape and dtype"
        )


class InPieces:
    """Copies tensors that may lie on a disk, through a few buffers of the host. They are taken with the first tensor on
    the disk.

    Args:
        copy: carries what lies in memory over the bus.
    """

    def __init__(self, disk: Disk, pinned: bool, copy: Copy) -> None:
        self.disk, self.copy, self._pinned = disk, copy, pinned
        self._memory: torch.Tensor | None = None

    def load(self, target: torch.Tensor, source: torch.Tensor, now: Any) -> Any:
        if not self.disk.holds(source):
            return self.copy(target, source, now)
        reading: deque[tuple[Moving, torch.Tensor, torch.Tensor]] = deque()
        pieces = self._pieces(target)
        try:
            while pieces or reading:
                while pieces and len(reading) < disks.PIECES:
                    start, piece, buffer = pieces.popleft()
                    reading.append((self.disk.read(source, buffer, start, first=True), piece, buffer))
                moving, piece, buffer = reading.popleft()
                moving.wait()
                self._cross(piece, buffer[: piece.numel()], now)
        finally:
            for moving, _, _ in reading:
                moving.settle()
        return None

    def store(self, target: torch.Tensor, source: torch.Tensor, now: Any) -> Any:
        if not self.disk.holds(target):
            return self.copy(target, source, now)
        writing: deque[Moving] = deque()
        try:
            for start, piece, buffer in self._pieces(source):
                if len(writing) == disks.PIECES:
                    writing.popleft().wait()
                self._cross(buffer[: piece.numel()], piece, now)
                writing.append(self.disk.write(target, buffer, start, first=True))
            while writing:
                writing.popleft().wait()
        finally:
            for moving in writing:
                moving.settle()
        return None

    def _pieces(self, tensor: torch.Tensor) -> "deque[tuple[int, torch.Tensor, torch.Tensor]]":
        """Returns where each piece of ``tensor`` begins, in bytes, its part of the tensor, and its buffer. Pieces take
        turns in the buffers, so a buffer is free when the oldest piece has left."""
        if self._memory is None:
            self._memory = aligned(disks.PIECES * disks.PIECE, self._pinned)
        buffers = itertools.cycle(self._memory.view(disks.PIECES, -1))
        parts = tensor.detach().view(-1).view(torch.uint8).split(disks.PIECE)
        return deque(
            (number * disks.PIECE, part, buffer[: room(part.numel())])
            for number, (part, buffer) in enumerate(zip(parts, buffers))
            if part.numel()
        )

    def _cross(self, target: torch.Tensor, source: torch.Tensor, now: Any) -> None:
        """Copies over the bus, and blocks the thread until the buffer may be used again."""
        over = self.copy(target, source, now)
        if over is not None:
            over.synchronize()
